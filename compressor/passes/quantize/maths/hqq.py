"""Half-quadratic quantization: scales and zero points for a norm that forgives outliers.

H. Badri and A. Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023
(https://mobiusml.github.io/hqq_blog/). What is made small is ``Σ |w - s (q - z)|^p`` with
``p < 1``. An auxiliary variable takes up the large errors: it is found by the generalized
soft-threshold, after which scale and zero point follow by least squares. It needs no data.

Unlike the original, zero points are whole numbers within the range of codes, as file formats want
them; the scale is optimized as well as the zero point; and errors are measured in steps, so that
the result does not depend on the unit of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.passes.quantize.maths import affine
from compressor.passes.quantize.maths.affine import in_groups, row_chunks
from compressor.types.layers import QuantizedTensor, Scheme

_STARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # shares of the full range
_ITERATIONS = 5  # for each start
_SHARPNESS = 2.0  # of the threshold at first, in steps: errors up to 0.6 steps are left alone
_GROWTH = 1.3  # of the sharpness in each iteration
_LEAST_ERROR = 1e-6  # in steps; a negative power of zero is infinite
_CHUNK = 1 << 17


def hqq(matrix: Tensor, scheme: Scheme, norm: float = 0.7) -> QuantizedTensor:
    """Quantize a weight with the ranges of least error in the ``l_p`` norm.

    Each row depends on itself only, except with granularity ``tensor``. Neither by this norm nor
    in squared error is the result worse than the range of all values: the norm alone would give
    up the few large weights, which matter most, for a finer step.

    The exponent ``p`` is ``norm``, above 0 and at most 1; the weight is ``[rows, columns]``.

    Raises:
        ValueError: the columns do not divide into groups, the scheme is one of floats, or an
            unsigned symmetric one meets negative values.
    """
    whole = in_groups(matrix, scheme)
    blocks = whole.reshape(1, 1, -1) if scheme.granularity == "tensor" else whole
    searched = [_searched(blocks[part], scheme, norm) for part in row_chunks(blocks, _CHUNK)]
    if not searched:
        searched = [affine.parameters(*affine.extremes(blocks, scheme), scheme)]
    scale = torch.cat([scale for scale, _ in searched])
    zero = torch.cat([zero for _, zero in searched])
    return affine.quantize(matrix, scale, zero, scheme)


def _searched(blocks: Tensor, scheme: Scheme, norm: float) -> tuple[Tensor, Tensor]:
    values = blocks.to(torch.float32)
    low, high = affine.extremes(values, scheme)
    scale, zero = affine.parameters(low, high, scheme)
    least, least_square, *_ = _steps_off(values, scale, zero, scheme, norm)
    for share in _STARTS:
        tried, offset = affine.parameters(low * share, high * share, scheme)
        sharpness = _SHARPNESS
        for last in [*[False] * _ITERATIONS, True]:
            error, square, levels, off, slope = _steps_off(values, tried, offset, scheme, norm)
            better = (error < least) & (square <= least_square)
            least = torch.where(better, error, least)
            least_square = torch.where(better, square, least_square)
            scale = torch.where(better, tried, scale)
            zero = torch.where(better, offset, zero)
            if last:
                break
            # What is left of an error, in steps, is what scale and zero point answer for.
            left = off - _shrunk(off, slope, sharpness)
            tried, offset = _solved(levels, left, tried, offset, scheme)
            sharpness *= _GROWTH
    return scale, zero


def _steps_off(
    values: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme, norm: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Round.

    Returns:
        The error in the norm and the squared error, float64 ``[rows, groups]``; and
        ``[rows, groups, columns]``: codes less zero points, errors in steps, ``|error|^(p-1)``.
    """
    scaled = values / scale[:, :, None]
    offset = zero[:, :, None]
    levels = (scaled.round() + offset).clamp_(scheme.low, scheme.high).sub_(offset)
    off = scaled.sub_(levels)
    size = off.abs().clamp_(min=_LEAST_ERROR)
    slope = size.pow(norm - 1)
    step = scale.to(torch.float64).abs()
    error = size.mul_(slope).sum(-1, dtype=torch.float64) * step.pow(norm)
    square = off.square().sum(-1, dtype=torch.float64) * step.square()
    return error, square, levels, off, slope


def _shrunk(off: Tensor, slope: Tensor, sharpness: float) -> Tensor:
    """The generalized soft-threshold: errors to be forgiven, in steps; small ones become 0."""
    return (off.abs() - slope / sharpness).clamp_(min=0).copysign_(off)


def _solved(
    levels: Tensor, left: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of least squares for ``(levels + left) · scale``."""
    if not scheme.symmetric:
        # Errors of one sign are the zero point's; a whole number of steps, as it is stored.
        moved = torch.round(-left.mean(-1))
        moved = (zero + moved).clamp(scheme.low, scheme.high) - zero
        levels = levels - moved[:, :, None]
        left = left + moved[:, :, None]
        zero = (zero + moved).to(affine.code_dtype(scheme))
    power = levels.square().sum(-1, dtype=torch.float64)
    shared = (levels * left).sum(-1, dtype=torch.float64)
    factor = 1 + shared / power
    factor = torch.where(factor > 0, factor, 1.0)  # where all levels are zero, it is no number
    return affine.stored_scale(scale * factor, scheme), zero
