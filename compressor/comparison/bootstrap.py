"""The paired bootstrap: samples are drawn again, each with the values of both models."""

from __future__ import annotations

import numpy as np

from compressor.types.tensors import Array

RESAMPLES = 4000
_SEED = 0
_AT_ONCE = 2_000_000


def resampled_means(values: Array, resamples: int = RESAMPLES) -> Array:
    """Return the means over samples drawn with replacement, ``[resamples, columns]``.

    Efron 1979; a row is drawn as a whole, so that the pairs stay pairs. The same values always
    give the same means.

    Args:
        values: ``[samples, columns]``, a column for each model.
        resamples: how many draws.
    """
    count = len(values)
    generator = np.random.default_rng(_SEED)
    step = max(1, _AT_ONCE // count)
    means = []
    for start in range(0, resamples, step):
        drawn = generator.integers(0, count, size=(min(step, resamples - start), count))
        means.append(values[drawn].mean(axis=1))
    return np.concatenate(means)


def percentiles(values: Array, level: float = 0.95) -> tuple[float, float]:
    """Return the interval that leaves the same share of resampled values out on either side."""
    outside = 50 * (1 - level)
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)


def share_at_most(values: Array, bound: float) -> float:
    """Return the share of resampled values up to ``bound``; never 0, as draws are finite."""
    return (1 + int((values <= bound).sum())) / (1 + values.size)
