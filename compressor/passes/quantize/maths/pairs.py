"""Codes of weights that x86 CPUs without VNNI multiply without overflow.

Such CPUs multiply bytes by ``vpmaddubsw``: two unsigned activations times two signed weights, added
in 16 bits, which saturate. Activations reach 255, so that the positive codes of a pair may add up
to 128, and so may the negative ones. Which columns make a pair is the runtime's order: ONNX Runtime
puts the channels of one kernel position behind those of the other. Products, which have one
position, take neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from compressor.types.layers import QuantizedTensor, Scheme

MOST = 128
"""The largest sum of two codes of one sign: 255 x 128 lies within 16 bits, 255 x 129 does not."""

_WIDENINGS = tuple(2 ** (step / 16) for step in range(17))  # at twice the scale, nothing overflows
_AT_ONCE = 1 << 18  # elements: of fewer, calling operators takes longer than what they compute


def clip_pairs(codes: Tensor, positions: int) -> Tensor:
    """Move the codes of each pair that can overflow towards zero, both by half of the excess.

    Args:
        codes: signed integers of any dtype, ``[rows, columns]``; not changed.
        positions: of the kernel, 1 for a product; columns are ``[channels, positions]``.
    """
    first, second, _ = _halves(codes, positions)
    rows, places = _overflowing(first.to(torch.int16), second)
    if not len(rows):
        return codes
    given = (half[rows, places].to(torch.int16) for half in (first, second))
    columns = torch.stack(pairs(codes.shape[1], positions)).to(codes.device)[:, places]
    changed = codes.clone()
    changed[rows, columns] = torch.stack(_clipped(*given)).to(codes.dtype)
    return changed


def _halves(matrix: Tensor, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and the second of each pair, and a last column without one, if odd."""
    if positions > 1:
        matrix = matrix.reshape(len(matrix), -1, positions).transpose(1, 2).flatten(1)
    whole = matrix.shape[1] // 2 * 2
    return matrix[:, 0:whole:2], matrix[:, 1:whole:2], matrix[:, whole:]


def _overflowing(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Return rows and places of pairs that can overflow; only codes of one sign add up to that."""
    sums = (first + second).abs_()
    if not sums.is_cpu:
        return (sums > MOST).nonzero(as_tuple=True)
    # NumPy compares and finds what is true in a fifth of PyTorch's time.
    places = np.flatnonzero(sums.numpy() > MOST)
    return tuple(map(torch.from_numpy, np.divmod(places, max(sums.shape[1], 1))))


def _clipped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clipped codes of pairs that can overflow; the larger code gives up more."""
    excess, sign, larger = (a + b).abs() - MOST, a.sign(), a.abs() >= b.abs()
    less = torch.div(excess, 2, rounding_mode="floor")
    more = excess - less
    return a - sign * torch.where(larger, more, less), b - sign * torch.where(larger, less, more)


def without_overflow(quantized: QuantizedTensor) -> QuantizedTensor:
    """Return a weight with its pairs clipped, if its scheme has pairs."""
    positions = quantized.scheme.paired
    if positions is None:
        return quantized
    return replace(quantized, codes=clip_pairs(quantized.codes, positions))


def paired_scale(matrix: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Widen scales where clipped pairs would cost more than larger steps.

    Scales up to twice the given ones are tried, and the one of least squared error is kept.

    Args:
        matrix: the weight, ``[rows, columns]``.
        scale: ``[rows, 1]`` or ``[1, 1]``.
        scheme: symmetric integers; without ``paired`` the scale stays.
    """
    if scheme.paired is None:
        return scale
    step = max(1, _AT_ONCE // max(matrix.shape[1], 1))
    starts = range(0, len(matrix), step)
    shared = scale.shape[0] == 1
    widened, errors_of_all = scale.clone(), torch.zeros(len(_WIDENINGS), dtype=torch.float64)
    for start in starts:
        halves = _halves(matrix[start : start + step].to(torch.float32), scheme.paired)
        given = scale if shared else scale[start : start + step]
        if shared:
            tried = [_errors(halves, given * x, scheme).sum() for x in _WIDENINGS]
            errors_of_all += torch.stack(tried)
            continue
        rows, _ = _overflowing(*(_nearest(half, given, scheme) for half in halves[:2]))
        rows = torch.unique_consecutive(rows)
        if len(rows):
            some = tuple(half[rows] for half in halves)
            scales = torch.stack([given[rows] * x for x in _WIDENINGS])
            errors = torch.stack([_errors(some, x, scheme) for x in scales])
            widened[start + rows] = scales.gather(0, errors.argmin(0)[None, :, None])[0]
    return scale * _WIDENINGS[int(errors_of_all.argmin())] if shared else widened


def _nearest(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    return torch.div(values, scale).round_().clamp_(scheme.low, scheme.high)


def _errors(halves: tuple[Tensor, ...], scale: Tensor, scheme: Scheme) -> Tensor:
    """Each row's squared error with its pairs clipped, float64."""
    first, second, rest = (_nearest(half, scale, scheme) for half in halves)
    rows, places = _overflowing(first, second)
    if len(rows):
        clipped = _clipped(first[rows, places], second[rows, places])
        first[rows, places], second[rows, places] = clipped
    return (
        _squares(first, halves[0], scale)
        + _squares(second, halves[1], scale)
        + _squares(rest, halves[2], scale)
    )


def _squares(codes: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Return each row's sum, float64; the codes are used up."""
    return codes.mul_(scale).sub_(values).square_().sum(1, dtype=torch.float64)


@cache
def pairs(columns: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second column of each pair; an odd last column has none."""
    order = torch.arange(columns).reshape(columns // positions, positions).T.reshape(-1)
    whole = order[: columns // 2 * 2]
    return whole[0::2], whole[1::2]
