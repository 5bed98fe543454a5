"""Descent over orthogonal matrices, and the gradient of rounding."""

from __future__ import annotations

import pytest
import torch

from compressor.passes.prepare.maths.orthogonal import OrthogonalDescent, Rounding
from compressor.passes.prepare.maths.rotation import DenseRotation, rotation


def random_rotation(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def test_steps_stay_orthogonal_and_come_near_to_a_matrix() -> None:
    wanted, one = random_rotation(12, 0), torch.eye(12, dtype=torch.float64)
    near = torch.linalg.matrix_exp(0.1 * (one.roll(1, 1) - one.roll(1, 0)))
    descent = OrthogonalDescent(wanted @ near)
    distances = []
    for step in range(60):
        difference = descent.matrix - wanted
        distances.append(float(difference.norm()))
        descent.step(2 * difference, 0.05 * (1 - step / 60))
        assert torch.allclose(descent.matrix @ descent.matrix.T, one, atol=1e-12)
    assert distances[-1] < 0.2 * distances[0]


def test_the_angle_is_how_far_axes_turn() -> None:
    descent = OrthogonalDescent(random_rotation(16, 1))
    before = descent.matrix
    descent.step(random_rotation(16, 2), 0.01)
    moved = (descent.matrix - before).square().sum(1).mean().sqrt()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_momentum_is_a_mean_and_is_taken_up_again() -> None:
    """A mean of equal gradients is one of them."""
    matrix, gradient = random_rotation(6, 1), random_rotation(6, 2)
    product = gradient @ matrix.T
    descent = OrthogonalDescent(matrix, product - product.T)
    descent.step(gradient, 0.1)
    assert torch.allclose(descent.momentum, product - product.T)


def test_without_a_gradient_nothing_moves() -> None:
    descent = OrthogonalDescent(before := random_rotation(4, 3))
    descent.step(torch.zeros(4, 4), 0.1)
    assert torch.equal(descent.matrix, before)


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("middle", [0.0, 5.0])  # around zero, and all above it
def test_errors_grow_with_the_range_of_their_group(
    group: int | None, symmetric: bool, middle: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 8, generator=generator, dtype=torch.float64) + middle
    values = values / (1 + middle)
    share = torch.rand(3, 8, generator=generator, dtype=torch.float64) - 0.5
    weights = torch.randn(3, 8, generator=generator, dtype=torch.float64)

    def nearest(values: torch.Tensor) -> torch.Tensor:
        # Of this rounding, what is assumed is true: the error is a fixed share of the range.
        groups = values.reshape(3, -1, group or 8)
        span = groups.abs().amax(-1, keepdim=True)
        if not symmetric:
            span = groups.amax(-1, keepdim=True).clamp(min=0) - groups.amin(-1, keepdim=True).clamp(
                max=0
            )
        return values + (span * share.reshape(groups.shape)).reshape(values.shape)

    rounding = Rounding(nearest, group, symmetric)
    leaf = values.clone().requires_grad_()
    got = rounding(leaf)
    assert torch.equal(got.detach(), nearest(values))
    (gradient,) = torch.autograd.grad((got * weights).sum(), leaf)
    for place in [(0, 0), (1, 5), (2, 7)]:
        step = torch.zeros_like(values)
        step[place] = 1e-6
        change = (nearest(values + step) - nearest(values - step)) * weights
        assert float(gradient[place]) == pytest.approx(float(change.sum()) / 2e-6, rel=1e-6)


def test_values_of_more_axes_are_rounded_row_by_row() -> None:
    values = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounding = Rounding(torch.round)
    got, rows = rounding(values), torch.cat([rounding(part) for part in values])
    assert torch.equal(got.reshape(6, 8), rows)
    gradients = [torch.autograd.grad(x.square().sum(), values)[0] for x in (got, rows)]
    assert torch.allclose(*gradients)


def test_a_range_of_zero_has_a_gradient() -> None:
    leaf = torch.zeros(2, 4, requires_grad=True)
    Rounding(torch.round, 2)(leaf).sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


def test_a_dense_rotation_is_its_matrix() -> None:
    made, rows = rotation(12, 0), torch.randn(5, 12, dtype=torch.float64)
    dense = DenseRotation(made.times(torch.eye(12)))
    torch.testing.assert_close(dense.times(rows), made.times(rows))
    torch.testing.assert_close(dense.rotated_rows(rows.T), made.rotated_rows(rows.T))
    assert len(dense) == len(made) == 12
