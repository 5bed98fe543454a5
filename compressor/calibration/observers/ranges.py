"""What the observers of ranges have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TypeVar

import torch
from pydantic import Field

from compressor.calibration import histogram
from compressor.calibration.density import density
from compressor.calibration.histogram import Histogram
from compressor.types.statistics import Observer, Range

StateT = TypeVar("StateT")
Span = tuple[float, float]


class RangeObserver(Observer[StateT, Range]):
    """An observer of the range that a quantizer is to represent; it always holds zero."""

    bits: int = Field(default=8, ge=2, le=16, description="bits of the quantizer")
    symmetric: bool = Field(default=False, description="whether the range is to be (-t, t)")

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


class HistogramObserver(RangeObserver[Histogram]):
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
