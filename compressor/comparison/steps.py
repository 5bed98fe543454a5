"""Where a series of models became better or worse.

Binary segmentation (Scott and Knott 1974; Vostrikova 1981): the series is cut where the models
before and after differ most (the CUSUM of Page 1954), then each part again, as long as the
difference is more than chance.
All models ran on the same samples, so each cut is judged by a paired test over the samples:
McNemar's statistic where each part is one model with right and wrong results.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from compressor.types.tensors import Array


@dataclass(frozen=True)
class Step:
    """A change of the level.

    Attributes:
        index: the first model after it.
        start: the first model of the level before it.
        end: one past the last model of the level after it.
        p: chance of so large a step anywhere in the part that it was found in, without any.
    """

    index: int
    start: int
    end: int
    p: float


def find_steps(results: Array, alpha: float = 0.05) -> list[Step]:
    """Find where the level changes, in the order of the models.

    Args:
        results: one value for each model and sample, ``[models, samples]``.
        alpha: chance of finding a step where there is none.
    """
    return _inside(results, 0, len(results), alpha)


def _inside(results: Array, start: int, end: int, alpha: float) -> list[Step]:
    if end - start < 2:
        return []
    index, p = _sharpest(results[start:end])
    if p >= alpha:
        return []
    index += start
    before, after = _inside(results, start, index, alpha), _inside(results, index, end, alpha)
    first = before[-1].index if before else start
    last = after[0].index if after else end
    return [*before, Step(index, first, last, p), *after]


def _sharpest(results: Array) -> tuple[int, float]:
    """Return the likeliest cut, and the chance of so large a step there without any.

    The cut is where the cumulative sum of the models' means strays most from a straight line. As
    it is the best of so many, its chance counts that many times (Bonferroni).
    """
    count = len(results)
    sums = np.cumsum(results, axis=0)
    before = np.arange(1, count)
    means = sums[:-1].mean(axis=1) / before
    rest = (sums[-1] - sums[:-1]).mean(axis=1) / (count - before)
    strays = np.abs(means - rest) * np.sqrt(before * (count - before) / count)
    index = int(strays.argmax()) + 1
    losses = results[:index].mean(axis=0) - results[index:].mean(axis=0)
    spread = float(np.sqrt(np.square(losses).sum()))
    score = abs(float(losses.sum())) / spread if spread > 0 else 0.0
    return index, min(1.0, 2 * NormalDist().cdf(-score) * (count - 1))
