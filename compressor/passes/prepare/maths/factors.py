"""Factors of shared channels, by the output error that quantization is predicted to make.

Channels of a value are divided by positive factors, and the columns that read them are multiplied
by the same: the function stays, the steps of quantizers change. With ``f`` for the factors, the
error that rounding adds to what the network computes is predicted as

    Σ_values step² / 12 Σ_c g_c f_c²  +  Σ_rows g_r step_r² / 12 Σ_c p_c / f_c²

where ``step`` is the width of a value's range over its number of steps, ``g`` is what a mean
squared error of one adds to the output, and ``p`` is the power of what a weight is multiplied with.
Ranges and rows' steps are found from the scaled channels.

M. Nagel et al., Data-free quantization through weight equalization and bias correction, 2019
(arXiv:1906.04721), section 4.1, and G. Xiao et al., SmoothQuant, 2022 (arXiv:2211.10438), section
4, give closed forms for one exponent; here exponents and then single factors are searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FURTHEST = 10.0  # from the mean factor to the least and the greatest, as a binary logarithm
_GRAIN = 16  # factors are powers of two of whole multiples of 1 / _GRAIN
_ROUNDS, _EVERY = 60, 6  # of descent; after how many its factors are judged
_RATE = 0.25  # of descent, in binary logarithms
_NEAR = 1.5  # descent does not divide an error by more, unless channels are very uneven
_SHARP = 24.0  # exponent of the norm that stands for a maximum in descent
_LEAST = 1e-30
_LEVEL = 1e-4  # of the greatest: channels below count as this large


class Part(Protocol):
    """A source of error."""

    def error(self, factors: Tensor, sharp: float | None = None) -> Tensor:
        """Return the predicted error, a scalar.

        Args:
            factors: one a number, and a last one of 1 for channels that keep their scale.
            sharp: a norm of this exponent takes the place of maxima; ``None`` for the maxima.
        """
        ...


@dataclass(frozen=True, eq=False)
class Span:
    """A value that is quantized with one step."""

    reach: Tensor  # how far each channel goes down, sign turned, and up, float32 `[2, channels]`
    gain: Tensor  # what a mean squared error of 1 in each channel adds to the output's
    index: Tensor  # the number of each channel's factor, int64; -1 where it has none
    steps: int  # from the low end of the range to the high one
    symmetric: bool  # the range is `(-t, t)`

    def error(self, factors: Tensor, sharp: float | None = None) -> Tensor:
        """Return the error of rounding the value."""
        each = factors[self.index]
        ends = _greatest((self.reach / each).clamp(min=0), sharp)
        width = 2 * ends.amax() if self.symmetric else ends.sum()
        return (width / self.steps).square() / 12 * (self.gain * each.square()).sum()


@dataclass(frozen=True, eq=False)
class Columns:
    """A quantized weight that reads the channels; its rows lie in groups of channels."""

    peaks: Tensor  # greatest weight of each row on each channel, `[groups, rows, channels]`
    power: Tensor  # mean square of a channel, times weights on it in a row, `[groups, channels]`
    gain: Tensor  # what a mean squared error of 1 in each row adds, `[groups, rows]`
    index: Tensor  # the number of each channel's factor, int64 `[groups, channels]`
    steps: int  # from the least code to the greatest
    shared: bool  # all rows have one step

    def error(self, factors: Tensor, sharp: float | None = None) -> Tensor:
        """Return the error of rounding the weight."""
        each = factors[self.index]
        top = _greatest(self.peaks * each[:, None, :], sharp)
        if self.shared:
            top = _greatest(top.flatten(), sharp).expand_as(top)
        rounding = (self.gain * (2 * top / self.steps).square()).sum(1) / 12
        return (rounding * (self.power / each.square()).sum(1)).sum()


@dataclass(frozen=True, eq=False)
class Rows:
    """A weight with one step for all of its rows, which compute the channels."""

    peaks: Tensor  # greatest weight of each row, `[rows]`
    power: Tensor  # mean squares of what a row is multiplied with, summed, `[rows]`
    gain: Tensor  # what a mean squared error of 1 in each row adds
    index: Tensor  # the number of each row's factor, int64
    steps: int  # from the least code to the greatest

    def error(self, factors: Tensor, sharp: float | None = None) -> Tensor:
        """Return the error of rounding the weight."""
        each = factors[self.index]
        step = 2 * _greatest(self.peaks / each, sharp) / self.steps
        return step.square() / 12 * (self.gain * self.power * each.square()).sum()


@dataclass(frozen=True, eq=False)
class Found:
    """Factors, and the predicted error without and with them."""

    factors: Tensor  # float32 `[count]`
    before: float
    after: float


def find_factors(parts: Sequence[Part], count: int, wanted: float = math.inf) -> Found:
    """Return the factors of least predicted error that are found, which is never above that of 1.

    Powers of the channels' ranges and of the weights on them are tried, then all factors are
    refined together by descent. Factors are powers of two of multiples of 1/16, so that a result
    does not depend on the last bits of sums.

    Args:
        parts: the sources of error.
        count: how many factors there are.
        wanted: an error that is worth factors; where powers alone come nowhere near it, the search
            ends with them.
    """
    before = _error(parts, torch.zeros(count))
    best, least = torch.zeros(count), before
    tries = [_grid(parts, count)] if count > 1 and before > 0 else []
    for logarithms in tries:
        for tried in map(_grained, logarithms):
            error = _error(parts, tried)
            if error < least:
                best, least = tried, error
        if len(tries) == 1 and least < _NEAR * wanted:
            tries.append(_descent(parts, best))
    return Found(torch.exp2(best), before, least)


def total_error(parts: Sequence[Part], factors: Tensor) -> float:
    """Return the predicted error with one factor a number."""
    return float(_total(parts, factors))


def _error(parts: Sequence[Part], logarithms: Tensor) -> float:
    return total_error(parts, torch.exp2(logarithms))


def _total(parts: Sequence[Part], factors: Tensor, sharp: float | None = None) -> Tensor:
    every = torch.cat([factors, torch.ones(1)])
    return torch.stack([part.error(every, sharp) for part in parts]).sum()


def _grid(parts: Sequence[Part], count: int) -> list[Tensor]:
    """Return binary logarithms of powers of ranges over powers of weights."""
    ranges, weights = torch.zeros(count + 1), torch.zeros(count + 1)
    for part in parts:
        if isinstance(part, Span):
            _raise(ranges, part.index, part.reach.amax(0).clamp(min=0))
        elif isinstance(part, Columns):
            share = part.peaks / part.peaks.amax(2, keepdim=True).clamp(min=_LEAST)
            _raise(weights, part.index.flatten(), share.amax(1).flatten())
    first, second = (x[:-1].clamp(min=_LEVEL).log2() for x in (ranges, weights))
    return [a * first - b * second for a, b in product(_EXPONENTS, _EXPONENTS)][1:]


def _raise(greatest: Tensor, index: Tensor, sizes: Tensor) -> None:
    """Take sizes over the greatest of them into the greatest of each number, in place."""
    places = torch.where(index < 0, len(greatest) - 1, index)
    share = sizes / sizes.amax().clamp(min=_LEAST)
    greatest.scatter_reduce_(0, places, share, "amax")


def _descent(parts: Sequence[Part], start: Tensor) -> list[Tensor]:
    """Return the steps of a descent by gradients of the logarithm of the error, with soft maxima.

    Where several channels share the greatest range, no single factor changes the maximum; a norm
    shows all of them the way.
    """
    logarithms = start.clone().requires_grad_()
    mean, square, visited = torch.zeros_like(start), torch.zeros_like(start), []
    for done in range(1, _ROUNDS + 1):
        error = _total(parts, torch.exp2(logarithms), _SHARP).clamp(min=_LEAST).log()
        (slope,) = torch.autograd.grad(error, logarithms)
        # Adam (Kingma and Ba 2015), with steps that shrink; torch's own takes seconds to import.
        mean, square = mean.lerp(slope, 0.1), square.lerp(slope.square(), 0.01)
        unbiased = (mean / (1 - 0.9**done)) / (square / (1 - 0.99**done)).sqrt().clamp(min=_LEAST)
        step = _RATE * (1 - (done - 1) / _ROUNDS)
        logarithms = (logarithms.detach() - step * unbiased).requires_grad_()
        if done % _EVERY == 0:
            visited.append(logarithms.detach())
    return visited


def _grained(logarithms: Tensor) -> Tensor:
    """Return logarithms of mean 0 within bounds, as multiples of the grain."""
    bounded = (logarithms - logarithms.mean()).clamp(-_FURTHEST, _FURTHEST)
    return (bounded * _GRAIN).round() / _GRAIN


def _greatest(values: Tensor, sharp: float | None) -> Tensor:
    """Return the greatest of values that are not negative, along the last axis."""
    top = values.amax(-1)
    if sharp is None:
        return top
    scale = top.detach().clamp(min=_LEAST)
    return (values / scale[..., None]).pow(sharp).sum(-1).clamp(min=_LEAST).pow(1 / sharp) * scale
