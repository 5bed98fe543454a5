"""Observers of a layer's input, channel by channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from pydantic import Field

from compressor.calibration.histogram import extrema
from compressor.calibration.moments import (
    Levels,
    Window,
    add_levels,
    add_patches,
    add_vectors,
    fit_levels,
    merge_levels,
    merge_moments,
    patch_vectors,
)
from compressor.types.statistics import ChannelGrid, Moments, Observer

StateT = TypeVar("StateT")


class InputObserver(Observer[StateT | None, StateT | None]):
    """An observer of a layer's inputs: of vectors, or with a kernel of patches.

    The state is ``None`` before any input. Planning gets ``None``.
    """

    kernel: tuple[int, int] | None = Field(default=None, description="kernel of a 2-D convolution")
    strides: tuple[int, int] = Field(default=(1, 1), description="its strides")
    pads: tuple[int, int, int, int] = Field(default=(0, 0, 0, 0), description="its pads")
    dilations: tuple[int, int] = Field(default=(1, 1), description="its dilations")
    groups: int = Field(default=1, ge=1, description="its channel groups")

    @property
    def window(self) -> Window | None:
        """The patches that a convolution sees; ``None`` for vectors."""
        if self.kernel is None:
            return None
        return Window(self.kernel, self.strides, self.pads, self.dilations, self.groups)

    def start(self) -> StateT | None:
        """Return ``None``."""
        return None

    def placeholder(self) -> StateT | None:
        """Return ``None``: a plan needs no moment and no norm."""
        return None

    def result(self, state: StateT | None) -> StateT | None:
        """Return the state; raises ``ValueError`` if nothing was observed."""
        if state is None:
            raise ValueError("nothing was observed")
        return state


class SecondMoment(InputObserver[Moments]):
    """``Σ x xᵀ`` over a layer's inputs ``x``: vectors, or with a kernel the patches it sees.

    Observation stops after a number of vectors for each column; more would sharpen the moment
    slightly and cost more than the rest of calibration. The result includes the sum of the
    vectors. Planning gets ``None``.
    """

    name: ClassVar[str] = "second-moment"
    rows_per_column: int = Field(
        default=8, ge=1, description="vectors for each of their elements after which to stop"
    )

    def update(self, state: Moments | None, values: torch.Tensor) -> Moments | None:
        """Return the state after also seeing ``values``."""
        if self.share(state) >= 1:
            return state
        if self.window is None:
            return add_vectors(state, values)
        return add_patches(state, values, self.window)

    def share(self, state: Moments | None) -> float:
        """Return vectors over wanted vectors."""
        if state is None:
            return 0.0
        return state.rows / (self.rows_per_column * state.second.shape[-1])

    def merge(self, first: Moments | None, second: Moments | None) -> Moments | None:
        """Return the moment of both streams."""
        return merge_moments(first, second)


Squares = torch.Tensor | None


class ColumnNorm(InputObserver[torch.Tensor]):
    """l2 norm of each element of a layer's inputs: of vectors, or with a kernel of patches.

    This is the root of the diagonal of ``second-moment``, in memory that grows with the columns and
    not with their square. The result is float32 ``[groups, columns]``; planning gets ``None``.
    """

    name: ClassVar[str] = "column-norm"

    def update(self, state: Squares, values: torch.Tensor) -> Squares:
        """Return the sums of squares with those of ``values`` added."""
        if self.window is None:
            vectors = values.reshape(-1, values.shape[-1]).T[None]
        else:
            vectors = patch_vectors(values, self.window)
        return self.merge(state, vectors.to(torch.float64).square().sum(2))

    def merge(self, first: Squares, second: Squares) -> Squares:
        """Return the sums of both streams."""
        if first is None or second is None:
            return second if first is None else first
        return first + second

    def result(self, state: Squares) -> Squares:
        """Return the norms; raises ``ValueError`` if nothing was observed."""
        sums = super().result(state)
        return None if sums is None else sums.sqrt().to(torch.float32)


class ChannelGridObserver(Observer[Levels, ChannelGrid | None]):
    """The grid of channels with at most 256 evenly spaced values each, as 8-bit images have.

    Normalizing pixels by the mean and deviation of each channel keeps them on a grid, one for each
    channel. The result is that grid, or ``None`` if there is none.
    """

    name: ClassVar[str] = "channel-grid"

    def start(self) -> Levels:
        """Return the levels of nothing."""
        return Levels()

    def update(self, state: Levels, values: torch.Tensor) -> Levels:
        """Return the state after also seeing ``values``, ``[batch, channels, ...]``."""
        return add_levels(state, values)

    def merge(self, first: Levels, second: Levels) -> Levels:
        """Return the levels of both streams."""
        return merge_levels(first, second)

    def result(self, state: Levels) -> ChannelGrid | None:
        """Return the grid, or ``None`` if some channel has none."""
        return fit_levels(state)

    def placeholder(self) -> ChannelGrid | None:
        """Return ``None``: a plan assumes no grid."""
        return None


@dataclass(frozen=True, eq=False)
class MagnitudeSums:
    """Sums of absolute values."""

    # one sum for each channel, float64; `None` before any value
    total: torch.Tensor | None = None
    count: int = 0  # how many values each is over


class ChannelMagnitude(Observer[MagnitudeSums, torch.Tensor | None]):
    """The mean of absolute values at each position of an axis.

    H. Hu et al., Network trimming, 2016 (arXiv:1607.03250), section 2, prune channels that are
    inactive on real data. They count zeros; the mean also ranks channels of activation functions
    that never return zero. Planning gets ``None``.
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
