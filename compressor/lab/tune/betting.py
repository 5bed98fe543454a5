"""Whether the mean of bounded values lies above a bound: a test that may look after each sample.

Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting" (Journal of
the Royal Statistical Society B 86(1)), section 4: a gambler who bets that the mean is above the
bound cannot become rich if it is not. By Ville's inequality the chance of ever multiplying the
stake by ``1 / alpha`` is at most ``alpha``, however often one looks. So a bad candidate may be
dropped as soon as that happens, after some hundred samples in place of all.
"""

from __future__ import annotations

import math

import numpy as np

from compressor.types.tensors import Array

ALPHA = 0.05
_MOST = 0.5  # share of what may be bet without going bankrupt
_PRIOR_MEAN, _PRIOR_VARIANCE = 0.5, 0.25  # of values in [0, 1], before any was seen


def log_wealth(values: Array, bound: float, alpha: float = ALPHA) -> Array:
    """Return the logarithm of the stake's multiple after each value, ``[N]``.

    If the mean of what is drawn is at most ``bound``, the multiple is a supermartingale that starts
    at one: its mean never grows. The more the mean is above, the faster the logarithm rises.

    >>> log_wealth(np.array([1.0, 1.0, 0.0]), 0.5).round(2).tolist()
    [0.41, 0.81, 0.12]

    The bets are the predictable plug-in of the paper's equation (26), truncated as there: each is
    made from the values before it.

    Args:
        values: ``[N]``, each in [0, 1], in the order in which they were drawn.
        bound: what the mean is compared with, in (0, 1).
        alpha: the chance of error that bets aim at.
    """
    count = np.arange(1, len(values) + 1)
    means = (_PRIOR_MEAN + np.cumsum(values)) / (count + 1)
    spreads = (_PRIOR_VARIANCE + np.cumsum((values - means) ** 2)) / (count + 1)
    before = np.concatenate([[_PRIOR_VARIANCE], spreads[:-1]])
    bets = np.sqrt(2 * math.log(1 / alpha) / (before * count * np.log(count + 1)))
    bets = np.minimum(bets, _MOST / bound)
    return np.asarray(np.cumsum(np.log1p(bets * (values - bound))))


def found_above(losses: Array, limit: float, alpha: float = ALPHA) -> int | None:
    """Return after how many samples a mean loss is known to be above a limit; ``None`` if never.

    >>> found_above(np.ones(100), 0.05)
    9
    >>> found_above(np.zeros(1000), 0.05) is None
    True

    Args:
        losses: ``[N]``, each in [-1, 1]: how much worse a candidate did on a sample.
        limit: the largest mean that is allowed, in (-1, 1).
        alpha: the chance, for all looks together, of saying so of one that keeps the limit.
    """
    rich = np.flatnonzero(log_wealth((losses + 1) / 2, (limit + 1) / 2, alpha) >= -math.log(alpha))
    return int(rich[0]) + 1 if rich.size else None
