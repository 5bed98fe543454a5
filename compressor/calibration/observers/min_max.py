"""The range of the extrema: nothing is clipped."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from compressor.calibration.extrema import extrema
from compressor.calibration.observers.ranges import RangeObserver
from compressor.types.statistics import Range

Extrema = tuple[float, float]


class MinMax(RangeObserver[Extrema]):
    """From the least to the greatest value ever seen.

    Right where values are bounded or large values matter; one outlier makes every step coarse.
    The state is ``(low, high)``, and ``(inf, -inf)`` before any value.
    """

    name: ClassVar[str] = "min-max"

    def start(self) -> Extrema:
        """Return the empty interval."""
        return math.inf, -math.inf

    def update(self, state: Extrema, values: torch.Tensor) -> Extrema:
        """Return the interval widened to hold the values."""
        return self.merge(state, extrema(values))

    def merge(self, first: Extrema, second: Extrema) -> Extrema:
        """Return the interval that holds both."""
        return min(first[0], second[0]), max(first[1], second[1])

    def result(self, state: Extrema) -> Range:
        """Return the range; raises ``ValueError`` where nothing was observed."""
        return self.spanning(*state)
