"""Observers of a layer's input, channel by channel."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from pydantic import Field

from compressor.calibration.histogram import extrema
from compressor.calibration.moments import MOST_LEVELS, MomentSums, fit_grid, patch_vectors
from compressor.types.statistics import ChannelGrid, ChannelSpans, Moments, Observer

StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")


class Sum(Observer[StateT | None, ResultT | None]):
    """An observer whose state is ``None`` before any value, and whose results a plan ignores."""

    def start(self) -> StateT | None:
        """Return ``None``."""
        return None

    def merge(self, first: StateT | None, second: StateT | None) -> StateT | None:
        """Return the state of both streams."""
        if first is None or second is None:
            return second if first is None else first
        return self.added(first, second)

    @abstractmethod
    def added(self, first: StateT, second: StateT) -> StateT:
        """Return the state of both streams, neither of which is empty."""

    def placeholder(self) -> ResultT | None:
        """Return ``None``."""
        return None


def observed(state: StateT | None) -> StateT:
    """Return a state that is not ``None``.

    Raises:
        ValueError: nothing was observed.
    """
    if state is None:
        raise ValueError("no values were observed")
    return state


class InputObserver(Sum[StateT, ResultT]):
    """An observer of a layer's inputs: of vectors, or with a kernel of patches."""

    kernel: tuple[int, int] | None = Field(default=None, description="kernel of a 2-D convolution")
    strides: tuple[int, int] = Field(default=(1, 1), description="its strides")
    pads: tuple[int, int, int, int] = Field(default=(0, 0, 0, 0), description="its pads")
    dilations: tuple[int, int] = Field(default=(1, 1), description="its dilations")
    groups: int = Field(default=1, ge=1, description="its channel groups")

    def vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the layer multiplies its weights with, ``[groups, columns, rows]``."""
        if self.kernel is None:
            return values.reshape(-1, values.shape[-1]).T[None]
        window = (self.kernel, self.strides, self.pads, self.dilations, self.groups)
        return patch_vectors(values, *window)


class SecondMoment(InputObserver[MomentSums, Moments]):
    """``Σ x xᵀ`` over a layer's inputs ``x``: vectors, or with a kernel the patches it sees.

    Observation stops after a number of vectors for each column; more would sharpen the moment
    slightly and cost more than the rest of calibration. The result includes the sum of the
    vectors, and the vectors themselves while they are fewer than a wide layer's columns. Planning
    gets ``None``.
    """

    name: ClassVar[str] = "second-moment"
    rows_per_column: int = Field(
        default=8, ge=1, description="vectors for each of their elements after which to stop"
    )

    def update(self, state: MomentSums | None, values: torch.Tensor) -> MomentSums | None:
        """Return the state after also seeing ``values``."""
        if state is None or state.second is None or self.share(state) >= 1:
            return self.absorb(state, values)
        return self.absorb(replace(state, second=state.second.clone()), values)

    def absorb(self, state: MomentSums | None, values: torch.Tensor) -> MomentSums | None:
        """Return the state after also seeing ``values``; the matrix of the one given is reused."""
        if self.share(state) >= 1:
            return state
        vectors = self.vectors(values).to(torch.float32)
        if state is None:
            state = MomentSums(None, torch.zeros(vectors.shape[:2]), 0)
        return state.with_vectors(vectors)

    def result(self, state: MomentSums | None) -> Moments | None:
        """Return the moments; raises ``ValueError`` if nothing was observed."""
        return observed(state).moments()

    def share(self, state: MomentSums | None) -> float:
        """Return vectors over wanted vectors."""
        if state is None:
            return 0.0
        return state.rows / (self.rows_per_column * state.first.shape[-1])

    def added(self, first: MomentSums, second: MomentSums) -> MomentSums:
        """Return the moment of both streams."""
        return first.merged(second)


class ColumnNorm(InputObserver[torch.Tensor, torch.Tensor]):
    """l2 norm of each element of a layer's inputs: of vectors, or with a kernel of patches.

    This is the root of the diagonal of ``second-moment``, in memory that grows with the columns and
    not with their square. The result is float32 ``[groups, columns]``; planning gets ``None``.
    """

    name: ClassVar[str] = "column-norm"

    def update(self, state: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
        """Return the sums of squares with those of ``values`` added."""
        return self.merge(state, self.vectors(values).to(torch.float64).square().sum(2))

    def added(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the sums of both streams."""
        return first + second

    def result(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """Return the norms; raises ``ValueError`` if nothing was observed."""
        return observed(state).sqrt().to(torch.float32)


Levels = tuple[torch.Tensor, ...]
"""The sorted distinct values of each channel; empty if one has more of them than a grid could."""


class ChannelGridObserver(Sum[Levels, ChannelGrid]):
    """The grid of channels with at most 256 evenly spaced values each, as 8-bit images have.

    Normalizing pixels by the mean and deviation of each channel keeps them on a grid, one for each
    channel. The result is that grid, or ``None`` if there is none.
    """

    name: ClassVar[str] = "channel-grid"

    def update(self, state: Levels | None, values: torch.Tensor) -> Levels | None:
        """Return the state after also seeing ``values``, ``[batch, channels, ...]``."""
        if state == () or values.ndim < 2:
            return ()
        levels = []
        for channel in values.transpose(0, 1).reshape(values.shape[1], -1):
            # The first values are cheap to look at, and decide most cases.
            if torch.unique(channel[: 4 * MOST_LEVELS]).numel() > MOST_LEVELS:
                return ()
            levels.append(torch.from_numpy(np.unique(channel.numpy())))  # sorts faster than torch
        return self.merge(state, tuple(levels))

    def added(self, first: Levels, second: Levels) -> Levels:
        """Return the levels of both streams."""
        if not first or not second:
            return ()
        joined = tuple(torch.unique(torch.cat(pair)) for pair in zip(first, second, strict=True))
        return () if any(channel.numel() > MOST_LEVELS for channel in joined) else joined

    def result(self, state: Levels | None) -> ChannelGrid | None:
        """Return the grid, or ``None`` if some channel has none."""
        fitted = [fit_grid(channel.to(torch.float64)) for channel in state or ()]
        grids = [grid for grid in fitted if grid is not None]
        if not grids or len(grids) < len(fitted):
            return None
        return ChannelGrid(tuple(step for step, _ in grids), tuple(offset for _, offset in grids))


@dataclass(frozen=True, eq=False)
class MagnitudeSums:
    """Sums of absolute values."""

    total: torch.Tensor  # one sum for each channel, float64
    count: int  # how many values each is over


def _check_rank(axis: int, values: torch.Tensor) -> None:
    if axis >= values.ndim:
        raise ValueError(f"axis {axis} of values of rank {values.ndim}")


def _check_lengths(first: torch.Tensor, second: torch.Tensor) -> None:
    if first.shape != second.shape:
        lengths = f"{first.numel()} and {second.numel()}"
        raise ValueError(f"the axis of channels is {lengths} long")


class ChannelMagnitude(Sum[MagnitudeSums, torch.Tensor]):
    """The mean of absolute values at each position of an axis.

    H. Hu et al., Network trimming, 2016 (arXiv:1607.03250), section 2, prune channels that are
    inactive on real data. They count zeros; the mean also ranks channels of activation functions
    that never return zero. Planning gets ``None``.
    """

    name: ClassVar[str] = "channel-magnitude"

    axis: int = Field(default=1, ge=0, description="the axis that runs over channels")

    def update(self, state: MagnitudeSums | None, values: torch.Tensor) -> MagnitudeSums | None:
        """Return the sums with ``values`` added, whose axis is as long as before.

        Raises:
            ValueError: a value is not finite, or the axis is missing or of another length.
        """
        _check_rank(self.axis, values)
        if not values.numel():
            return state
        extrema(values)
        rest = [i for i in range(values.ndim) if i != self.axis]
        size = values.abs()
        total = size.sum(rest, dtype=torch.float64) if rest else size.to(torch.float64)
        return self.merge(state, MagnitudeSums(total, values.numel() // values.shape[self.axis]))

    def added(self, first: MagnitudeSums, second: MagnitudeSums) -> MagnitudeSums:
        """Return the sums over both streams; raises ``ValueError`` where their channels differ."""
        _check_lengths(first.total, second.total)
        return MagnitudeSums(first.total + second.total, first.count + second.count)

    def result(self, state: MagnitudeSums | None) -> torch.Tensor | None:
        """Return the means, float64; raises ``ValueError`` where nothing was observed."""
        sums = observed(state)
        return sums.total / sums.count


@dataclass(frozen=True, eq=False)
class SpanSums:
    """Statistics of channels; peaks are those of the negated low ends and of the high ends."""

    highest: torch.Tensor  # the greatest peak of all samples, float64 `[2, channels]`
    total: torch.Tensor  # sum of the samples' peaks
    samples: int
    power: torch.Tensor  # sum of squares of all values, float64 `[channels]`
    count: int  # how many values each channel had

    def __add__(self, other: SpanSums) -> SpanSums:
        """Return the sums over both."""
        return SpanSums(
            torch.maximum(self.highest, other.highest),
            self.total + other.total,
            self.samples + other.samples,
            self.power + other.power,
            self.count + other.count,
        )

    def reach(self, horizon: int) -> torch.Tensor:
        """Return the peak that one sample in ``horizon`` is expected to exceed.

        Peaks of more samples grow with the logarithm of their number (the Gumbel distribution;
        Coles, An Introduction to Statistical Modeling of Extreme Values, 2001, section 3.1). The
        rate is what led from their mean to the greatest one, so that a channel which few samples
        excite is expected to go further than one which all do.
        """
        if self.samples < 2:
            return self.highest
        rate = (self.highest - self.total / self.samples) / math.log(self.samples)
        grown = self.highest + rate * max(math.log(horizon / self.samples), 0.0)
        return torch.where(self.highest > 0, grown, self.highest)


class ChannelSpan(Sum[SpanSums, ChannelSpans]):
    """How far values reach at each position of an axis, and the mean of their squares.

    They say how much finer a value could be quantized if its channels were scaled (Nagel et al.
    2019, arXiv:1906.04721, section 4.1), and how far later samples would leave its range. Planning
    gets ``None``.
    """

    name: ClassVar[str] = "channel-spans"

    axis: int = Field(default=1, ge=1, description="the axis that runs over channels")
    horizon: int = Field(
        default=5000, ge=1, description="samples whose values are foreseen, these included"
    )

    def update(self, state: SpanSums | None, values: torch.Tensor) -> SpanSums | None:
        """Return the state after also seeing ``values``, whose rows are samples.

        Raises:
            ValueError: a value is not finite, or the axis is missing or of another length.
        """
        _check_rank(self.axis, values)
        return self.with_peaks(state, values, self.peaks(values)) if values.numel() else state

    def peaks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the negated least and the greatest of each sample's channels.

        Returns:
            float64 ``[2, samples, channels]``.

        Raises:
            ValueError: a value is not finite.
        """
        each = self._channels(values)
        # Along an axis, aminmax takes 20 times as long as both.
        peaks = torch.stack([-each.amin(2), each.amax(2)]).to(torch.float64)
        if not bool(torch.isfinite(peaks).all()):
            raise ValueError("some of the values are not finite")
        return peaks

    def with_peaks(
        self, state: SpanSums | None, values: torch.Tensor, peaks: torch.Tensor
    ) -> SpanSums | None:
        """Return the state after also seeing values whose peaks are known, at least one."""
        each = self._channels(values)
        power = torch.linalg.vector_norm(each, dim=2).to(torch.float64).square().sum(0)
        count = each.shape[0] * each.shape[2]
        sums = SpanSums(peaks.amax(1), peaks.sum(1), peaks.shape[1], power, count)
        return self.merge(state, sums)

    def _channels(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as float32 ``[samples, channels, rest]``."""
        each = values.movedim(self.axis, 1)
        return each.reshape(*each.shape[:2], -1).to(torch.float32)

    def added(self, first: SpanSums, second: SpanSums) -> SpanSums:
        """Return the state of both streams; raises ``ValueError`` where their channels differ."""
        _check_lengths(first.power, second.power)
        return first + second

    def result(self, state: SpanSums | None) -> ChannelSpans | None:
        """Return the spans; raises ``ValueError`` if nothing was observed."""
        sums = observed(state)
        return ChannelSpans(
            sums.highest.to(torch.float32),
            sums.reach(self.horizon).to(torch.float32),
            (sums.power / sums.count).to(torch.float32),
        )
