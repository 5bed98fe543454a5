"""Statistics of comparisons: paired differences, their tests and intervals, steps in a series."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from compressor.types.tensors import Array

MOST_LOG = 300.0  # means above count as it: the square of its exponential is still a number
MCNEMAR = "McNemar's test, mid-p"
BOOTSTRAP = "paired bootstrap"


@dataclass(frozen=True)
class Scale:
    """What makes a metric of per-sample values.

    Attributes:
        factor: what their mean is multiplied with; 100 for shares in percent.
        exponential: they are logarithms, and the mean is exponentiated.
        counts: where all of them are 0 or 1, these say right or wrong; errors and cosines do not.
        of_decisions: they are of a figure that counts decisions in all samples, such as F1.
    """

    factor: float = 1.0
    exponential: bool = False
    higher_is_better: bool = True
    counts: bool = True
    of_decisions: bool = False

    def metric(self, means: Array) -> Array:
        """Turn means of per-sample values into values of the metric."""
        values = np.exp(means.clip(max=MOST_LOG)) if self.exponential else means
        return np.asarray(values * self.factor)


@dataclass(frozen=True)
class Difference:
    """How much worse the candidate is than the base; a positive drop is worse.

    Attributes:
        samples: how many samples both were run on.
        drop: the difference as measured, in the metric's unit.
        ci95: its two-sided 95 % interval.
        p: chance of so large a drop between equally good models (one-sided).
        p_exact: the same by McNemar's exact test, where values are right or wrong.
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

    def as_json(self) -> dict[str, Any]:
        """Return what a comparison says of it."""
        names = ("drop", "ci95", "p", "p_exact", "method", "samples", "lost", "won")
        return {name: getattr(self, name) for name in names}

    def within_p(self, limit: float) -> float:
        """Chance of so small a drop, or a smaller one, if the true drop were ``limit``."""
        if self._resampled is not None:
            return share_at_most(-self._resampled, -limit)
        assert self.lost is not None
        assert self.won is not None
        return within_p(self.lost, self.won, self.samples, limit / self._factor)

    def samples_needed(self, alpha: float, limit: float = 0.0) -> int | None:
        """Return how many samples would tell the measured drop from ``limit``, if it is true.

        ``None`` where that is no more than there were, or where no number would do.
        """
        needed = samples_needed(self.drop - limit, self.deviation, alpha, self._null_deviation)
        return needed if needed is not None and needed > self.samples else None


def paired_difference(base: Array, candidate: Array, scale: Scale) -> Difference:
    """Compare two models by their values for the same samples.

    Args:
        base: one value a sample, ``[N]``.
        candidate: the same of the other model, for the same samples in the same order.
        scale: what makes a metric of them.
    """
    counted = bool(np.isin(base, (0.0, 1.0)).all() and np.isin(candidate, (0.0, 1.0)).all())
    if counted and scale.counts and not scale.exponential:
        return _of_shares(base, candidate, scale)
    return _of_means(base, candidate, scale)


def _of_shares(base: Array, candidate: Array, scale: Scale) -> Difference:
    losses = base - candidate if scale.higher_is_better else candidate - base
    lost, won, samples = int((losses > 0).sum()), int((losses < 0).sum()), int(base.size)
    low, high = interval(lost, won, samples)
    drop = (lost - won) / samples
    disagreeing = (lost + won) / samples
    return Difference(
        samples=samples,
        drop=drop * scale.factor,
        ci95=(low * scale.factor, high * scale.factor),
        p=mid_p(lost, won),
        p_exact=exact_p(lost, won),
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
    low, high = percentiles(resampled)
    deviation, equal = (
        float(resampled.std()) * math.sqrt(base.size),
        bool((base == candidate).all()),
    )
    if base.size == 1 and not (equal or scale.of_decisions):  # which tells nothing of the spread
        resampled = np.array([-np.inf, np.inf])
    return Difference(
        samples=int(base.size),
        drop=drop,
        # Rounding alone may put the drop outside where every sample's difference is the same.
        ci95=(min(low, drop), max(high, drop)),
        p=share_at_most(resampled, 0.0),
        p_exact=None,
        method=BOOTSTRAP,
        lost=None,
        won=None,
        equal=equal,
        deviation=deviation,
        _null_deviation=deviation,
        _resampled=resampled,
    )


def _drops(base: Array, candidate: Array, scale: Scale) -> tuple[Array, float]:
    """Return the drop of each draw, and that of all samples."""
    sign = 1.0 if scale.higher_is_better else -1.0
    if not scale.exponential:
        losses = sign * scale.factor * (base - candidate)
        reach = scale.factor * np.ptp([base, candidate])
        drawn = np.concatenate([losses, *([_unseen(losses, reach)] if scale.of_decisions else [])])
        return resampled_means(drawn[:, None])[:, 0], float(losses.mean())
    values = np.stack([base, candidate], axis=1)
    means = np.concatenate([values.mean(axis=0)[None], resampled_means(values)])
    metric = scale.metric(means)
    drops = sign * (metric[:, 0] - metric[:, 1])
    return drops[1:], float(drops[0])


def _unseen(losses: Array, reach: float) -> Array:
    """Return losses for what few samples do not show, as many as gains, to be drawn with theirs.

    A figure such as the F1 of a rare class moves by a few decisions: where two are expected to
    change, none does in one of seven runs, and no draw of what did not change shows that it can.
    The score interval of a share adds half the square of its reach in standard errors to either
    side (Wilson 1927; Agresti and Coull 1998, "Approximate is better than exact"); so do these:
    as much as the sample that changed most or, where none did, as far as two samples' values lie
    apart.
    """
    most = float(np.abs(losses).max()) or reach
    return np.array([most, -most] * UNSEEN)


UNSEEN = 2  # how many samples are added to either side: half the square of 1.96

RESAMPLES = 4000
_SEED = 0
_AT_ONCE = 2_000_000


def resampled_means(values: Array, resamples: int = RESAMPLES) -> Array:
    """Return the means over samples drawn with replacement, ``[resamples, columns]``.

    Efron 1979; a row is drawn as a whole, so that the pairs stay pairs. The same values always
    give the same means.

    Args:
        values: ``[samples, columns]``, a column for each model.
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


_STEPS = 60  # halvings: finer than a float can tell


def score(lost: int, won: int, samples: int, drop: float) -> float:
    """Return how far the observed drop lies above a supposed one, in standard errors.

    Tango 1998, "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design". For a supposed drop of 0 it is McNemar's statistic.

    Args:
        lost: samples that the base has right and the candidate wrong.
        won: samples that the candidate has right and the base wrong.
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
