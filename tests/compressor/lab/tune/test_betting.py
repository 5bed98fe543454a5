"""The sequential test: how often it errs, and how soon it sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.lab.tune.betting import ALPHA, found_above, log_wealth

SEQUENCES, SAMPLES = 300, 1500


def losses(seed: int, lost: float, won: float) -> np.ndarray:
    """Return answers lost (1), won (-1) and kept (0)."""
    drawn = np.random.default_rng(seed).random(SAMPLES)
    return np.where(drawn < lost, 1.0, np.where(drawn < lost + won, -1.0, 0.0))


@pytest.mark.parametrize("won", [0.0, 0.02, 0.1])
def test_one_that_keeps_the_limit_is_seldom_dropped(won: float):
    # Its true drop is the limit itself, the worst case; every sample is looked at.
    found = [found_above(losses(s, 0.01 + won, won), 0.01) for s in range(SEQUENCES)]
    share = np.mean([f is not None for f in found])
    assert share <= ALPHA + 2 * (ALPHA * (1 - ALPHA) / SEQUENCES) ** 0.5


def test_a_bad_one_is_dropped_after_some_hundred_samples():
    found = [found_above(losses(s, 0.10, 0.02), 0.01) for s in range(40)]
    assert all(f is not None for f in found)
    assert np.median([f for f in found if f is not None]) < 400


def test_the_number_is_where_the_stake_first_suffices():
    values = losses(0, 0.2, 0.0)
    number = found_above(values, 0.01)
    assert number is not None
    assert found_above(values[: number - 1], 0.01) is None
    assert found_above(values[:number], 0.01) == number


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_nobody_becomes_bankrupt_and_the_past_stays(values: list[float], bound: float):
    wealth = log_wealth(np.array(values), bound)
    assert np.isfinite(wealth).all()
    assert np.array_equal(log_wealth(np.array(values[:-1]), bound), wealth[:-1])
