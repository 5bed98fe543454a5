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


@pytest.mark.parametrize(
    ("bound", "alpha", "expected"),
    # Equation (26), worked out in decimal numbers of 40 digits; at 0.4 a bet is cut to 1.25.
    [
        (0.05, 0.05, [0.632341986309, 1.873755626085, 2.047449400941, 3.361946068696]),
        (0.4, 0.2, [-0.287682072452, -0.064538521138, -0.534542150383, -0.049034334602]),
        (0.1, 0.3, [0.316830376164, 1.199786832983, 1.199786832983, 2.164728766365]),
    ],
)
def test_bets_are_those_of_the_paper(bound: float, alpha: float, expected: list[float]):
    wealth = log_wealth(np.array([0.2, 0.6, 0.1, 0.9]), bound, alpha)
    assert wealth == pytest.approx(expected, abs=1e-11)


def test_who_may_err_less_bets_for_it():
    # 97 as computed; with bets for an error of 0.05, it takes 114.
    assert found_above(np.where(losses(0, 0.2, 0.0) > 0, 1.0, 0.0), 0.01, 0.001) == 97


def test_a_stake_that_suffices_exactly_is_enough():
    """All of the stake is bet on a mean above one half: it grows to 1.5 and to 2.25."""
    alpha = (2 / 3) ** 2
    assert log_wealth(np.ones(2), 0.5, alpha)[1] == -np.log(alpha)
    assert found_above(np.ones(20), 0.0, alpha) == 2


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
