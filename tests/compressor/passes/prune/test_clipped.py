"""Targets that an activation clips: what they bound, and that solving for them never does worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.maths.least_squares import (
    Start,
    Sums,
    clipped_targets,
    solve,
    solved_again,
)

NUMBERS = st.floats(-8, 8, width=32)
BOUNDS = st.sampled_from([(0.0, float("inf")), (0.0, 6.0), (-float("inf"), 1.0)])


@given(
    target=NUMBERS,
    now=NUMBERS,
    other=NUMBERS,
    scale=st.sampled_from([-2.0, 0.5, 1.0]),
    offset=st.floats(-3, 3),
    bounds=BOUNDS,
)
def test_the_error_to_the_targets_bounds_that_behind_the_activation(
    target, now, other, scale, offset, bounds
):
    t, y, z, s, o = (
        torch.tensor(x, dtype=torch.float64) for x in (target, now, other, scale, offset)
    )
    moved = clipped_targets(t, y, s, o, *bounds)

    def clipped(output: torch.Tensor) -> torch.Tensor:
        return (s * output + o).clamp(*bounds)

    def bound(output: torch.Tensor) -> float:
        return float((s * (output - moved)).square())

    for output in (y, z):
        assert float((clipped(output) - clipped(t)).square()) <= bound(output) + 1e-9
    assert bound(y) <= float((s * (y - t)).square()) + 1e-9


def test_what_a_layer_gives_beyond_a_bound_is_no_error():
    inf = float("inf")
    t, y = torch.tensor([-1.0, -1.0, 3.0, 9.0]), torch.tensor([-5.0, 2.0, -2.0, 7.0])
    one, none = torch.ones(4), torch.zeros(4)
    assert clipped_targets(t, y, one, none, 0.0, 6.0).tolist() == [-5.0, 0.0, 3.0, 7.0]
    assert clipped_targets(t, y, -one, none, 0.0, inf).tolist() == [-1.0, -1.0, 0.0, 7.0]
    assert clipped_targets(t, y, none, none, 0.0, inf).tolist() == t.tolist()


def _problem(samples: int) -> tuple[torch.Tensor, torch.Tensor, Start]:
    """Six inputs of a layer that had eight, and its outputs before a ReLU."""
    torch.manual_seed(3)
    inputs = torch.randn(samples, 8, dtype=torch.float64) @ torch.randn(8, 8).double()
    weight = torch.randn(4, 8, dtype=torch.float64)
    rest = Start(weight[:, :6], torch.zeros(4).double(), True, torch.ones(4).double())
    return inputs[:, :6], inputs @ weight.T, rest


@pytest.mark.parametrize("samples", [6, 400])
def test_solving_again_gains_behind_the_activation(samples):
    """Of few samples, pairs are kept and not their products."""
    inputs, targets, start = _problem(samples)
    cut, one = samples // 2, torch.ones(4).double()
    halves = [(inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])]
    sums = [Sums(6, 4) for _ in halves]
    for each, pair in zip(sums, halves, strict=True):
        each.add(*pair)
    first = fit = solve(start, sums)

    def behind(weight: torch.Tensor, bias: torch.Tensor) -> float:
        outputs = (inputs @ weight.T + bias).clamp(min=0)
        return float((outputs - targets.clamp(min=0)).square().sum())

    errors = [behind(fit.weight, fit.bias)]
    for _ in range(5):
        sums = [each.again() for each in sums]
        for each, (x, t) in zip(sums, halves, strict=True):
            now = x @ fit.weight.T + fit.bias
            each.add(x, clipped_targets(t, now, one, 0 * one, 0.0, float("inf")))
        fit = solved_again(start, sums, fit)
        errors.append(behind(fit.weight, fit.bias))
        assert errors[-1] <= fit.after * first.variance + 1e-9
    assert fit.before == first.before
    assert fit.after <= first.after
    if samples == 400:
        assert errors[-1] < 0.98 * errors[0]


@pytest.mark.parametrize("samples", [3, 40])
def test_sums_of_the_same_inputs_take_other_targets(samples):
    torch.manual_seed(0)
    inputs, first, second = (torch.randn(samples, n).double() for n in (8, 2, 2))
    sums, fresh = Sums(8, 2), Sums(8, 2)
    sums.add(inputs, first)
    again = sums.again()
    for rows in (slice(None, 2), slice(2, None)):
        again.add(inputs[rows], second[rows])
        fresh.add(inputs[rows], second[rows])
    for name in ("inputs", "cross", "input_sum", "target_sum", "power"):
        torch.testing.assert_close(getattr(again, name), getattr(fresh, name))
    assert again.count == fresh.count == samples
