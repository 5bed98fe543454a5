"""Verdicts: what a measurement says about a limit."""

from __future__ import annotations

from typing import Literal

Verdict = Literal["passed", "failed", "unknown"]

WIDEST_RATIO = 1.5
"""The factor between the bounds of a ratio's interval beyond which it means nothing.

Bounds that far apart are 22 % to either side, so that they cannot tell a model from one that takes
a fifth longer; and whatever disturbed the measurement that much may have disturbed it more.
"""


def verdict_of(
    interval: tuple[float, float] | None, limit: float, widest: float | None = None
) -> Verdict:
    """Return whether a measurement keeps within a limit.

    Args:
        interval: the bounds of what was measured, twice the same if it is exact; ``None`` if it
            was not measured.
        limit: the largest value that is allowed.
        widest: the factor between the bounds beyond which the interval means nothing;
            :data:`WIDEST_RATIO` for ratios of times, ``None`` for differences.

    Returns:
        ``passed`` if the interval lies inside, ``failed`` if it lies outside; ``unknown`` if it
        straddles the limit, is too wide, or there is none.
    """
    low, high = interval or (float("nan"), float("nan"))
    meaningful = low <= high and (widest is None or high <= widest * low)
    if meaningful and high <= limit:
        return "passed"
    return "failed" if meaningful and low > limit else "unknown"
