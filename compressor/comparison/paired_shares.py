"""The difference of two shares measured on the same samples: score test and interval."""

from __future__ import annotations

import math
from statistics import NormalDist

_STEPS = 60  # halvings: finer than a float can tell


def score(lost: int, won: int, samples: int, drop: float) -> float:
    """Return how far the observed drop lies above a supposed one, in standard errors.

    Tango 1998, "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design". For a supposed drop of 0 it is McNemar's statistic.

    Args:
        lost: samples that the base has right and the candidate wrong.
        won: samples that the candidate has right and the base wrong.
        samples: all samples.
        drop: the supposed drop, a share between -1 and 1.
    """
    if drop < 0:
        return -score(won, lost, samples, -drop)
    above = lost - won - samples * drop
    # The likeliest share of samples won, if the drop is the supposed one.
    linear = (2 * samples - lost + won) * drop - lost - won
    root = math.sqrt(linear**2 + 8 * samples * won * drop * (1 - drop))
    share = (root - linear) / (4 * samples)
    variance = samples * (2 * share + drop * (1 - drop))
    if variance <= 0:
        return 0.0 if above == 0 else math.copysign(math.inf, above)
    return above / math.sqrt(variance)


def within_p(lost: int, won: int, samples: int, limit: float) -> float:
    """Chance of so small a drop, or a smaller one, if the true drop were ``limit``."""
    if limit >= 1:
        return 0.0
    return NormalDist().cdf(score(lost, won, samples, max(limit, -1.0)))


def interval(lost: int, won: int, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Return the two-sided interval of the drop, as shares: all drops that the score accepts."""
    reach = NormalDist().inv_cdf((1 + level) / 2)
    observed = (lost - won) / samples
    low = -_greatest(won, lost, samples, -observed, reach)
    return low, _greatest(lost, won, samples, observed, reach)


def _greatest(lost: int, won: int, samples: int, observed: float, reach: float) -> float:
    """Return the greatest drop that lies at most ``reach`` standard errors above the observed."""
    inside, outside = observed, 1.0
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        if score(lost, won, samples, middle) >= -reach:
            inside = middle
        else:
            outside = middle
    return inside
