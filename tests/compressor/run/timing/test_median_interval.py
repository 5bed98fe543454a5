"""The interval of a median over groups."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compressor.run.timing.timing import median_interval

VALUES = arrays(np.float64, st.integers(1, 6), elements=st.integers(-50, 50).map(float))


def grouped(rng: np.random.Generator, count: int, between: float, size: int) -> list[np.ndarray]:
    """Draw groups around 0; values of one share what their group has of its own."""
    own = between * rng.standard_normal(count)
    return [own[k] + rng.standard_cauchy(size) for k in range(count)]


@pytest.mark.parametrize(("count", "level"), [(6, 0.95), (7, 0.95), (9, 0.97)])
def test_coverage_is_exact_over_all_signs_of_groups(count: int, level: float):
    """Whatever the groups are, each choice of their signs is as likely as any other."""
    groups = grouped(np.random.default_rng(count), count, 5.0, 4)
    bounds = [
        median_interval([s * g for s, g in zip(signs, groups, strict=True)], level)
        for signs in product((-1.0, 1.0), repeat=count)
    ]
    assert np.mean([low <= 0 <= high for low, high in bounds]) >= level


@pytest.mark.parametrize("between", [0.0, 3.0])
@pytest.mark.parametrize("count", [8, 20])
def test_coverage_and_width_with_groups_that_differ(between: float, count: int):
    rng = np.random.default_rng(1)
    bounds = [median_interval(grouped(rng, count, between, 15), 0.95) for _ in range(200)]
    held = np.mean([low <= 0 <= high for low, high in bounds])
    # 0.95 less three standard errors; more than that where few groups allow few probabilities.
    assert 0.90 <= held <= 0.995
    if not between:
        # A median of n Cauchy values has the standard error pi / (2 sqrt(n)).
        plain = 2 * 1.96 * np.pi / 2 / np.sqrt(15 * count)
        assert np.median([high - low for low, high in bounds]) < 1.5 * plain


def test_wild_values_do_not_widen_it():
    rng = np.random.default_rng(2)
    groups = [0.01 * rng.standard_normal(40) for _ in range(12)]
    for group in groups:
        group[::3] += 1e3 * rng.choice([-1, 1], group[::3].size)
    low, high = median_interval(groups, 0.95)
    assert -0.01 < low < high < 0.01


@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(-50, 50))
def test_the_interval_holds_the_median_and_moves_with_the_values(groups, shift):
    low, high = median_interval(groups, 0.95)
    pooled = np.concatenate(groups)
    assert pooled.min() <= low <= np.median(pooled) <= high <= pooled.max()
    assert median_interval([g + shift for g in groups], 0.95) == (low + shift, high + shift)
    wide = median_interval(groups, 0.99)
    assert wide[0] <= low
    assert wide[1] >= high


def test_too_few_groups_give_all_there_is():
    assert median_interval([np.array([3.0, 1.0]), np.array([2.0])], 0.95) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("level", "bounds"), [(0.9687, (2.0, 6.0)), (0.96875, (2.0, 6.0)), (0.9688, (1.0, 7.0))]
)
def test_every_choice_of_signs_is_tried_for_up_to_ten_groups(
    level: float, bounds: tuple[float, float]
):
    """The extremes of seven values are left out by 4 of 128 choices: 0.03125."""
    assert median_interval([np.array([float(k)]) for k in range(1, 8)], level) == bounds


def test_drawn_choices_come_near_for_more():
    """24 of 2048 choices leave 2 out of twelve values, 134 leave 3 out: 0.012 and 0.065."""
    groups = [np.array([float(k)]) for k in range(1, 13)]
    assert median_interval(groups, 0.97) == (3.0, 10.0)


def test_at_no_level_the_interval_is_the_median():
    for count in (1, 3, 5, 7):
        groups = [np.array([float(k)]) for k in range(count)]
        assert median_interval(groups, 0.0) == (count // 2, count // 2)
    assert median_interval([np.array([float(k)]) for k in range(4)], 0.0) == (1.0, 2.0)
