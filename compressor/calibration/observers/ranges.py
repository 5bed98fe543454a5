"""Observers of ranges.

>>> observer = MinMax()
>>> observer.result(observer.update(observer.start(), torch.tensor([-1.0, 2.0])))
Range(low=-1.0, high=2.0)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, TypeVar

import torch
from pydantic import Field

from compressor.calibration import clipping, histogram
from compressor.calibration.clipping import density, expected_error, snap
from compressor.calibration.histogram import Ends, Histogram, extrema, row_ends
from compressor.types.statistics import Observer, Range

StateT = TypeVar("StateT")
Span = tuple[float, float]


class RangeObserver(Observer[StateT, Range]):
    """An observer of the range that a quantizer is to represent; it always holds zero."""

    bits: int = Field(default=8, ge=2, le=16, description="bits of the quantizer")
    symmetric: bool = Field(default=False, description="whether the range is (-t, t)")

    def placeholder(self) -> Range:
        """Return ``(-1, 1)``."""
        return Range(-1.0, 1.0)

    def spanning(self, low: float, high: float) -> Range:
        """Return the range of values from ``low`` to ``high``, with zero, made symmetric if asked.

        Raises:
            ValueError: nothing was observed (``low`` exceeds ``high``).
        """
        if low > high:
            raise ValueError("no values were observed")
        low, high = min(low, 0.0), max(high, 0.0)
        if self.symmetric:
            low, high = -max(-low, high), max(-low, high)
        return Range(low + 0.0, high)


class EndsObserver(RangeObserver[StateT]):
    """An observer that looks for the ends of values first; those of one tensor share that."""

    def update(self, state: StateT, values: torch.Tensor) -> StateT:
        """Return the state after also seeing ``values``."""
        low, high = extrema(values)
        return self.with_ends(state, values, Ends([low], [high]))

    @abstractmethod
    def with_ends(self, state: StateT, values: torch.Tensor, ends: Ends) -> StateT:
        """Return the state after also seeing values whose ends are known, at least one."""


class HistogramObserver(EndsObserver[Histogram]):
    """An observer that looks for its range in an exact histogram.

    The state does not depend on the observer or its options: all histogram observers of a
    tensor can share one.
    """

    def start(self) -> Histogram:
        """Return the histogram of no values."""
        return histogram.empty()

    def update(self, state: Histogram, values: torch.Tensor) -> Histogram:
        """Return the histogram with the values counted."""
        return histogram.observe(state, values)

    def with_ends(self, state: Histogram, values: torch.Tensor, ends: Ends) -> Histogram:
        """Return the histogram with the values counted."""
        return histogram.observe(state, values, (min(ends.low), max(ends.high)))

    def merge(self, first: Histogram, second: Histogram) -> Histogram:
        """Return the histogram of the values of both."""
        return histogram.merge(first, second)

    def result(self, state: Histogram) -> Range:
        """Return the range found; raises ``ValueError`` where nothing was observed.

        Where all values are zero, or so close to zero compared with a few others that one bin
        holds them, it is that of the extrema.
        """
        full = self.spanning(state.low, state.high)
        if not len(density(state).mass):
            return full
        span = self.search(state, (state.unit(full.low), state.unit(full.high)))
        low, high = (state.value(end) for end in span)
        if not (low < high and math.isfinite(low) and math.isfinite(high)):
            return full
        return Range(min(low, 0.0) + 0.0, max(high, 0.0))

    @abstractmethod
    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range to represent, given that of the extrema, in units of the bin width."""


def within(span: Span, full: Span) -> Span:
    """Return the part of a span, whose ends lie on edges of bins, within that of the extrema."""
    return max(span[0], full[0]), min(span[1], full[1])


Extrema = tuple[float, float]


class MinMax(EndsObserver[Extrema]):
    """From the least to the greatest value ever seen.

    Right where values are bounded or large values matter; one outlier makes every step coarse.
    The state is ``(low, high)``, and ``(inf, -inf)`` before any value.
    """

    name: ClassVar[str] = "min-max"

    def start(self) -> Extrema:
        """Return the empty interval."""
        return math.inf, -math.inf

    def with_ends(self, state: Extrema, values: torch.Tensor, ends: Ends) -> Extrema:  # noqa: ARG002
        """Return the interval widened to hold the values."""
        return self.merge(state, (min(ends.low), max(ends.high)))

    def merge(self, first: Extrema, second: Extrema) -> Extrema:
        """Return the interval that holds both."""
        return min(first[0], second[0]), max(first[1], second[1])

    def result(self, state: Extrema) -> Range:
        """Return the range; raises ``ValueError`` where nothing was observed."""
        return self.spanning(*state)


@dataclass(frozen=True)
class Average:
    """Exponentially weighted sums of extrema."""

    low: float = 0.0  # the sum of each batch's least value times its weight
    high: float = 0.0  # the sum of each batch's greatest value times its weight
    decay: float = 1.0  # `(1 - constant) ** batches`, the weight that the start still has


class MovingAverage(RangeObserver[Average]):
    """An exponential moving average of the extrema of batches.

    A batch is what one ``update`` is given. Smooths single outliers; depends on batch size and
    order. The average ``a <- (1 - c) a + c x`` starts at zero and is divided by the weight of
    what was seen, ``1 - (1 - c) ** batches`` (Kingma and Ba 2015, section 3). So the start has
    no influence, and the average of a stream follows from those of its parts.
    """

    name: ClassVar[str] = "moving-average"
    constant: float = Field(
        default=0.01, gt=0, le=1, description="weight of the newest batch, c in (1 - c) a + c x"
    )

    def start(self) -> Average:
        """Return the average of no batches."""
        return Average()

    def update(self, state: Average, values: torch.Tensor) -> Average:
        """Return the average with the values as the newest batch."""
        if not values.numel():
            return state
        low, high = extrema(values)
        c = self.constant
        return self.merge(state, Average(c * low, c * high, 1 - c))

    def merge(self, first: Average, second: Average) -> Average:
        """Return the average of the batches of ``first`` followed by those of ``second``."""
        return Average(
            first.low * second.decay + second.low,
            first.high * second.decay + second.high,
            first.decay * second.decay,
        )

    def result(self, state: Average) -> Range:
        """Return the average range; raises ``ValueError`` where nothing was observed."""
        weight = 1 - state.decay
        if weight == 0:
            raise ValueError("no values were observed")
        return self.spanning(state.low / weight, state.high / weight)


class Percentile(HistogramObserver):
    """A range outside which lie ``100 - percentile`` percent of the values.

    Half of those are below and half above it; all are on one side where the other has none;
    where ``symmetric``, the percentage is of the absolute values. Exact to one bin, at most
    1/2048 of the greatest absolute value.
    """

    name: ClassVar[str] = "percentile"
    percentile: float = Field(
        default=99.99, gt=0, le=100, description="percentage of the values within the range"
    )

    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range in units of the bin width, or that of the extrema.

        The latter where all but a few values are in the zero bin, whose inside is unknown.
        """
        search = clipping.percentile_symmetric if self.symmetric else clipping.percentile_affine
        low, high = search(state, self.percentile)
        return full if max(-low, high) <= 1 else within((low, high), full)


_WIDENINGS = 16


class Entropy(HistogramObserver):
    """The range of least Kullback-Leibler divergence between the values and what is kept.

    The method of Migacz, "8-bit inference with TensorRT" (GTC 2017), also for ranges that start
    at zero and ranges that are not symmetric; exact zeros are left out, and the divergence is
    corrected for the number of samples. It counts how often values occur and not how large
    they are: a sharp peak makes it clip a long tail although the tail carries the energy (SiLU,
    softmax scores, attention outliers), where 20 dB can be lost against ``min-max``. So
    ``max_loss`` bounds what it may lose; ``inf`` is the method as published.
    """

    name: ClassVar[str] = "entropy"
    max_loss: float = Field(
        default=3.0,
        ge=0,
        allow_inf_nan=True,
        description="widen the range until it loses at most this many dB of signal against min-max",
    )

    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range in units of the bin width."""
        values = density(state)
        search = clipping.entropy_symmetric if self.symmetric else clipping.entropy_affine
        low, high = within(search(values, self.bits), full)
        steps = 2**self.bits - (2 if self.symmetric else 1)
        most = 10 ** (self.max_loss / 10) * expected_error(values, snap(full, steps), steps)
        for k in range(_WIDENINGS):
            share = (k / _WIDENINGS) ** 2
            span = low + share * (full[0] - low), high + share * (full[1] - high)
            if span[0] < span[1] and expected_error(values, snap(span, steps), steps) <= most:
                return span
        return full


class Mse(HistogramObserver):
    """The range with which a quantizer of ``bits`` bits errs least in the mean square.

    Balances what is lost to clipping against what is lost to coarser steps, as the observed
    density says. Low and high are searched together; never worse than ``min-max``, so a good
    choice for few bits and long tails. The range returned has zero on the quantizer's grid.
    """

    name: ClassVar[str] = "mse"

    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range in units of the bin width."""
        search = clipping.mse_symmetric if self.symmetric else clipping.mse_affine
        return search(density(state), full, self.bits)


_EULER = 0.5772156649015329  # mean of the standard Gumbel distribution

_ROOT = math.sqrt(6) / math.pi  # scale of a Gumbel distribution over its standard deviation


@dataclass(frozen=True)
class Peaks:
    """Sums over the greatest values of samples. Exact, so that their order does not matter."""

    total: Fraction = Fraction(0)  # sum of the samples' greatest values
    squares: Fraction = Fraction(0)  # sum of their squares
    highest: float = -math.inf  # the greatest of all; `-inf` before any

    def __add__(self, other: Peaks) -> Peaks:
        """Return the sums over both."""
        return Peaks(
            self.total + other.total,
            self.squares + other.squares,
            max(self.highest, other.highest),
        )

    def level(self, samples: int, horizon: float) -> float:
        """Return the value that one sample in ``horizon`` is expected to exceed.

        A Gumbel distribution is fitted by its moments: with the standard deviation ``s`` its
        scale is ``b = s sqrt(6) / pi``, its location ``m = mean - 0.5772 b``, and the return
        level ``m + b ln(horizon)``. Never less than the greatest value seen.
        """
        if samples < 2:  # a deviation takes two
            return self.highest
        mean = self.total / samples
        variance = max((self.squares - mean * self.total) / (samples - 1), Fraction(0))
        scale = math.sqrt(variance) * _ROOT
        return max(self.highest, float(mean) + scale * (math.log(horizon) - _EULER))


@dataclass(frozen=True)
class PeakSums:
    """Peaks of both ends."""

    samples: int = 0  # how many samples
    high: Peaks = Peaks()  # sums over the samples' greatest values
    low: Peaks = Peaks()  # sums over their least values with the sign turned


class ExtremeValue(EndsObserver[PeakSums]):
    """The range that a multiple of the calibration's samples is expected to stay within.

    Later samples exceed the greatest value of a few samples, and where large values carry the
    answer, as in detectors, clipping them costs more than coarser steps. The distribution of the
    samples' greatest values predicts how far later ones reach (extreme value theory: the Gumbel
    distribution). Choose it where calibration data are few or not representative. A sample is a
    row of the first axis, or a batch if only some elements of a value count.

    Coles, An Introduction to Statistical Modeling of Extreme Values, 2001, sections 3.1 and 3.3.
    """

    name: ClassVar[str] = "extreme-value"
    horizon: float = Field(
        default=10.0,
        ge=1,
        description="samples that the range should cover, as a multiple of the calibration's",
    )

    def start(self) -> PeakSums:
        """Return the sums over nothing."""
        return PeakSums()

    def update(self, state: PeakSums, values: torch.Tensor) -> PeakSums:
        """Return the sums with the values' rows as further samples."""
        ends = row_ends(values)
        return self.with_ends(state, values, ends) if ends.low else state

    def with_ends(self, state: PeakSums, values: torch.Tensor, ends: Ends) -> PeakSums:  # noqa: ARG002
        """Return the sums with the values' rows as further samples."""
        highest, lowest = _peaks(ends.high), _peaks([-x for x in ends.low])
        return self.merge(state, PeakSums(len(ends.low), highest, lowest))

    def merge(self, first: PeakSums, second: PeakSums) -> PeakSums:
        """Return the sums over the samples of both."""
        return PeakSums(
            first.samples + second.samples, first.high + second.high, first.low + second.low
        )

    def result(self, state: PeakSums) -> Range:
        """Return the range; raises ``ValueError`` where nothing was observed."""
        seen = Range(-state.low.highest, state.high.highest)
        if seen.low > seen.high:
            return self.spanning(seen.low, seen.high)
        horizon = self.horizon * state.samples
        # An end at which nothing was seen, such as that below a ReLU, stays where it is.
        low = -state.low.level(state.samples, horizon) if seen.low < 0 else 0.0
        high = state.high.level(state.samples, horizon) if seen.high > 0 else 0.0
        return self.spanning(low, high)


def _peaks(values: list[float]) -> Peaks:
    return Peaks(_exact_sum(values), _exact_sum(values, power=2), max(values))


def _exact_sum(values: list[float], power: int = 1) -> Fraction:
    """Return the sum of powers of floats.

    Their denominators are powers of two, so the greatest is the common one: one fraction is made.
    """
    ratios = [value.as_integer_ratio() for value in values]
    common = max(denominator for _, denominator in ratios)
    total = sum((n * (common // d)) ** power for n, d in ratios)
    return Fraction(total, common**power)
