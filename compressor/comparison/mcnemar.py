"""McNemar's test: did one model get more samples wrong that the other got right?

Only samples count on which the two models disagree. Between equally good models each of those is
as likely to be lost as won (McNemar 1947).
"""

from __future__ import annotations

import numpy as np

from compressor.types.tensors import Array


def exact_p(lost: int, won: int) -> float:
    """Chance that equally good models lose as many samples or more: the exact one-sided test.

    The binomial sum over the tail, with probability one half (McNemar 1947). It is conservative:
    with few disagreements its true level lies well below the nominal one.

    Args:
        lost: samples that the base has right and the candidate wrong.
        won: samples that the candidate has right and the base wrong.
    """
    return float(_tail(lost, won).sum())


def mid_p(lost: int, won: int) -> float:
    """As :func:`exact_p`, with half the weight for the number that was observed.

    Fagerland, Lydersen and Laake 2013, "The McNemar test for binary matched-pairs data: mid-p and
    asymptotic are better than exact conditional": its level is close to the nominal one.
    """
    tail = _tail(lost, won)
    return float(tail.sum() - tail[0] / 2)


def _tail(lost: int, won: int) -> Array:
    """Return the binomial probabilities of ``lost`` to ``lost + won`` losses, in that order."""
    trials = lost + won
    steps = np.arange(trials, dtype=np.float64)
    # C(n, k + 1) = C(n, k) (n - k) / (k + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((trials - steps) / (steps + 1)))])
    tail: Array = np.exp(logs[lost:] - trials * np.log(2.0))
    return tail
