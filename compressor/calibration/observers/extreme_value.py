"""A range wide enough for data that calibration does not hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.histogram import extrema
from compressor.calibration.observers.ranges import RangeObserver
from compressor.types.statistics import Range

_EULER = 0.5772156649015329  # mean of the standard Gumbel distribution
_ROOT = math.sqrt(6) / math.pi  # scale of a Gumbel distribution over its standard deviation


@dataclass(frozen=True)
class Peaks:
    """Sums over the greatest values of samples. Exact, so that their order does not matter.

    Attributes:
        total: sum of the samples' greatest values.
        squares: sum of their squares.
        highest: the greatest of all; ``-inf`` before any.
    """

    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)
    highest: float = -math.inf

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
    """What was seen of both ends.

    Attributes:
        samples: how many samples.
        high: sums over the samples' greatest values.
        low: sums over their least values with the sign turned.
    """

    samples: int = 0
    high: Peaks = Peaks()
    low: Peaks = Peaks()


class ExtremeValue(RangeObserver[PeakSums]):
    """The range that a multiple of the calibration's samples is expected to stay within.

    The greatest value of a few samples is exceeded by the samples to come, and where large values
    carry the answer, as in detectors, clipping them costs more than coarser steps do. The
    distribution of the samples' greatest values says how far the next ones reach (extreme value
    theory: the Gumbel distribution). Choose it where calibration data are few or of another mix
    than the data to come. A sample is a row of the first axis, or a batch where
    only some elements of a value count.

    Coles, An Introduction to Statistical Modeling of Extreme Values, 2001, sections 3.1 and 3.3.
    """

    name: ClassVar[str] = "extreme-value"
    horizon: float = Field(
        default=10.0,
        ge=1,
        description="samples that the range is to hold, as a multiple of the calibration's",
    )

    def start(self) -> PeakSums:
        """Return the sums over nothing."""
        return PeakSums()

    def update(self, state: PeakSums, values: torch.Tensor) -> PeakSums:
        """Return the sums with the values' rows as further samples."""
        rows = values if values.ndim > 1 else values.reshape(1, -1)
        for row in rows:
            if row.numel():
                low, high = extrema(row)
                state = self.merge(state, PeakSums(1, _peak(high), _peak(-low)))
        return state

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


def _peak(value: float) -> Peaks:
    exact = Fraction(value)
    return Peaks(exact, exact * exact, value)
