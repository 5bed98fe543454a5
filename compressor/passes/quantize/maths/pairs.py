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

import torch
from torch import Tensor

from compressor.types.layers import QuantizedTensor, Scheme

MOST = 128
"""The largest sum of two codes of one sign: 255 x 128 lies within 16 bits, 255 x 129 does not."""

_WIDENINGS = tuple(2 ** (step / 16) for step in range(17))  # at twice the scale, nothing overflows
_AT_ONCE = 1 << 19  # elements


def clip_pairs(codes: Tensor, positions: int) -> Tensor:
    """Move the codes of each pair that can overflow towards zero, both by half of the excess.

    Args:
        codes: signed integers of any dtype, ``[rows, columns]``; not changed.
        positions: of the kernel, 1 for a product; columns are ``[channels, positions]``.
    """
    first, second = pairs(codes.shape[1], positions)
    a, b = codes[:, first].to(torch.int16), codes[:, second].to(torch.int16)
    excess = (a + b).abs() - MOST
    over = (excess > 0) & (a.sign() == b.sign())
    if not bool(over.any()):
        return codes
    larger = a.abs() >= b.abs()
    less, more = excess // 2, excess - excess // 2
    changed = codes.clone()
    for columns, values, share in (
        (first, a, torch.where(larger, more, less)),
        (second, b, torch.where(larger, less, more)),
    ):
        clipped = torch.where(over, values - values.sign() * share, values)
        changed[:, columns] = clipped.to(codes.dtype)
    return changed


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
    pieces = [matrix[start : start + step] for start in range(0, len(matrix), step)]
    if scale.shape[0] == 1:
        errors = [
            sum(float(_errors(piece, scale * x, scheme).sum()) for piece in pieces)
            for x in _WIDENINGS
        ]
        return scale * _WIDENINGS[errors.index(min(errors))]
    widened = scale.clone()
    for start, piece in zip(range(0, len(matrix), step), pieces, strict=True):
        given = scale[start : start + step]
        codes = _nearest(piece, given, scheme)
        rows = (clip_pairs(codes, scheme.paired) != codes).any(1).nonzero()[:, 0]
        if len(rows):
            tried = [given[rows] * x for x in _WIDENINGS]
            errors_of = torch.stack([_errors(piece[rows], x, scheme) for x in tried])
            best = torch.stack(tried).gather(0, errors_of.argmin(0)[None, :, None])[0]
            widened[start + rows] = best
    return widened


def _nearest(matrix: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    return torch.round(matrix.to(torch.float32) / scale).clamp_(scheme.low, scheme.high)


def _errors(matrix: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Each row's squared error with its pairs clipped, float64."""
    assert scheme.paired is not None
    codes = clip_pairs(_nearest(matrix, scale, scheme), scheme.paired)
    return codes.mul(scale).sub_(matrix).square_().sum(1, dtype=torch.float64)


@cache
def pairs(columns: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second column of each pair; an odd last column has none."""
    order = torch.arange(columns).reshape(columns // positions, positions).T.reshape(-1)
    whole = order[: columns // 2 * 2]
    return whole[0::2], whole[1::2]
