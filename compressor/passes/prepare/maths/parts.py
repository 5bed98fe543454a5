"""Sources of error that shared factors of channels change, and how each factor changes them.

With ``f`` for the factors that channels are divided by, rounding a value with one step adds

    step² / 12 Σ_c g_c f_c²

to the squared error of what the network computes, and rounding a row of a weight that reads the
channels adds ``g_r step_r² / 12 Σ_c p_c / f_c²``. Here ``step`` is the width of the value's range
or of the row over the number of steps, ``g`` is what a mean squared error of one adds to the
output, and ``p`` is the power of what a weight is multiplied with.

A descent needs to know what each factor does to a range, and where several channels share the
greatest size, no single factor changes the maximum. So it has a norm in place of the maximum. The
power of a channel's size is that of the size without a factor, times that of the factor: all norms
are products of one matrix with a vector, and so are their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compressor.types.tensors import Array

_SHARP = 24  # exponent of the norm that stands for a maximum in descent
_LEAST = 1e-300

Soft: TypeAlias = Callable[[Array], tuple[float, Array]]
"""Takes binary logarithms of factors, float64, one a number, and a last one of 0 for channels that
keep their scale; returns the predicted error with norms in place of maxima, and its derivative by
the natural logarithm of each factor. Arrays are numpy's: of few channels, torch's functions take
several times as long."""


class Part(Protocol):
    """A source of error."""

    def error(self, factors: Tensor) -> Tensor:
        """Return the predicted error, a scalar.

        Args:
            factors: one a number, and a last one of 1 for channels that keep their scale.
        """
        ...

    def softened(self) -> Soft:
        """Return what computes the error and its derivative for a descent."""
        ...


@dataclass(frozen=True, eq=False)
class Span:
    """A value that is quantized with one step."""

    reach: Tensor  # how far each channel goes down, sign turned, and up, float32 `[2, channels]`
    gain: Tensor  # what a mean squared error of 1 in each channel adds to the output's
    index: Tensor  # the number of each channel's factor, int64; -1 where it has none
    steps: int  # from the low end of the range to the high one
    symmetric: bool  # the range is `(-t, t)`

    def error(self, factors: Tensor) -> Tensor:
        """Return the error of rounding the value."""
        each = factors[self.index]
        ends = (self.reach / each).clamp(min=0).amax(1)
        width = 2 * ends.amax() if self.symmetric else ends.sum()
        return (width / self.steps).square() / 12 * (self.gain * each.square()).sum()

    def softened(self) -> Soft:
        """Return what computes the error and its derivative for a descent."""
        reach = self.reach.clamp(min=0)
        greatest = reach.amax(1).numpy()
        powers = _powers(reach, reach.amax(1, keepdim=True))
        gain, index = self.gain.numpy(), self.index.numpy()

        def soft(logarithms: Array) -> tuple[float, Array]:
            each = logarithms[index]
            raised = powers * np.exp2(-_SHARP * each)
            totals = np.maximum(raised.sum(1), _LEAST)
            ends = greatest * totals ** (1 / _SHARP)
            if self.symmetric:
                widest = ends == ends.max()
                ends = np.where(widest, 2 * ends / widest.sum(), 0)
            noise = gain * np.exp2(2 * each)
            error = (ends.sum() / self.steps) ** 2 / 12 * noise.sum()
            # Of a value that is always zero, the product is too small for float64.
            shares = ends / np.maximum(ends.sum() * totals, _LEAST)
            moved = noise / max(noise.sum(), _LEAST) - shares @ raised
            return float(error), _gathered(2 * error * moved, index, len(logarithms))

        return soft


@dataclass(frozen=True, eq=False)
class Columns:
    """A quantized weight that reads the channels; its rows lie in groups of channels."""

    peaks: Tensor  # greatest weight of each row on each channel, `[groups, rows, channels]`
    power: Tensor  # mean square of a channel, times weights on it in a row, `[groups, channels]`
    gain: Tensor  # what a mean squared error of 1 in each row adds, `[groups, rows]`
    index: Tensor  # the number of each channel's factor, int64 `[groups, channels]`
    steps: int  # from the least code to the greatest
    shared: bool  # all rows have one step

    def error(self, factors: Tensor) -> Tensor:
        """Return the error of rounding the weight."""
        each = factors[self.index]
        top = (self.peaks * each[:, None, :]).amax(2)
        if self.shared:
            top = top.amax().expand_as(top)
        rounding = (self.gain * (2 * top / self.steps).square()).sum(1) / 12
        return (rounding * (self.power / each.square()).sum(1)).sum()

    def softened(self) -> Soft:
        """Return what computes the error and its derivative for a descent."""
        greatest = self.peaks.amax((0, 1, 2) if self.shared else 2, True)
        powers = _powers(self.peaks, greatest)
        steps = (2 * greatest[..., 0] / self.steps).square()
        first = (self.gain.to(torch.float64) * steps / 12).numpy()
        if self.shared:
            powers, first = powers.sum(1, keepdims=True), first.sum(1, keepdims=True)
        power, index = self.power.numpy(), self.index.numpy()

        def soft(logarithms: Array) -> tuple[float, Array]:
            each = logarithms[index]
            raised = np.exp2(_SHARP * each)
            totals = (powers @ raised[:, :, None])[:, :, 0]
            totals = np.maximum(totals.sum() if self.shared else totals, _LEAST)
            rounding = first * totals ** (2 / _SHARP)
            noise = power * np.exp2(-2 * each)
            behind, every = noise.sum(1, keepdims=True), rounding.sum(1, keepdims=True)
            error = (every * behind).sum()
            pull = np.broadcast_to(error, first.shape) if self.shared else rounding * behind
            grown = raised * ((pull / totals)[:, None, :] @ powers)[:, 0]
            slopes = _gathered(2 * (grown - every * noise), index, len(logarithms))
            return float(error), slopes

        return soft


@dataclass(frozen=True, eq=False)
class Rows:
    """A weight with one step for all of its rows, which compute the channels."""

    peaks: Tensor  # greatest weight of each row, `[rows]`
    power: Tensor  # mean squares of what a row is multiplied with, summed, `[rows]`
    gain: Tensor  # what a mean squared error of 1 in each row adds
    index: Tensor  # the number of each row's factor, int64
    steps: int  # from the least code to the greatest

    def error(self, factors: Tensor) -> Tensor:
        """Return the error of rounding the weight."""
        return self._span.error(factors)

    def softened(self) -> Soft:
        """Return what computes the error and its derivative for a descent."""
        return self._span.softened()

    @property
    def _span(self) -> Span:
        """The same error: that of a value whose channels reach as far as the rows do."""
        reach = torch.stack([torch.zeros_like(self.peaks), self.peaks])
        return Span(reach, self.gain * self.power, self.index, self.steps, True)


def _powers(sizes: Tensor, greatest: Tensor) -> Array:
    """Return the powers of sizes over the greatest, which is 0 only where all are; float64."""
    shares = (sizes / greatest.clamp(min=torch.finfo(sizes.dtype).tiny)).to(torch.float64)
    powers: Array = shares.square_().square_().square_().pow_(_SHARP // 8).numpy()
    return powers


def _gathered(slopes: Array, index: Array, count: int) -> Array:
    """Return the sum of the slopes of each number; channels without a factor have the last."""
    places = np.where(index < 0, count - 1, index)
    return np.bincount(places.ravel(), slopes.ravel(), count)
