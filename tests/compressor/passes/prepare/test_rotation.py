"""Hadamard matrices of Sylvester and Paley, and rotations made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prepare.maths.rotation import (
    components_beside_mean,
    helmert,
    paley,
    principal_components,
    rotation,
)


@pytest.mark.parametrize("size", [4, 12, 20, 24, 28, 36, 44, 60, 76])
def test_paley_gives_hadamard_matrices(size: int) -> None:
    found = paley(size)
    assert found is not None
    assert torch.equal(found.abs(), torch.ones(size, size, dtype=torch.float64))
    assert torch.equal(found @ found.T, size * torch.eye(size, dtype=torch.float64))


def test_sizes_that_paley_has_not() -> None:
    assert [size for size in range(4, 100, 4) if paley(size) is None] == [
        *(16, 40, 52, 56, 64, 88, 92, 96),
    ]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(0, 5))
def test_rotations_are_orthogonal(size: int, seed: int) -> None:
    made, one = rotation(size, seed), torch.eye(size, dtype=torch.float64)
    matrix = made.times(one)
    assert torch.allclose(matrix @ matrix.T, one, atol=1e-12)
    assert torch.allclose(made.back(one), matrix.T, atol=1e-12)
    assert torch.allclose(made.rotated_rows(one), matrix.T, atol=1e-12)
    assert torch.equal(made.back(one.to(torch.float32)), made.back(one))


@pytest.mark.parametrize("size", [9, 24])  # with a random matrix, and with Paley's
def test_a_seed_decides(size: int) -> None:
    one = torch.eye(size)
    made, again, other = (rotation(size, seed).times(one) for seed in (0, 0, 1))
    assert torch.equal(made, again)
    assert not torch.allclose(made, other)
    assert set(rotation(size, 0).signs.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(
    ("size", "small"), [(12, 12), (64, 1), (96, 12), (160, 20), (448, 28), (896, 28)]
)
def test_a_single_channel_is_spread_over_all(size: int, small: int) -> None:
    made = rotation(size, 1)
    spread = made.times(torch.eye(size))
    assert torch.allclose(spread.abs(), torch.full_like(spread, size**-0.5))
    assert len(made.small) == small  # Paley's smallest, and Sylvester's around it


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), rank=st.integers(1, 40), seed=st.integers(0, 5))
def test_principal_components_are_uncorrelated_and_sorted(size: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((rank, size), generator=generator, dtype=torch.float64)
    moment = rows.T @ rows
    turn, powers = principal_components(moment)
    one = torch.eye(size, dtype=torch.float64)
    assert torch.allclose(turn.matrix @ turn.matrix.T, one, atol=1e-10)
    seen = turn.times(rows)
    assert torch.allclose(seen.T @ seen, torch.diag(powers), atol=1e-8)
    assert (powers >= 0).all()
    assert (powers.diff() <= 0).all()
    assert (powers[rank:] < 1e-9 * powers[0]).all()
    largest = turn.matrix.abs().argmax(0, keepdim=True)
    assert (turn.matrix.gather(0, largest) > 0).all()


def test_bases_of_narrow_moments_are_wide_and_so_is_what_they_turn() -> None:
    rows = torch.randn((40, 6), generator=torch.Generator().manual_seed(0))
    moment = rows.T @ rows
    for found, of in ((principal_components, rows), (components_beside_mean, rows + 1)):
        turn, powers = found(moment)
        exact, exact_powers = found(moment.double())
        assert torch.equal(turn.matrix, exact.matrix)
        assert torch.equal(powers, exact_powers)
        assert torch.equal(turn.times(of), of.double() @ exact.matrix)
        assert torch.equal(turn.rotated_rows(of.T), exact.matrix.T @ of.T.double())


def layer_norm(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], eps=0)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_helmert_is_a_basis_of_what_has_no_mean(size: int) -> None:
    basis = helmert(size)
    assert torch.allclose(basis.T @ basis, torch.eye(size - 1, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(basis.sum(0), torch.zeros(size - 1, dtype=torch.float64), atol=1e-12)
    assert torch.equal(basis.tril(-2), torch.zeros_like(basis))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 12), seed=st.integers(0, 5))
def test_a_layer_norm_commutes_with_components_beside_the_mean(size: int, seed: int) -> None:
    normal = torch.randn((40, size), generator=torch.Generator().manual_seed(seed)).double()
    rows = 3 + normal @ torch.diag(torch.arange(1.0, size + 1).double())
    turn, powers = components_beside_mean(rows.T @ rows)
    one = torch.eye(size, dtype=torch.float64)
    assert torch.allclose(turn.matrix @ turn.matrix.T, one, atol=1e-12)
    assert torch.allclose(layer_norm(turn.times(rows)), turn.times(layer_norm(rows)), atol=1e-9)
    ones = torch.ones(size, dtype=torch.float64)
    assert torch.allclose(turn.times(ones), ones, atol=1e-12)  # so the mean is left alone
    centred = rows - rows.mean(1, keepdim=True)
    assert powers[1:].sum().item() == pytest.approx(float(centred.square().sum()))
    assert powers[0] == powers[1]
    assert (powers.diff() <= 1e-9).all()


@pytest.mark.parametrize("left", [2, 3, 5, 8])
def test_the_first_channels_hold_the_first_components(left: int) -> None:
    """Any number of them, less their own mean, has the power of one component fewer, the best."""
    rows = torch.randn((60, 9), generator=torch.Generator().manual_seed(3)).double()
    rows = 5 + rows @ torch.diag(torch.arange(1.0, 10).double())
    turn, powers = components_beside_mean(rows.T @ rows)
    first = turn.times(rows)[:, :left]
    held = (first - first.mean(1, keepdim=True)).square().sum()
    assert held.item() == pytest.approx(float(powers[1:left].sum()))
    centred = rows - rows.mean(1, keepdim=True)
    best = torch.linalg.svdvals(centred).square()[: left - 1].sum()
    assert held.item() == pytest.approx(float(best))
