"""The average of each batch's extrema, recent batches weighing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.extrema import extrema
from compressor.calibration.observers.ranges import RangeObserver
from compressor.types.statistics import Range


@dataclass(frozen=True)
class Average:
    """Exponentially weighted sums of extrema.

    Attributes:
        low: the sum of each batch's least value times its weight.
        high: the sum of each batch's greatest value times its weight.
        decay: ``(1 - constant) ** batches``, the weight that the start still has.
    """

    low: float = 0.0
    high: float = 0.0
    decay: float = 1.0


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
