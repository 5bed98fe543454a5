"""A measurement beside its limit: passed, failed, or unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.run.verdicts import WIDEST_RATIO, verdict_of

RATIOS = st.floats(0.01, 100)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.9, 0.99), "passed"),
        ((0.9, 1.0), "passed"),
        ((1.0, 1.0), "passed"),
        ((0.9, 1.01), "unknown"),
        ((1.0, 1.01), "unknown"),
        ((1.01, 1.02), "failed"),
        ((0.17, 36.0), "unknown"),  # these three were called passed, failed and passed
        ((1.02, 112.0), "unknown"),
        ((0.77, 2.02), "unknown"),
        ((0.3, 0.9), "unknown"),
        ((float("nan"), 0.9), "unknown"),
        ((0.9, float("nan")), "unknown"),
        ((1.2, float("inf")), "unknown"),
        (None, "unknown"),
    ],
)
def test_a_ratio_beside_one(interval: tuple[float, float] | None, verdict: str):
    assert verdict_of(interval, 1.0, WIDEST_RATIO) == verdict


def test_a_difference_has_no_factor_between_its_bounds():
    assert verdict_of((-0.4, 0.1), 0.5) == "passed"
    assert verdict_of((0.6, 9.0), 0.5) == "failed"
    assert verdict_of((0.4, 0.6), 0.5) == "unknown"


def test_the_widest_interval_that_means_something_still_does():
    assert verdict_of((2.0, 2.0 * WIDEST_RATIO), 1.0, WIDEST_RATIO) == "failed"
    assert verdict_of((2.0, 2.01 * WIDEST_RATIO), 1.0, WIDEST_RATIO) == "unknown"


@given(RATIOS, RATIOS, RATIOS)
def test_only_evidence_decides(one: float, other: float, limit: float):
    low, high = sorted((one, other))
    verdict = verdict_of((low, high), limit, WIDEST_RATIO)
    assert (verdict == "passed") == (high <= limit and high <= WIDEST_RATIO * low)
    assert (verdict == "failed") == (low > limit and high <= WIDEST_RATIO * low)
