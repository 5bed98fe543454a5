"""The grid that the channels of an input lie on, if they do."""

from __future__ import annotations

from typing import ClassVar

import torch

from compressor.calibration.levels import Levels, add, fit, merge
from compressor.types.statistics import ChannelGrid, Observer


class ChannelGridObserver(Observer[Levels, ChannelGrid | None]):
    """Tell whether each channel has at most 256 evenly spaced values, as 8-bit images do.

    Normalizing pixels by a mean and deviation of each channel keeps them on a grid of their
    channel's own. The result is that grid, or ``None``.
    """

    name: ClassVar[str] = "channel-grid"

    def start(self) -> Levels:
        """Return the levels of nothing."""
        return Levels()

    def update(self, state: Levels, values: torch.Tensor) -> Levels:
        """Return the state after also seeing ``values``, ``[batch, channels, ...]``."""
        return add(state, values)

    def merge(self, first: Levels, second: Levels) -> Levels:
        """Return the levels of both streams."""
        return merge(first, second)

    def result(self, state: Levels) -> ChannelGrid | None:
        """Return the grid, or ``None`` if some channel has none."""
        return fit(state)

    def placeholder(self) -> ChannelGrid | None:
        """Return ``None``: a plan assumes no grid."""
        return None
