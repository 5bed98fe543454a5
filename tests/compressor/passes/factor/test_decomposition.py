"""Truncated decompositions: exact in full rank, best in every other, with and without inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.factor.decomposition import decompose, rank_for, shares

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 1000)


def drawn(seed: int, rows: int, columns: int) -> Tensor:
    """Return a matrix whose singular values fall off."""
    random = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rows, generator=random)
    right = torch.randn(columns, columns, generator=random)
    middle = torch.zeros(rows, columns)
    middle.diagonal().copy_(0.6 ** torch.arange(min(rows, columns)))
    return left @ middle @ right


def inputs(seed: int, columns: int, count: int = 200) -> Tensor:
    """Return correlated vectors of unlike sizes, ``[columns, count]``."""
    random = torch.Generator().manual_seed(seed + 1)
    mixed = torch.randn(columns, columns, generator=random) * 0.5 ** torch.arange(columns)
    return mixed @ torch.randn(columns, count, generator=random)


def squares(x: Tensor) -> float:
    return float(x.to(torch.float64).square().sum())


@settings(max_examples=40)
@given(SIZES, SIZES, SEEDS, st.booleans())
def test_full_rank_is_the_matrix_itself(rows: int, columns: int, seed: int, weighted: bool):
    matrix, seen = drawn(seed, rows, columns), inputs(seed, columns)
    moment = seen @ seen.T if weighted else None
    full = min(rows, columns)
    up, down = decompose(matrix, full, moment).factors(full)
    assert up.shape == (rows, full)
    assert down.shape == (full, columns)
    assert squares(up @ down - matrix) <= 1e-9 * squares(matrix)


@settings(max_examples=40)
@given(SIZES, SIZES, SEEDS)
def test_a_rank_loses_what_the_singular_values_say(rows: int, columns: int, seed: int):
    matrix, full = drawn(seed, rows, columns), min(rows, columns)
    found = decompose(matrix, full)
    values = torch.linalg.svdvals(matrix.to(torch.float64))
    whole = squares(matrix)
    torch.testing.assert_close(found.energies, values.square(), rtol=1e-9, atol=1e-12 * whole)
    for rank in range(1, full + 1):
        up, down = found.factors(rank)
        lost = float(values[rank:].square().sum())
        assert squares(up @ down - matrix) == pytest.approx(lost, rel=1e-4, abs=1e-9 * whole)
        assert 1 - found.kept(rank) == pytest.approx(lost / whole, abs=1e-9)


@settings(max_examples=40)
@given(SIZES, SIZES, SEEDS)
def test_weighted_loses_least_of_the_outputs(rows: int, columns: int, seed: int):
    """Against truncation between Cholesky factors, which the paper does, in double precision."""
    matrix, seen = drawn(seed, rows, columns), inputs(seed, columns)
    moment = seen @ seen.T
    moment = (moment + moment.T) / 2
    found = decompose(matrix, min(rows, columns), moment, damping=1e-3)
    damped = moment.to(torch.float64)
    damped = damped + 1e-3 * damped.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    root = torch.linalg.cholesky(damped)
    wide = matrix.to(torch.float64)
    _, values, _ = torch.linalg.svd(wide @ root)
    whole = float(values.square().sum())
    for rank in range(1, min(rows, columns) + 1):
        up, down = found.factors(rank)
        lost = squares((up.to(torch.float64) @ down.to(torch.float64) - wide) @ root)
        best = float(values[rank:].square().sum())
        assert lost == pytest.approx(best, rel=1e-3, abs=1e-8 * whole)
        assert 1 - found.kept(rank) == pytest.approx(best / whole, abs=1e-8)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_inputs_that_calibration_did_not_see_are_kept_by_the_damping(shape: tuple[int, int]):
    matrix = drawn(3, *shape)
    moment = torch.zeros(shape[1], shape[1])
    moment[0, 0] = 1.0
    up, down = decompose(matrix, 2, moment).factors(2)
    rest = matrix.clone()
    rest[:, 0] = 0
    assert squares((up @ down - matrix)[:, 0]) < 1e-3 * squares(matrix[:, 0])
    assert squares((up @ down)[:, 1:]) > 0.3 * squares(rest)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_no_inputs_at_all_stand_for_all_alike(shape: tuple[int, int]):
    matrix = drawn(3, *shape)
    plain, empty = decompose(matrix, 3), decompose(matrix, 3, torch.zeros(shape[1], shape[1]))
    assert torch.equal(plain.up, empty.up)
    assert torch.equal(plain.down, empty.down)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_more_ranks_are_kept_than_are_needed(shape: tuple[int, int], weighted: bool):
    found = decompose(drawn(3, *shape), 2, torch.eye(shape[1]) if weighted else None)
    assert (found.up.shape[1], len(found.down), len(found.energies)) == (2, 2, 6)


@settings(max_examples=40)
@given(SIZES, SIZES, SEEDS)
def test_factors_are_balanced_and_do_not_depend_on_signs(rows: int, columns: int, seed: int):
    found = decompose(drawn(seed, rows, columns), min(rows, columns))
    torch.testing.assert_close(found.up.norm(dim=0), found.down.norm(dim=1), rtol=1e-4, atol=1e-6)
    largest = found.up.abs().argmax(0)
    assert bool((found.up[largest, torch.arange(found.up.shape[1])] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factors_have_the_type_of_the_weight(dtype: torch.dtype):
    matrix = drawn(5, 8, 6).to(dtype)
    up, down = decompose(matrix, 6).factors(6)
    assert up.dtype == down.dtype == dtype
    product = up.to(torch.float64) @ down.to(torch.float64)
    assert squares(product - matrix) < 100 * torch.finfo(dtype).eps ** 2 * squares(matrix)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_a_matrix_of_zeros(shape: tuple[int, int]):
    found = decompose(torch.zeros(shape), 2)
    assert found.kept(1) == 1.0
    assert rank_for(found.energies, 0.9) == 1
    up, down = found.factors(2)
    assert not (up @ down).any()
    assert bool(torch.isfinite(up).all() and torch.isfinite(down).all())


def test_the_rank_for_a_share():
    energies = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    assert shares(energies).tolist() == pytest.approx([0.4, 0.7, 0.9, 1.0, 1.0])
    wanted = {0.01: 1, 0.4: 1, 0.41: 2, 0.7: 2, 0.9: 3, 0.91: 4, 1.0: 4}
    for scale in (1.0, 0.01):
        assert {share: rank_for(scale * energies, share) for share in wanted} == wanted
    product = drawn(1, 12, 3) @ drawn(2, 3, 10)
    assert rank_for(decompose(product.to(torch.float64), 1).energies, 1.0) == 3


def test_what_is_refused():
    matrix = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"moment \[3, 3\] does not fit 4 columns"):
        decompose(matrix, 2, torch.eye(3))
    with pytest.raises(ValueError, match="not finite"):
        decompose(matrix, 2, torch.full((4, 4), torch.nan))
    for rank in (0, 3):
        with pytest.raises(ValueError, match=f"rank {rank} is not from 1 to 2"):
            decompose(matrix, 2).factors(rank)
