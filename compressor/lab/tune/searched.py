"""What the search data say of a candidate: what it loses there, and what its proof would leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compressor.lab.tune.betting import found_above
from compressor.lab.tune.search_data import SearchData
from compressor.run.evaluate import Evaluation
from compressor.run.metrics.metrics import SHARES
from compressor.run.verdicts.statistics import UNSEEN, paired_difference
from compressor.run.verdicts.verdicts import same_function
from compressor.types.tensors import Array

_REACH = 1.96  # of a 95 % interval, in standard errors

Pairs = Sequence[tuple[Evaluation, Evaluation]]
"""The float model's results, and a candidate's, on each part of the search data."""


@dataclass(frozen=True)
class Searched:
    """A candidate on the search data.

    Attributes:
        samples: how many were looked at.
        drop: how much worse its metric is there; ``None`` where the search data have no labels.
        bound: the largest drop that the evaluation would leave possible, if all goes there as it
            went here; without labels, if as many samples get better as get worse.
        sqnr_db: of the outputs; ``None`` where they are equal.
        stopped: it was found to break the limit before all samples were looked at.
    """

    samples: int
    drop: float | None
    bound: float | None
    sqnr_db: float | None
    stopped: bool = False
    least: float | None = None


def breaks(pairs: Pairs, search: SearchData, limit: float | None) -> bool:
    """Whether samples show that the limit is broken.

    Only of means of shares can that be told: the values that make up a figure have no bounds.
    """
    metric = search.metric
    shares = metric.unit == "%" and metric.figure is None and metric.bounds == SHARES
    if limit is None or not search.same or not shares:
        return False
    base, values = _values(pairs)
    sign = 1.0 if metric.higher_is_better else -1.0
    share = limit / metric.scale.factor
    return share >= 0 and found_above(sign * (base - values), share) is not None


def judged(pairs: Pairs, search: SearchData, float_model: Evaluation, *, stopped: bool) -> Searched:
    """Return what the search data say.

    Args:
        float_model: its results on the evaluation data, whose number and values the interval of
            a proof depends on.
        stopped: the limit is known to be broken.
    """
    base, values = _values(pairs)
    metric, count = search.metric, len(float_model.per_sample)
    seen = [(len(b.per_sample), b.sqnr_db) for _, b in pairs]
    # The power of the error, as a share of the signal's, is what can be averaged.
    noise = sum(n * 10 ** (-db / 10) for n, db in seen if db is not None) / len(values)
    sqnr = -10 * math.log10(noise) if noise > 0 else None
    drop: float | None = None
    bound: float | None = 0.0
    least: float | None = None
    if search.same:
        difference = paired_difference(base, values, metric.scale)
        drop = bound = difference.drop
        if not same_function(sqnr):
            bound += _REACH * difference.deviation / math.sqrt(count)
            least = bound - _REACH * difference.deviation / math.sqrt(len(values))
    elif not search.tells:
        bound = 0.0 if same_function(sqnr) else None
    elif not same_function(sqnr):
        changes = np.square(values - base)
        most = float(changes.max()) or max(1.0, float(np.ptp(float_model.per_sample)) ** 2)
        # As many get better as get worse; and none is not never.
        power = count * (float(changes.sum()) + 0.5 * most) / (len(values) + 1)
        power += 2 * UNSEEN * most if metric.scale.of_decisions else 0.0
        bound = metric.scale.factor * _REACH * math.sqrt(power) / count
    return Searched(len(values), drop, bound, sqnr, stopped, least)


def _values(pairs: Pairs) -> tuple[Array, Array]:
    float_values, values = zip(*((a.per_sample, b.per_sample) for a, b in pairs), strict=True)
    return np.concatenate(float_values), np.concatenate(values)
