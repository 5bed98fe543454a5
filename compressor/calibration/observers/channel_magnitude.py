"""The mean absolute value of each channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.extrema import extrema
from compressor.types.statistics import Observer


@dataclass(frozen=True, eq=False)
class MagnitudeSums:
    """Sums of absolute values.

    Attributes:
        total: one sum for each channel, float64; ``None`` before any value.
        count: how many values each is over.
    """

    total: torch.Tensor | None = None
    count: int = 0


class ChannelMagnitude(Observer[MagnitudeSums, torch.Tensor | None]):
    """The mean of absolute values at each position of an axis.

    H. Hu et al., Network trimming, 2016 (arXiv:1607.03250), section 2, prune what is inactive on
    real data. They count zeros; the mean also ranks where an activation function gives none.
    Planning gets ``None``.
    """

    name: ClassVar[str] = "channel-magnitude"

    axis: int = Field(default=1, ge=0, description="the axis that runs over channels")

    def start(self) -> MagnitudeSums:
        """Return the sums of nothing."""
        return MagnitudeSums()

    def update(self, state: MagnitudeSums, values: torch.Tensor) -> MagnitudeSums:
        """Return the sums with ``values`` added, whose axis is as long as before.

        Raises:
            ValueError: a value is not finite, or the axis is missing or of another length.
        """
        if self.axis >= values.ndim:
            raise ValueError(f"axis {self.axis} of values of rank {values.ndim}")
        if not values.numel():
            return state
        extrema(values)
        rest = [i for i in range(values.ndim) if i != self.axis]
        size = values.abs()
        total = size.sum(rest, dtype=torch.float64) if rest else size.to(torch.float64)
        return self.merge(state, MagnitudeSums(total, values.numel() // values.shape[self.axis]))

    def merge(self, first: MagnitudeSums, second: MagnitudeSums) -> MagnitudeSums:
        """Return the sums over both streams; raises ``ValueError`` where their channels differ."""
        if first.total is None or second.total is None:
            return second if first.total is None else first
        if first.total.shape != second.total.shape:
            lengths = f"{first.total.numel()} and {second.total.numel()}"
            raise ValueError(f"the axis of channels is {lengths} long")
        return MagnitudeSums(first.total + second.total, first.count + second.count)

    def result(self, state: MagnitudeSums) -> torch.Tensor | None:
        """Return the means, float64; raises ``ValueError`` where nothing was observed."""
        if state.total is None:
            raise ValueError("no values were observed")
        return state.total / state.count

    def placeholder(self) -> torch.Tensor | None:
        """Return ``None``: a plan ranks nothing."""
        return None
