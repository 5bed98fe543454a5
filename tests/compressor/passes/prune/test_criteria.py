"""Scores of units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.criteria import (
    average,
    magnitude,
    normalized,
    position_sums,
    powers,
    unit_means,
    unit_sums,
)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_along_an_axis(axis, dtype):
    weight = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    rest = [i for i in range(3) if i != axis]
    for norm, wanted in ((1, weight.double().abs()), (2, weight.double().square())):
        found = position_sums(powers(weight, norm), axis)
        assert found == pytest.approx(wanted.sum(rest).numpy(), rel=1e-6)


def test_vectors_have_no_other_axes():
    assert position_sums(powers(torch.tensor([1.0, -2.0]), 2), 0).tolist() == [1, 4]


def test_squares_of_half_precision_do_not_overflow():
    assert powers(torch.full((1,), 1000.0, dtype=torch.float16), 2).item() == 1e6


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=30))
def test_units_gather_their_positions(owners):
    axis = np.array(owners, np.int64)
    values = np.arange(1.0, len(owners) + 1)
    sums, means = unit_sums(values, axis, 6), unit_means(values, axis, 6)
    for unit in range(6):
        own = values[axis == unit]
        assert sums[unit] == own.sum()
        assert means[unit] == pytest.approx(own.mean() if own.size else 0)


def test_magnitude_is_the_norm_over_all_members():
    # Two members of a group: a unit's weights (3, 4) in one and (12) in the other.
    terms = [np.array([9.0 + 16.0, 1.0]), np.array([144.0, 1.0])]
    assert magnitude(terms).tolist() == pytest.approx([13**2 / 2, 1])
    assert magnitude([np.array([7.0]), np.array([12.0])]).tolist() == [9.5]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_normalized_scores_do_not_depend_on_scale(scores, factor):
    values = np.array(scores)
    assert normalized(values).mean() == pytest.approx(1)
    assert normalized(factor * values) == pytest.approx(normalized(values))


def test_nothing_to_normalize():
    assert normalized(np.zeros(3)).tolist() == [0, 0, 0]
    assert normalized(np.zeros(0)).size == 0


def test_members_of_different_units_weigh_the_same():
    assert average([np.array([1.0, 3.0]), np.array([300.0, 100.0])]).tolist() == [1, 1]
    assert average([np.array([1.0, 3.0]), np.array([100.0, 300.0])]).tolist() == [0.5, 1.5]


def test_sums_are_exact_in_float64():
    ones = torch.full((2, 3), 2.0**24)
    ones[:, 1:] = 1
    assert position_sums(ones, 0).tolist() == [2**24 + 2] * 2
    assert position_sums(torch.ones(3, dtype=torch.float16), 0).dtype == np.float64
    fine = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    assert powers(fine, 1).item() == 1 + 2.0**-40
