"""Affine quantization: ``x ≈ (code - zero_point) * scale``.

Codes are ``round(x / scale) + zero_point``, saturated. Here is the maths of scales, zero points
and rounding, for weights in canonical form ``[rows, columns]`` and for ranges of activations.
B. Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, 2017, section 2.1.
"""

from __future__ import annotations

from math import isfinite, log10

import torch
from torch import Tensor

from compressor.types.observer import Range
from compressor.types.quantized import QuantizedTensor, Scheme

SMALLEST_SCALE = 2.0**-60
"""Least scale: the product of two, which scales an integer product, is a normal float32 still."""

_CHUNK = 1 << 18  # elements worked on at once, so that intermediate results stay in the cache
_NARROWEST = 0.2  # least share of the full range that the search for the best range tries


def absmax_parameters(matrix: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Find scales and zero points that span the full range of the values, zero included.

    Symmetric schemes take ``scale = max|x| / high``, asymmetric ones
    ``scale = (max - min) / (high - low)`` and the nearest zero point.

    Args:
        matrix: ``[rows, columns]``.
        scheme: how its codes are represented.

    Returns:
        Scale, float32, and zero point, int8 or uint8, both ``[rows, groups]``, or ``[1, 1]`` for
        granularity ``tensor``. Where all values are zero the scale is 1.

    Raises:
        ValueError: the columns do not divide into groups, or an unsigned symmetric scheme meets
            negative values.
    """
    low, high = _extremes(_blocks(matrix, scheme), scheme)
    return _parameters(low, high, scheme)


def mse_parameters(matrix: Tensor, scheme: Scheme, steps: int = 40) -> tuple[Tensor, Tensor]:
    """Find scales and zero points of least squared error among evenly shrunk ranges.

    Ranges from the full one down to a fifth of it are tried for each row or group, and the full
    one kept unless another is better. The search is that of R. Banner et al., Post-training
    4-bit quantization, 2018, section 3.1, over the values themselves in place of a distribution.

    Args:
        matrix: ``[rows, columns]``.
        scheme: how its codes are represented.
        steps: how many narrower ranges are tried.

    Returns:
        As :func:`absmax_parameters`.

    Raises:
        ValueError: as :func:`absmax_parameters`.
    """
    blocks = _blocks(matrix, scheme)
    low, high = _extremes(blocks, scheme)
    scale, zero = _parameters(low, high, scheme)
    least = _squared_error(blocks, scale, zero, scheme)
    for step in range(1, steps + 1):
        share = 1 - (1 - _NARROWEST) * step / steps
        tried_scale, tried_zero = _parameters(low * share, high * share, scheme)
        error = _squared_error(blocks, tried_scale, tried_zero, scheme)
        better = error < least
        scale = torch.where(better, tried_scale, scale)
        zero = torch.where(better, tried_zero, zero)
        least = torch.minimum(error, least)
    return scale, zero


def quantize(matrix: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Round to the nearest code, halves to even, and saturate to ``scheme.low .. scheme.high``.

    Args:
        matrix: ``[rows, columns]``.
        scale: ``[rows, groups]`` or ``[1, 1]``.
        zero_point: like ``scale``.
        scheme: how the codes are represented.

    Raises:
        ValueError: the columns do not divide into the scheme's groups.
    """
    blocks = _blocks(matrix, scheme)
    codes = torch.empty(blocks.shape, dtype=_code_dtype(scheme))
    for rows in _row_chunks(blocks):
        codes[rows] = _levels(blocks[rows], scale, zero_point, rows, scheme).to(codes.dtype)
    return QuantizedTensor(codes.reshape(matrix.shape), scale, zero_point, scheme)


def activation_parameters(
    range: Range, bits: int, signed: bool, symmetric: bool
) -> tuple[float, int]:
    """Find scale and zero point of a whole activation tensor; zero is represented exactly.

    Args:
        range: the interval to represent; it is widened to hold zero.
        bits: width of a code.
        signed: codes are signed.
        symmetric: the zero point is 0.

    Returns:
        Scale, a number that float32 represents, and zero point. An empty range has scale 1.

    Raises:
        ValueError: the range is not finite, or negative in an unsigned symmetric scheme.
    """
    if not (isfinite(range.low) and isfinite(range.high)):
        raise ValueError(f"range {range.low} .. {range.high} is not finite")
    scheme = Scheme(bits, symmetric, signed, "tensor")
    ends = torch.tensor([[[min(range.low, 0.0), max(range.high, 0.0)]]], dtype=torch.float64)
    low, high = _extremes(ends, scheme)
    scale, zero = _parameters(low, high, scheme)
    return float(scale), int(zero)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float | None:
    """Signal to quantization noise ratio, ``10 log10(Σ reference² / Σ (reference - approx)²)``.

    Returns:
        Decibels; ``None`` where the error or the signal is zero.

    Raises:
        ValueError: shapes differ or a value is not finite.
    """
    if reference.shape != approximation.shape:
        raise ValueError(f"shapes {tuple(reference.shape)} and {tuple(approximation.shape)} differ")
    signal = noise = 0.0
    wanted, got = reference.reshape(-1), approximation.reshape(-1)
    for start in range(0, wanted.numel(), _CHUNK):
        exact = wanted[start : start + _CHUNK].to(torch.float64)
        signal += float(exact.square().sum())
        noise += float((exact - got[start : start + _CHUNK]).square().sum())
    if not isfinite(signal + noise):
        raise ValueError("a value is not finite")
    return None if noise == 0 or signal == 0 else 10 * log10(signal / noise)


def _blocks(matrix: Tensor, scheme: Scheme) -> Tensor:
    """View a matrix as ``[rows, groups, columns of a group]``."""
    rows, columns = matrix.shape
    width = columns
    if scheme.granularity == "group":
        width = scheme.group or 0
        if width < 1 or columns % width:
            raise ValueError(f"{columns} columns do not divide into groups of {scheme.group}")
    return matrix.reshape(rows, columns // width if columns else 1, width)


def _extremes(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Least and greatest value, zero included, in float64 ``[rows, groups]`` or ``[1, 1]``."""
    low, high = torch.aminmax(blocks, dim=-1)
    if scheme.granularity == "tensor":
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    low, high = low.to(torch.float64).clamp(max=0), high.to(torch.float64).clamp(min=0)
    if scheme.symmetric and not scheme.signed and bool((low < 0).any()):
        raise ValueError("an unsigned symmetric scheme does not represent negative values")
    return low, high


def _parameters(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point that represent ``low .. high`` (float64, zero included)."""
    dtype = _code_dtype(scheme)
    if scheme.symmetric:
        scale = _usable(torch.maximum(-low, high) / scheme.high)
        return scale, torch.zeros(scale.shape, dtype=dtype)
    scale = _usable((high - low) / (scheme.high - scheme.low))
    zero = torch.round(scheme.low - low / scale.to(torch.float64))
    return scale, zero.clamp(scheme.low, scheme.high).to(dtype)


def _usable(scale: Tensor) -> Tensor:
    """Round to float32, give 1 to empty ranges and a floor to tiny ones."""
    return torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), 1.0).to(torch.float32)


def _code_dtype(scheme: Scheme) -> torch.dtype:
    return torch.int8 if scheme.signed else torch.uint8


def _row_chunks(blocks: Tensor) -> list[slice]:
    rows = blocks.shape[0]
    step = max(1, _CHUNK * rows // max(blocks.numel(), 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _levels(
    blocks: Tensor, scale: Tensor, zero_point: Tensor, rows: slice, scheme: Scheme
) -> Tensor:
    """Codes of some rows, as float32 ``[rows, groups, columns of a group]``."""
    shared = scale.shape[0] == 1
    steps = (scale if shared else scale[rows])[:, :, None]
    zero = (zero_point if shared else zero_point[rows])[:, :, None]
    levels = blocks.to(torch.float32) / steps
    return levels.round_().add_(zero).clamp_(scheme.low, scheme.high)


def _squared_error(blocks: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Squared error of rounding, float64, in the shape of ``scale``."""
    shared = scale.shape[0] == 1
    errors = []
    for rows in _row_chunks(blocks):
        levels = _levels(blocks[rows], scale, zero_point, rows, scheme)
        zero = (zero_point if shared else zero_point[rows])[:, :, None]
        steps = (scale if shared else scale[rows])[:, :, None]
        found = levels.sub_(zero).mul_(steps).sub_(blocks[rows])
        errors.append(found.square_().sum(-1, dtype=torch.float64))
    whole = torch.cat(errors)
    return whole.sum(0, keepdim=True) if scheme.granularity == "tensor" else whole
