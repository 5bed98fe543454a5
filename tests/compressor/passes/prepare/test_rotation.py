"""Hadamard matrices of Sylvester and Paley, and rotations made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prepare.maths.rotation import paley, principal_components, rotation


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
    assert torch.allclose(made.turned_rows(one), matrix.T, atol=1e-12)
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
