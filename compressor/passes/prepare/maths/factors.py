"""Factors of shared channels, by the output error that quantization is predicted to make.

Channels of a value are divided by positive factors, and the columns that read them are multiplied
by the same: the function stays, the steps of quantizers change, and with them the error that
:mod:`compressor.passes.prepare.maths.parts` predicts. Ranges and rows' steps are found from the
scaled channels.

M. Nagel et al., Data-free quantization through weight equalization and bias correction, 2019
(arXiv:1906.04721), section 4.1, and G. Xiao et al., SmoothQuant, 2022 (arXiv:2211.10438), section
4, give closed forms for one exponent; here exponents and then single factors are searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from compressor.passes.prepare.maths.parts import Columns, Part, Span

_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FURTHEST = 10.0  # from the mean factor to the least and the greatest, as a binary logarithm
_GRAIN = 16  # factors are powers of two of whole multiples of 1 / _GRAIN
_ROUNDS, _EVERY = 60, 6  # of descent; after how many its factors are judged
_RATE = 0.25  # of descent, in binary logarithms
_NEAR = 1.5  # descent does not divide an error by more, unless channels are very uneven
_LEAST = 1e-30
_LEVEL = 1e-4  # of the greatest: weights below count as this large, and channels as always zero


@dataclass(frozen=True, eq=False)
class Found:
    """Factors, and the predicted error without and with them."""

    factors: Tensor  # float32 `[count]`
    before: float
    after: float


def find_factors(parts: Sequence[Part], count: int, wanted: float = math.inf) -> Found:
    """Return the factors of least predicted error that are found, which is never above that of 1.

    A channel that is as good as always zero says nothing of its size. Its best factor would be as
    small as may be, so that weights on it cost no step; but what writes the channel grows by as
    much, beyond what integer kernels multiply by. It gets the mean of the others.

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
    alive = _sizes(parts, count) > _LEVEL
    tries = [_grid(parts, count)] if count > 1 and before > 0 else []
    for logarithms in tries:
        for each in logarithms:
            tried = _grained(each, alive)
            error = _error(parts, tried)
            if error < least:
                best, least = tried, error
        if len(tries) == 1 and least < _NEAR * wanted:
            tries.append(_descent(parts, best))
    return Found(torch.exp2(best), before, least)


def total_error(parts: Sequence[Part], factors: Tensor) -> float:
    """Return the predicted error with one factor a number."""
    every = torch.cat([factors, torch.ones(1)])
    return float(torch.stack([part.error(every) for part in parts]).sum())


def _error(parts: Sequence[Part], logarithms: Tensor) -> float:
    return total_error(parts, torch.exp2(logarithms))


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


def _sizes(parts: Sequence[Part], count: int) -> Tensor:
    """Return the greatest share of each number in the range or the root power of a value."""
    sizes = torch.zeros(count + 1)
    for part in parts:
        if isinstance(part, Span):
            _raise(sizes, part.index, part.reach.amax(0).clamp(min=0))
        elif isinstance(part, Columns):
            _raise(sizes, part.index.flatten(), part.power.sqrt().flatten())
    return sizes[:-1]


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
    soft = [part.softened() for part in parts]
    logarithms = np.append(start.numpy().astype(np.float64), 0.0)
    mean, square, visited = np.zeros_like(logarithms), np.zeros_like(logarithms), []
    for done in range(1, _ROUNDS + 1):
        found = [each(logarithms) for each in soft]
        error = sum(error for error, _ in found)
        slope = np.sum([slope for _, slope in found], axis=0) / max(error, _LEAST)
        slope[-1] = 0.0
        # Adam (Kingma and Ba 2015), with steps that shrink.
        mean, square = 0.9 * mean + 0.1 * slope, 0.99 * square + 0.01 * slope * slope
        unbiased = (mean / (1 - 0.9**done)) / np.maximum(np.sqrt(square / (1 - 0.99**done)), _LEAST)
        logarithms = logarithms - _RATE * (1 - (done - 1) / _ROUNDS) * unbiased
        if done % _EVERY == 0:
            visited.append(torch.from_numpy(logarithms[:-1].astype(np.float32)))
    return visited


def _grained(logarithms: Tensor, alive: Tensor) -> Tensor:
    """Return logarithms of mean 0 within bounds, as multiples of the grain; 0 for what is dead."""
    bounded = (logarithms - logarithms[alive].mean()).clamp(-_FURTHEST, _FURTHEST)
    return torch.where(alive, (bounded * _GRAIN).round() / _GRAIN, 0.0)
