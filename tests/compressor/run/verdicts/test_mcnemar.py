"""McNemar's test and the interval of a difference of shares, against sums by hand."""

import math
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.run.verdicts import statistics as mcnemar
from compressor.run.verdicts import statistics as paired_shares

COUNTS = st.integers(0, 60)


@given(lost=COUNTS, won=COUNTS)
def test_exact_is_the_binomial_tail(lost: int, won: int) -> None:
    trials = lost + won
    tail = sum(Fraction(comb(trials, k), 2**trials) for k in range(lost, trials + 1))
    assert mcnemar.exact_p(lost, won) == pytest.approx(float(tail), rel=1e-9)
    own = Fraction(comb(trials, lost), 2**trials)
    assert mcnemar.mid_p(lost, won) == pytest.approx(float(tail - own / 2), rel=1e-9)


@given(lost=COUNTS, won=COUNTS)
def test_chances_of_losing_and_of_winning_add_up(lost: int, won: int) -> None:
    assert mcnemar.mid_p(lost, won) + mcnemar.mid_p(won, lost) == pytest.approx(1.0)
    assert mcnemar.mid_p(lost, won) <= mcnemar.exact_p(lost, won)


def test_many_disagreements_neither_overflow_nor_vanish() -> None:
    assert mcnemar.exact_p(25_000, 25_000) == pytest.approx(0.5, abs=0.01)
    assert mcnemar.exact_p(25_600, 24_400) == pytest.approx(4.2e-8, rel=0.05)


@given(lost=COUNTS, won=COUNTS, agreed=st.integers(1, 500))
def test_the_interval_holds_the_drop_and_mirrors(lost: int, won: int, agreed: int) -> None:
    samples = lost + won + agreed
    low, high = paired_shares.interval(lost, won, samples)
    assert -1 <= low <= (lost - won) / samples <= high <= 1
    assert (-high, -low) == paired_shares.interval(won, lost, samples)


@given(lost=COUNTS, won=COUNTS, agreed=st.integers(1, 500), drop=st.floats(-0.99, 0.99))
def test_the_score_falls_as_the_supposed_drop_grows(
    lost: int, won: int, agreed: int, drop: float
) -> None:
    samples = lost + won + agreed
    here = paired_shares.score(lost, won, samples, drop)
    assert here >= paired_shares.score(lost, won, samples, drop + 0.005) - 1e-9
    assert here == -paired_shares.score(won, lost, samples, -drop)


def test_the_score_of_no_drop_is_mcnemars_statistic() -> None:
    assert paired_shares.score(30, 14, 900, 0.0) == pytest.approx(16 / 44**0.5)


def test_intervals_are_those_in_print() -> None:
    """Fagerland, Lydersen and Laake 2014, of data by Bentur; Tango 1998, his 90 % interval."""
    assert [round(end, 3) for end in paired_shares.interval(1, 7, 21)] == [-0.517, -0.026]
    low, high = paired_shares.interval(0, 1, 44, level=0.9)
    assert [round(low, 3), round(high, 3)] == [-0.096, 0.037]


def test_what_cannot_be_is_infinitely_far_away() -> None:
    assert paired_shares.score(3, 1, 100, 1.0) == -math.inf
    assert paired_shares.score(3, 1, 100, -1.0) == math.inf
    assert paired_shares.score(100, 0, 100, 1.0) == 0.0


def test_no_drop_beyond_everything() -> None:
    assert paired_shares.within_p(3, 1, 100, 1.5) == 0.0
    assert paired_shares.within_p(10, 0, 10, 1.0) == 0.0
    assert paired_shares.within_p(0, 100, 100, -1.5) == paired_shares.within_p(0, 100, 100, -1.0)
    assert paired_shares.within_p(0, 0, 100, 0.0) == 0.5
