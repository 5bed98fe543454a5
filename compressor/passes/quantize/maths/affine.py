"""Affine quantization to integers: ranges, scales, zero points and codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from compressor.passes.quantize.maths.pairs import without_overflow
from compressor.types.layers import QuantizedTensor, Scheme
from compressor.types.statistics import Range

_CONVERTED_AT_ONCE = 1 << 19  # elements, so that intermediate results stay in the cache


def in_groups(matrix: Tensor, scheme: Scheme) -> Tensor:
    """View a matrix as ``[rows, groups, columns of a group]``.

    Args:
        matrix: ``[rows, columns]``.
        scheme: how its codes are represented; without groups, a row is one.

    Raises:
        ValueError: the columns do not divide into the scheme's groups.
    """
    rows, columns = matrix.shape
    width = columns
    if scheme.granularity == "group":
        width = scheme.group or 0
        if width < 1 or columns % width:
            raise ValueError(f"{columns} columns do not divide into groups of {scheme.group}")
    return matrix.reshape(rows, columns // width if columns else 1, width)


def row_chunks(blocks: Tensor, elements: int = _CONVERTED_AT_ONCE) -> list[slice]:
    """Cut the first axis so that a piece has about so many elements, and one row at least."""
    rows = blocks.shape[0]
    step = max(1, elements * rows // max(blocks.numel(), 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def converted_chunks(blocks: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Copy the pieces of :func:`row_chunks` one after the other into one buffer.

    A buffer for each piece would cost more than the arithmetic: memory of such sizes goes back to
    the system when it is freed, and comes from there page by page.

    Args:
        blocks: of any shape.
        dtype: the buffer's.

    Yields:
        A slice of the first axis, and its values; they last until the next piece is asked for, and
        may be changed.
    """
    parts = row_chunks(blocks)
    first = blocks[parts[0]] if parts else blocks
    buffer = torch.empty(first.shape, dtype=dtype)
    for part in parts:
        piece = blocks[part]
        yield part, buffer[: len(piece)].copy_(piece)


def extremes(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each group, zero included.

    Blocks are ``[rows, groups, columns of a group]``; the results are float64 ``[rows, groups]``,
    or ``[1, 1]`` for granularity ``tensor``, in which all groups count as one.
    """
    rows, groups, width = blocks.shape
    exact = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    low, high = (torch.zeros(rows, groups, dtype=exact) for _ in range(2))
    # One pass each for the least and the greatest: their joint operator is ten times slower.
    for part, values in converted_chunks(blocks, exact) if width else []:
        torch.amin(values, -1, out=low[part])
        torch.amax(values, -1, out=high[part])
    if scheme.granularity == "tensor" and rows:
        low, high = low.amin().reshape(1, 1), high.amax().reshape(1, 1)
    return low.to(torch.float64).clamp(max=0), high.to(torch.float64).clamp(min=0)


SMALLEST_SCALE = 2.0**-60
"""Least scale: the product of two, which scales an integer product, is a normal float32 still."""

_NARROWEST = 0.2  # least share of the full range that the search for the best range tries
_HALVES = {
    "float16": torch.float16,
    "float16m6": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Types of 16 bits for scales."""


def absmax_parameters(matrix: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Find scales and zero points for the full range of a matrix ``[rows, columns]`` and zero.

    Symmetric schemes take the least scale at which neither end lies beyond its last code,
    ``max(max / high, min / low)``. Where scales have signs, it is negative if that is closer to
    zero, as in ``Q4_0`` of llama.cpp (``ggml-quants.c``). Asymmetric schemes take
    ``(max - min) / (high - low)`` and the nearest zero point. The scale is then rounded as
    :func:`stored_scale` says, and zero points are found for the rounded one.

    Returns:
        Scale, float32 that holds values of the scheme's ``scale_type``, and zero point, int8 or
        uint8, both ``[rows, groups]``, or ``[1, 1]`` for granularity ``tensor``. Where all values
        are zero the scale is 1.

    Raises:
        ValueError: the columns do not divide into groups, an unsigned symmetric scheme meets
            negative values, or the scheme is not one of integers.
    """
    low, high = extremes(in_groups(matrix, scheme), scheme)
    return parameters(low, high, scheme)


def mse_parameters(
    matrix: Tensor, scheme: Scheme, steps: int = 40, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find scales and zero points of least squared error among evenly shrunk ranges.

    Ranges from the full one down to a fifth of it are tried for each row or group, and the full
    one kept unless another is better. The search is that of R. Banner et al., Post-training
    4-bit quantization, 2018, section 3.1, over the values themselves in place of a distribution.

    ``steps`` narrower ranges are tried. ``importance`` is what a squared error counts in each
    column, ``[columns]``, not negative; ``None`` counts all alike. Results and errors are those of
    :func:`absmax_parameters`.
    """
    blocks = in_groups(matrix, scheme)
    shares = [1 - (1 - _NARROWEST) * step / steps for step in range(1, steps + 1)]
    counts = None if importance is None else importance.to(torch.float32).reshape(blocks.shape[1:])
    if scheme.granularity == "tensor":
        return _searched(blocks, scheme, shares, counts)
    parts = [_searched(blocks[part], scheme, shares, counts) for part in row_chunks(blocks)]
    if not parts:
        return absmax_parameters(matrix, scheme)
    return torch.cat([scale for scale, _ in parts]), torch.cat([zero for _, zero in parts])


def quantize(matrix: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Round to the nearest code, halves to even, and saturate to ``scheme.low .. scheme.high``.

    Where the scheme has pairs, those that could overflow are clipped. The matrix is
    ``[rows, columns]``, scale and zero point ``[rows, groups]`` or ``[1, 1]``.

    Raises:
        ValueError: the columns do not divide into the scheme's groups.
    """
    blocks = in_groups(matrix, scheme)
    codes = torch.empty(blocks.shape, dtype=code_dtype(scheme))
    for part, values in converted_chunks(blocks, torch.float32):
        codes[part] = _levels(values, scale, zero_point, part, scheme)
    made = QuantizedTensor(codes.reshape(matrix.shape), scale, zero_point, scheme)
    return without_overflow(made)


def activation_parameters(
    range: Range, bits: int, signed: bool, symmetric: bool
) -> tuple[float, int]:
    """Find scale and zero point of a whole activation tensor; zero is represented exactly.

    The range is widened to hold zero. The scale is a number that float32 represents; 1 for an empty
    range.

    Raises:
        ValueError: the range is not finite, or negative in an unsigned symmetric scheme.
    """
    if not (isfinite(range.low) and isfinite(range.high)):
        raise ValueError(f"range {range.low} .. {range.high} is not finite")
    scheme = Scheme(bits, symmetric, signed)
    ends = torch.tensor([[[range.low, range.high]]], dtype=torch.float64)
    scale, zero = parameters(*extremes(ends, scheme), scheme)
    return float(scale), int(zero)


def parameters(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point for ``low .. high``, as :func:`absmax_parameters` returns them.

    Both ends are float64 ``[rows, groups]``; ``low`` is at most 0, ``high`` at least 0.

    Raises:
        ValueError: a value is negative in an unsigned symmetric scheme, or the scheme is not one
            of integers.
    """
    if scheme.element != "int":
        raise ValueError(f"{scheme} is not a scheme of integers")
    if scheme.symmetric:
        if not scheme.signed and bool((low < 0).any()):
            raise ValueError("an unsigned symmetric scheme does not represent negative values")
        scale = high / scheme.high
        if scheme.signed:
            scale = torch.maximum(scale, low / scheme.low)
        if scheme.signed_scale:
            mirrored = torch.minimum(low / scheme.high, high / scheme.low)
            scale = torch.where(-mirrored < scale, mirrored, scale)
        scale = stored_scale(scale, scheme)
        return scale, torch.zeros(scale.shape, dtype=code_dtype(scheme))
    scale = stored_scale((high - low) / (scheme.high - scheme.low), scheme)
    return scale, zero_point_of(low, scale, scheme)


def zero_point_of(low: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """The zero point that puts the first code nearest to ``low``, int8 or uint8."""
    zero = torch.round(scheme.low - low / scale)
    return zero.clamp(scheme.low, scheme.high).to(code_dtype(scheme))


def stored_scale(scale: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to the type in which they are stored.

    To the nearest value; but to the next one above where the nearest would leave an end of the
    range more than half a step beyond the last code. An asymmetric scheme's zero point takes up
    to half a step already, so there it is always the next above. Magnitudes stay within the type's
    finite numbers and are never below ``SMALLEST_SCALE``; an empty range has 1. Where scales have
    no signs, 1 takes the place of negative ones, too.

    Scales are float64 of any shape; the result is float32 that holds values of the type.

    Raises:
        ValueError: the scale type is one of 8 bits, which integers do not have.
    """
    if scheme.signed_scale:
        magnitude = stored_scale(scale.abs(), replace(scheme, signed_scale=False))
        return torch.where(scale < 0, -magnitude, magnitude)
    scale = torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), 1.0)
    if scheme.scale_type == "float32":
        return scale.to(torch.float32)
    if scheme.scale_type not in _HALVES:
        raise ValueError(f"integers have no scales of type {scheme.scale_type}")
    dtype = _HALVES[scheme.scale_type]
    # How many numbers of the type lie from one that scales may have to the next.
    stride = 16 if scheme.scale_type == "float16m6" else 1
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16)
    largest = largest // stride * stride
    scale = scale.clamp(max=float(largest.view(dtype)))
    steps, slack = scheme.high - scheme.low, 0.0
    if scheme.symmetric:
        steps, slack = max(-scheme.low, scheme.high), 0.5
    # By way of float32, which every device's conversion takes; 24 bits move no value across an
    # end of the range that the next lines would not see. The bits of positive numbers count
    # upwards with their values, from zero to the least.
    bits = scale.to(torch.float32).to(dtype).view(torch.int16)
    bits = torch.minimum((bits + stride // 2) // stride * stride, largest)
    nearest = bits.view(dtype).to(torch.float64)
    short = nearest * (steps + slack) < scale * steps
    return (bits + short * stride).to(torch.int16).view(dtype).to(torch.float32)


def code_dtype(scheme: Scheme) -> torch.dtype:
    """The dtype that holds a scheme's integer codes: int8, or uint8 for unsigned ones."""
    return torch.int8 if scheme.signed else torch.uint8


def of_rows(parameter: Tensor, part: slice) -> Tensor:
    """A scale or zero point for some rows, ``[rows or 1, groups, 1]``."""
    return (parameter if parameter.shape[0] == 1 else parameter[part])[:, :, None]


def _levels(
    levels: Tensor, scale: Tensor, zero_point: Tensor, part: slice, scheme: Scheme
) -> Tensor:
    """Turn values of some rows, float32 ``[rows, groups, columns of a group]``, into codes."""
    levels.div_(of_rows(scale, part)).round_()
    if not scheme.symmetric:
        levels.add_(of_rows(zero_point, part))
    return levels.clamp_(scheme.low, scheme.high)


def _searched(
    blocks: Tensor, scheme: Scheme, shares: list[float], importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    low, high = extremes(blocks, scheme)
    scale, zero = parameters(low, high, scheme)
    least = _squared_error(blocks, scale, zero, scheme, importance)
    for share in shares:
        tried_scale, tried_zero = parameters(low * share, high * share, scheme)
        error = _squared_error(blocks, tried_scale, tried_zero, scheme, importance)
        better = error < least
        scale = torch.where(better, tried_scale, scale)
        zero = torch.where(better, tried_zero, zero)
        least = torch.minimum(error, least)
    return scale, zero


def _squared_error(
    blocks: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme, importance: Tensor | None
) -> Tensor:
    """Squared error of rounding, float64, in the shape of ``scale``."""
    errors = []
    for part, values in converted_chunks(blocks, torch.float32):
        levels = _levels(values, scale, zero_point, part, scheme)
        if not scheme.symmetric:
            levels.sub_(of_rows(zero_point, part))
        levels.mul_(of_rows(scale, part)).sub_(blocks[part]).square_()
        if importance is not None:
            levels.mul_(importance)
        errors.append(levels.sum(-1, dtype=torch.float64))
    whole = torch.cat(errors)
    return whole.sum(0, keepdim=True) if scheme.granularity == "tensor" else whole
