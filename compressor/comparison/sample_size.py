"""How many samples it takes to tell a difference from none."""

from __future__ import annotations

import math
from statistics import NormalDist

POWER = 0.8
_DIGITS = 2


def samples_needed(
    effect: float, deviation: float, alpha: float, null_deviation: float | None = None
) -> int | None:
    """Return for how many samples a one-sided test finds the effect four times out of five.

    Connor 1987, "Sample size for testing differences in proportions for the paired-sample
    design"; with one deviation it is the formula for a mean. Rounded up to two digits, as it
    rests on an estimate.

    Args:
        effect: the true mean of the samples' differences.
        deviation: standard deviation of the samples' differences.
        alpha: level of the test.
        null_deviation: the same if there were no effect; default: as with it.

    Returns:
        The number, or ``None`` where no number would do.
    """
    if effect == 0 or deviation <= 0:
        return None
    normal = NormalDist()
    null = deviation if null_deviation is None else null_deviation
    distance = normal.inv_cdf(1 - alpha) * null + normal.inv_cdf(POWER) * deviation
    exact = (distance / effect) ** 2
    if not math.isfinite(exact) or exact > 1e12:
        return None
    unit: int = 10 ** max(0, math.floor(math.log10(max(exact, 1))) + 1 - _DIGITS)
    return math.ceil(exact / unit) * unit
