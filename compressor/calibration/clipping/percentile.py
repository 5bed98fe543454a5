"""The range that holds a percentage of the values."""

from __future__ import annotations

import torch

from compressor.calibration.histogram import SIDE, Histogram


def search_symmetric(histogram: Histogram, percentile: float) -> tuple[float, float]:
    """Return ``(-t, t)`` with ``percentile`` percent of all ``|x|`` below t."""
    counts = histogram.counts
    magnitudes = counts[SIDE:].clone()
    magnitudes[1:] += counts[1:SIDE].flip(0)
    threshold = quantile(magnitudes, histogram.total * (1 - percentile / 100))
    return -threshold, threshold


def search_affine(histogram: Histogram, percentile: float) -> tuple[float, float]:
    """Return a range outside which lie ``100 - percentile`` percent of all values.

    Half of them lie below and half above, or all on one side if there are no others.
    """
    sides = (histogram.low < 0) + (histogram.high > 0)
    beyond = histogram.total * (1 - percentile / 100) / max(sides, 1)
    left = torch.cat((histogram.counts[SIDE:][:1], histogram.counts[1:SIDE].flip(0)))
    low = -quantile(left, beyond) if histogram.low < 0 else 0.0
    high = quantile(histogram.counts[SIDE:], beyond) if histogram.high > 0 else 0.0
    return low, high


def quantile(counts: torch.Tensor, beyond: float) -> float:
    """Return the t above which ``beyond`` values lie, linear within bins, and at least 1.

    ``counts`` are those of the bins ``[0, 1), [1, 2), ...``; where the values of the
    first lie is not known, so the result never falls there.
    """
    tails = counts.flip(0).cumsum(0).flip(0)
    inside = int((tails > beyond).sum())  # bins, from zero, that reach into the range
    if inside <= 1:
        return 1.0
    rest = float(tails[inside]) if inside < len(tails) else 0.0
    return inside - (beyond - rest) / float(counts[inside - 1])
