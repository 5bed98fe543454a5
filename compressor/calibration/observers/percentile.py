"""The range that holds a percentage of the values."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from compressor.calibration.clipping import percentile
from compressor.calibration.histogram import Histogram
from compressor.calibration.observers.ranges import HistogramObserver, Span, within


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
        search = percentile.search_symmetric if self.symmetric else percentile.search_affine
        low, high = search(state, self.percentile)
        return full if max(-low, high) <= 1 else within((low, high), full)
