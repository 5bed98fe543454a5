"""The difference of two models' metrics, from their results on the same samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from compressor.lab.compare import statistics
from compressor.lab.compare.statistics import samples_needed
from compressor.types.tensors import Array

MCNEMAR = "McNemar's test, mid-p"
BOOTSTRAP = "paired bootstrap"


@dataclass(frozen=True)
class Scale:
    """What makes a metric of per-sample values.

    Attributes:
        factor: what their mean is multiplied with; 100 for shares in percent.
        exponential: they are logarithms, and the mean is exponentiated.
        higher_is_better: direction.
    """

    factor: float = 1.0
    exponential: bool = False
    higher_is_better: bool = True

    def metric(self, means: Array) -> Array:
        """Turn means of per-sample values into values of the metric."""
        return np.asarray((np.exp(means) if self.exponential else means) * self.factor)


@dataclass(frozen=True)
class Difference:
    """How much worse the candidate is than the base; a positive drop is worse.

    Attributes:
        samples: how many samples both were run on.
        drop: the difference as measured, in the metric's unit.
        ci95: its two-sided 95 % interval.
        p: chance of so large a drop between equally good models (one-sided).
        p_exact: the same by McNemar's exact test, where values are right or wrong.
        method: the test.
        lost: samples that the base alone has right, where values are right or wrong.
        won: samples that the candidate alone has right.
        equal: both have the same value for every sample.
        deviation: standard deviation of the samples' differences, in the metric's unit.
    """

    samples: int
    drop: float
    ci95: tuple[float, float]
    p: float
    p_exact: float | None
    method: str
    lost: int | None
    won: int | None
    equal: bool
    deviation: float
    _null_deviation: float
    _resampled: Array | None = None
    _factor: float = 1.0

    def within_p(self, limit: float) -> float:
        """Chance of so small a drop, or a smaller one, if the true drop were ``limit``."""
        if self._resampled is not None:
            return statistics.share_at_most(-self._resampled, -limit)
        assert self.lost is not None
        assert self.won is not None
        return statistics.within_p(self.lost, self.won, self.samples, limit / self._factor)

    def samples_needed(self, alpha: float, limit: float = 0.0) -> int | None:
        """Return how many samples would tell the measured drop from ``limit``, if it is true.

        ``None`` where that is no more than there were, or where no number would do.
        """
        distance = self.drop - limit
        needed = samples_needed(distance, self.deviation, alpha, self._null_deviation)
        return needed if needed is not None and needed > self.samples else None


def paired_difference(base: Array, candidate: Array, scale: Scale) -> Difference:
    """Compare two models by their values for the same samples.

    Args:
        base: one value a sample, ``[N]``.
        candidate: the same of the other model, for the same samples in the same order.
        scale: what makes a metric of them.
    """
    counted = bool(np.isin(base, (0.0, 1.0)).all() and np.isin(candidate, (0.0, 1.0)).all())
    if counted and not scale.exponential:
        return _of_shares(base, candidate, scale)
    return _of_means(base, candidate, scale)


def _of_shares(base: Array, candidate: Array, scale: Scale) -> Difference:
    sign = 1 if scale.higher_is_better else -1
    losses = sign * (base - candidate)
    lost, won, samples = int((losses > 0).sum()), int((losses < 0).sum()), int(base.size)
    low, high = statistics.interval(lost, won, samples)
    drop = (lost - won) / samples
    disagreeing = (lost + won) / samples
    return Difference(
        samples=samples,
        drop=drop * scale.factor,
        ci95=(low * scale.factor, high * scale.factor),
        p=statistics.mid_p(lost, won),
        p_exact=statistics.exact_p(lost, won),
        method=MCNEMAR,
        lost=lost,
        won=won,
        equal=lost == won == 0,
        deviation=math.sqrt(max(disagreeing - drop**2, 0.0)) * scale.factor,
        _null_deviation=math.sqrt(disagreeing) * scale.factor,
        _factor=scale.factor,
    )


def _of_means(base: Array, candidate: Array, scale: Scale) -> Difference:
    resampled, drop = _drops(base, candidate, scale)
    low, high = statistics.percentiles(resampled)
    deviation = float(resampled.std()) * math.sqrt(base.size)
    return Difference(
        samples=int(base.size),
        drop=drop,
        # Rounding alone may put the drop outside where every sample's difference is the same.
        ci95=(min(low, drop), max(high, drop)),
        p=statistics.share_at_most(resampled, 0.0),
        p_exact=None,
        method=BOOTSTRAP,
        lost=None,
        won=None,
        equal=bool((base == candidate).all()),
        deviation=deviation,
        _null_deviation=deviation,
        _resampled=resampled,
    )


def _drops(base: Array, candidate: Array, scale: Scale) -> tuple[Array, float]:
    """Return the drop of each draw, and that of all samples."""
    sign = 1.0 if scale.higher_is_better else -1.0
    if not scale.exponential:
        losses = sign * scale.factor * (base - candidate)
        return statistics.resampled_means(losses[:, None])[:, 0], float(losses.mean())
    values = np.stack([base, candidate], axis=1)
    means = np.concatenate([values.mean(axis=0)[None], statistics.resampled_means(values)])
    metric = scale.metric(means)
    drops = sign * (metric[:, 0] - metric[:, 1])
    return drops[1:], float(drops[0])
