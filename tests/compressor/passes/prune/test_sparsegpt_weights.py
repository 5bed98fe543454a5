"""SparseGPT's maths: against the method written out, and against masks without compensation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.prune.sparse.patterns import Pattern, n_of_m, pattern_mask, wanda_scores
from compressor.passes.prune.sparse.sparsegpt import curvature, sparsegpt

HALF, TWO_OF_FOUR = Pattern(0.5), n_of_m(2, 4)


def inputs(columns: int, seed: int, correlated: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(4 * columns, columns, generator=random)
    mixed = torch.randn(4 * columns, columns, generator=random) @ torch.randn(
        columns, columns, generator=random
    )
    sizes = torch.rand(columns, generator=random) + 0.1
    return (noise + correlated * mixed / columns**0.5) * sizes


def loss(matrix: Tensor, pruned: Tensor, moment: Tensor) -> float:
    difference = (matrix - pruned).to(torch.float64)
    return float(((difference @ moment.to(torch.float64)) * difference).sum())


def by_the_paper(matrix: Tensor, moment: Tensor, pattern: Pattern) -> Tensor:
    """The method with inverses in place of factors: one for the columns from each one on."""
    columns = matrix.shape[1]
    power = moment.diagonal().to(torch.float64)
    damped = moment.to(torch.float64) + torch.diag(torch.full_like(power, 0.01 * power.mean()))
    inverses = [torch.linalg.inv(damped[j:, j:]) for j in range(columns)]
    left = matrix.to(torch.float64).clone()
    keep = torch.ones_like(left, dtype=torch.bool)
    width = pattern.m or 128
    for j in range(columns):
        if j % width == 0:
            costs = torch.stack([inverse[0, 0] for inverse in inverses[j : j + width]])
            scores = left[:, j : j + width] ** 2 / costs
            if pattern.m:
                keep[:, j : j + width] = pattern_mask(scores, pattern)
            else:
                gone = scores.flatten().argsort()[: round(scores.numel() * pattern.sparsity)]
                chosen = torch.ones(scores.numel(), dtype=torch.bool)
                chosen[gone] = False
                keep[:, j : j + width] = chosen.reshape(scores.shape)
        error = left[:, j].where(~keep[:, j], 0.0)
        left[:, j:] -= error[:, None] * inverses[j][0] / inverses[j][0, 0]
        left[:, j] = left[:, j].where(keep[:, j], 0.0)
    return left.to(torch.float32)


@pytest.mark.parametrize("pattern", [HALF, Pattern(0.8), TWO_OF_FOUR, n_of_m(1, 4), n_of_m(5, 6)])
def test_it_is_the_method_of_the_paper(pattern: Pattern):
    rows = inputs(24, seed=0)
    matrix = torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    moment = rows.T @ rows
    found = curvature(moment)
    assert found is not None
    pruned, wanted = sparsegpt(matrix, found, pattern), by_the_paper(matrix, moment, pattern)
    assert torch.equal(pruned == 0, wanted == 0)
    torch.testing.assert_close(pruned, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", [HALF, TWO_OF_FOUR, n_of_m(3, 6)])
@pytest.mark.parametrize("columns", [128, 132, 264])
def test_blocks_of_columns_pass_their_errors_on(pattern: Pattern, columns: int):
    """Wider than a block, where the masks of the next ones see the errors of the first."""
    columns -= columns % (pattern.m or 1)
    rows = inputs(columns, seed=2)
    matrix = torch.randn(9, columns, generator=torch.Generator().manual_seed(3))
    moment = rows.T @ rows
    found = curvature(moment)
    assert found is not None
    pruned, wanted = sparsegpt(matrix, found, pattern), by_the_paper(matrix, moment, pattern)
    assert float((pruned == 0).float().mean()) == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(pruned == 0, wanted == 0)
    torch.testing.assert_close(pruned, wanted, rtol=1e-2, atol=1e-3)


@given(
    st.sampled_from([HALF, Pattern(0.7), TWO_OF_FOUR, n_of_m(1, 4)]),
    st.integers(2, 6),
    st.integers(0, 999),
)
def test_outputs_change_less_than_with_masks_alone(pattern: Pattern, groups: int, seed: int):
    columns = 16 * groups
    rows = inputs(columns, seed, correlated=2.0)
    moment = rows.T @ rows
    matrix = torch.randn(32, columns, generator=torch.Generator().manual_seed(seed + 1))
    found = curvature(moment)
    assert found is not None
    own = loss(matrix, sparsegpt(matrix, found, pattern), moment)
    for scores in (matrix.abs(), wanda_scores(matrix, moment.diagonal().sqrt())):
        masked = matrix.where(pattern_mask(scores, pattern), 0.0)
        assert own < loss(matrix, masked, moment)


def test_weights_without_input_go_first():
    rows = inputs(8, seed=4)
    rows[:, [1, 2, 5, 6]] = 0
    found = curvature(rows.T @ rows)
    assert found is not None
    matrix = torch.ones(3, 8) + torch.arange(8) / 100
    for pattern in (HALF, TWO_OF_FOUR):
        gone = (sparsegpt(matrix, found, pattern) == 0).all(0)
        assert gone.nonzero()[:, 0].tolist() == [1, 2, 5, 6]


def test_small_inputs_are_inputs():
    rows = 1e-3 * inputs(8, seed=4)
    rows[:, 2] = 0
    found = curvature(rows.T @ rows)
    assert found is not None
    assert (~found.alive).nonzero()[:, 0].tolist() == [2]


def test_halves_are_pruned_as_the_floats_they_are():
    rows = inputs(16, seed=4)
    found = curvature(rows.T @ rows)
    assert found is not None
    half = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pruned = sparsegpt(half, found, TWO_OF_FOUR)
    assert pruned.dtype == torch.float32
    assert torch.equal(pruned, sparsegpt(half.float(), found, TWO_OF_FOUR))
    norms = torch.rand(16, dtype=torch.float64)
    scores = wanda_scores(half, norms)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, wanda_scores(half.float(), norms.float()))


def test_nothing_flowing_in_has_no_curvature():
    assert curvature(torch.zeros(4, 4)) is None
    with pytest.raises(ValueError, match="not finite"):
        curvature(torch.full((4, 4), torch.nan))
    found = curvature(torch.eye(6))
    assert found is not None
    with pytest.raises(ValueError, match="6 columns do not divide into groups of 4"):
        sparsegpt(torch.ones(1, 6), found, TWO_OF_FOUR)


def test_wanda_scores_are_sizes_times_norms():
    matrix = torch.tensor([[1.0, -2.0, 3.0]])
    assert wanda_scores(matrix, torch.tensor([3.0, 2.0, 0.5])).tolist() == [[3.0, 4.0, 1.5]]


def test_without_input_sizes_decide():
    scores = wanda_scores(torch.tensor([[5.0, 1.0, 1e-3, 2.0]]), torch.tensor([0.0, 0, 3, 0]))
    assert scores.argsort(descending=True).tolist() == [[2, 0, 3, 1]]
    assert wanda_scores(torch.tensor([[1.0, -3.0]]), torch.zeros(2)).tolist() == [[1.0, 3.0]]
