"""The range of least expected squared quantization error."""

from __future__ import annotations

from typing import ClassVar

from compressor.calibration.clipping import mse
from compressor.calibration.density import density
from compressor.calibration.histogram import Histogram
from compressor.calibration.observers.ranges import HistogramObserver, Span


class Mse(HistogramObserver):
    """The range with which a quantizer of ``bits`` bits errs least in the mean square.

    Balances what is lost to clipping against what is lost to coarser steps, as the observed
    density says. Low and high are searched together; never worse than ``min-max``, so a good
    choice for few bits and long tails. The range returned has zero on the quantizer's grid.
    """

    name: ClassVar[str] = "mse"

    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range in units of the bin width."""
        search = mse.search_symmetric if self.symmetric else mse.search_affine
        return search(density(state), full, self.bits)
