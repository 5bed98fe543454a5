"""Masks from scores: how many stay, that they are the highest, and which of equal ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.prune.sparse.patterns import (
    Pattern,
    column_order,
    group_mask,
    n_of_m,
    pattern_mask,
    row_mask,
    whole_mask,
)


@st.composite
def scores(draw: st.DrawFn, multiple: int = 1) -> Tensor:
    """Few different values, so that many are equal."""
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(0, 5, (rows, groups * multiple), generator=random).float()


@given(st.data(), st.integers(1, 8), st.integers(1, 8))
def test_the_highest_of_each_group_stay(data: st.DataObject, n: int, more: int):
    m = n + more
    given_scores = data.draw(scores(m))
    mask = group_mask(given_scores, n, m).reshape(-1, m)
    groups = given_scores.reshape(-1, m)
    assert bool((mask.sum(1) == n).all())
    lowest_kept = groups.where(mask, torch.inf).min(1).values
    highest_gone = groups.where(~mask, -torch.inf).max(1).values
    assert bool((lowest_kept >= highest_gone).all())


@pytest.mark.parametrize("m", [4, 16, 17, 32])  # groups of more than 16 are sorted
def test_groups_wide_and_many_keep_their_highest(m: int):
    """More groups than are compared at once: 2 to the 16th."""
    random = torch.Generator().manual_seed(m)
    found = torch.randint(0, 5, (300, 220 * m), generator=random).float()
    mask = group_mask(found, 2, m).reshape(-1, m)
    best = found.reshape(-1, m).topk(2).values.sort().values
    kept = found.reshape(-1, m)[mask].reshape(-1, 2).sort().values
    assert torch.equal(kept, best)
    ties = found - torch.arange(found.shape[1]) * 1e-4
    assert torch.equal(group_mask(ties.double(), 2, m).reshape(-1, m), mask)


@given(scores(4))
def test_of_equal_scores_the_left_one_stays(given_scores: Tensor):
    mask = group_mask(given_scores, 2, 4)
    places = torch.arange(given_scores.shape[1]).flip(0) * 1e-3
    assert torch.equal(mask, group_mask(given_scores + places, 2, 4))


@given(scores(), st.floats(0.01, 0.99))
def test_rows_and_whole_matrices_keep_as_many_as_was_said(given_scores: Tensor, sparsity: float):
    rows, columns = given_scores.shape
    assert bool(
        (row_mask(given_scores, sparsity).logical_not().sum(1) == round(columns * sparsity)).all()
    )
    whole = whole_mask(given_scores, sparsity)
    assert int(whole.logical_not().sum()) == round(rows * columns * sparsity)
    if bool(whole.any()) and not bool(whole.all()):
        assert float(given_scores[whole].min()) >= float(given_scores[~whole].max())


def test_a_pattern_is_groups_or_rows():
    given_scores = torch.tensor([[1.0, 2, 3, 4, 9, 8, 7, 6]])
    assert pattern_mask(given_scores, n_of_m(1, 4)).tolist() == [
        [False, False, False, True, True, False, False, False]
    ]
    assert pattern_mask(given_scores, Pattern(0.5)).tolist() == [[False] * 4 + [True] * 4]
    assert str(n_of_m(2, 4)) == "2:4"
    assert n_of_m(1, 4).sparsity == 0.75
    assert str(Pattern(0.5)) == "50 % sparse"


def test_columns_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 columns do not divide into groups of 4"):
        group_mask(torch.ones(1, 6), 2, 4)


def test_groups_of_a_convolution_are_channels_at_one_position():
    weight = torch.arange(8 * 2 * 3).reshape(1, 8, 2, 3)
    found = weight.reshape(-1)[column_order(torch.arange(8), 6)].reshape(6, 8)
    for index, channels in enumerate(found):
        assert torch.equal(channels, weight[0, :, index // 3, index % 3])
    turned = column_order(torch.tensor([1, 0, 2]), 2)
    assert turned.tolist() == [2, 0, 4, 3, 1, 5]
