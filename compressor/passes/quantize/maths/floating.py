"""Weights as floats of 8 or 4 bits with scales: fp8-e4m3, mxfp4 and nvfp4.

Values are divided by their scale and rounded to the nearest value of the element, halves to the
even code; what is too large saturates.

- ``e4m3``: P. Micikevicius et al., FP8 Formats for Deep Learning, 2022 (arXiv:2209.05433); the
  scale is the greatest magnitude over 448.
- mxfp4: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3; ``e2m1`` whose
  scales are powers of two.
- nvfp4: NVIDIA, Introducing NVFP4 for Efficient and Accurate Low-Precision Inference, 2025;
  ``e2m1`` in groups of 16 whose scales are ``e4m3`` times one float32 for the tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from compressor.passes.quantize.maths import affine
from compressor.passes.quantize.maths.affine import in_groups, row_chunks
from compressor.types.e2m1 import e2m1_magnitudes, nearest_e2m1
from compressor.types.layers import QuantizedTensor, Scheme

_E4M3_LARGEST = 448.0
_E4M3_LEAST_BITS, _E4M3_LARGEST_BITS = 0x01, 0x7E  # least positive and largest finite code
_LEAST_EXPONENT, _GREATEST_EXPONENT = -126, 127  # of e8m0 that are normal float32
_E2M1_EXPONENT = 2  # of the largest power of two among the values of e2m1

# What the search for the best range tries beside the scale of the greatest magnitude: steps of
# the scale's own type, from about half to about twice that scale.
_E8M0_STEPS = (-1, 1)
_E4M3_STEPS = tuple(step for step in range(-8, 9) if step)
_FINE_FACTORS = tuple(2.0 ** (step / 16) for step in range(-4, 17) if step)


def nvfp4_tensor_scale(largest: Tensor | float) -> Tensor:
    """The float32 that all nvfp4 scales of a tensor are multiplied with, by its greatest magnitude.

    Returns:
        ``largest / (448 · 6)`` without axes, rounded up to a power of two: the greatest scale lies
        in the upper half of ``e4m3``'s range, and readers that multiply in bfloat16 do it
        exactly, since value, scale and power have 7 significant bits together. 1 for zeros.
    """
    exact = torch.as_tensor(largest, dtype=torch.float64).reshape(()) / (_E4M3_LARGEST * 6)
    mantissa, exponent = torch.frexp(exact.clamp(min=torch.finfo(torch.float32).tiny))
    power = torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int())
    return torch.where(exact > 0, power, 1.0).to(torch.float32)


def shared_scale(parts: Iterable[Tensor], scheme: Scheme) -> Tensor | None:
    """Return the factor of all scales of a weight, given its rows; ``None`` if there is none."""
    if scheme.scale_type != "e4m3":
        return None
    ends = [float(end.abs()) for part in parts if part.numel() for end in part.aminmax()]
    return nvfp4_tensor_scale(max(ends, default=0.0))


def float_parameters(matrix: Tensor, scheme: Scheme, tensor_scale: Tensor | None = None) -> Tensor:
    """Find scales at which the greatest magnitude is (about) the element's largest value.

    Args:
        matrix: ``[rows, columns]``.
        scheme: how values are represented; ``scale_type`` tells how scales are rounded. With
            ``e8m0`` the scale is ``2^(floor(log2(max|x|)) - 2)``, so that what lies above
            6/8 of the range saturates, as section 6.3 of the specification has it.
        tensor_scale: what scales of type ``e4m3`` are multiplied with; ``None`` finds it from
            this matrix.

    Returns:
        Scales, float32 ``[rows, groups]``, or ``[1, 1]`` for granularity ``tensor``; positive,
        and 1 where all values are zero.

    Raises:
        ValueError: the columns do not divide into groups, or the scheme is one of integers.
    """
    largest = _largest(in_groups(matrix, scheme), scheme)
    return _scale(largest, scheme, _tensor_scale(largest, scheme, tensor_scale))


def float_mse_parameters(
    matrix: Tensor,
    scheme: Scheme,
    tensor_scale: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """Find scales of least squared error near those of :func:`float_parameters`.

    Tried are neighbours among the values of an 8-bit scale type, or factors from about 0.84 to 2.
    The scale of the greatest magnitude is kept unless another is better.

    ``importance`` is what a squared error counts in each column, ``[columns]``; ``None`` counts all
    alike. Everything else is as in :func:`float_parameters`.
    """
    blocks = in_groups(matrix, scheme)
    largest = _largest(blocks, scheme)
    whole = _tensor_scale(largest, scheme, tensor_scale)
    scale = _scale(largest, scheme, whole)
    counts = None if importance is None else importance.to(torch.float32).reshape(blocks.shape[1:])
    if scheme.granularity == "tensor":
        return _searched(blocks, scale, scheme, whole, counts)
    scales = [
        _searched(blocks[part], scale[part], scheme, whole, counts) for part in row_chunks(blocks)
    ]
    return torch.cat(scales) if scales else scale


def quantize_floats(
    matrix: Tensor, scale: Tensor, scheme: Scheme, tensor_scale: Tensor | None = None
) -> QuantizedTensor:
    """Round to the nearest value of the element, halves to the even code, and saturate.

    The matrix is ``[rows, columns]``, the scale ``[rows, groups]`` or ``[1, 1]``; scales of type
    ``e4m3`` are multiplied with ``tensor_scale``.

    Returns:
        Codes as :class:`QuantizedTensor` describes them; zero points are zeros, int8.

    Raises:
        ValueError: the columns do not divide into groups, the scheme is one of integers, or it
            needs a tensor scale and there is none.
    """
    if scheme.scale_type == "e4m3" and tensor_scale is None:
        raise ValueError("scales of type e4m3 need the tensor's scale")
    blocks = in_groups(matrix, scheme)
    dtype = torch.float8_e4m3fn if _element(scheme) == "e4m3" else torch.uint8
    codes = torch.empty(blocks.shape, dtype=dtype)
    steps = scale if tensor_scale is None else scale * tensor_scale
    for part in row_chunks(blocks):
        scaled = _in_steps(blocks, steps, part)
        codes[part] = _e4m3(scaled) if dtype.is_floating_point else e2m1_codes(scaled)
    zero_point = torch.zeros(scale.shape, dtype=torch.int8)
    codes = codes.reshape(matrix.shape)
    return QuantizedTensor(codes, scale, zero_point, scheme, tensor_scale)


def e2m1_codes(values: Tensor) -> Tensor:
    """Codes of the nearest ``e2m1`` values, uint8 of the same shape; the sign is bit 3."""
    return (e2m1_magnitudes(values) + 8 * torch.signbit(values)).to(torch.uint8)


def stored_codes(levels: Tensor, scheme: Scheme) -> Tensor:
    """Codes of values before scaling: for integers, which include zero points, the same numbers."""
    if scheme.element == "e2m1":
        return e2m1_codes(levels)
    return levels.to(torch.float8_e4m3fn if scheme.element == "e4m3" else affine.code_dtype(scheme))


def nearest_values(values: Tensor, scheme: Scheme) -> Tensor:
    """The nearest values of the scheme's float element, float32 of the same shape."""
    if _element(scheme) == "e4m3":
        return _e4m3(values).to(torch.float32)
    return nearest_e2m1(values)


def _element(scheme: Scheme) -> str:
    if scheme.element == "int":
        raise ValueError(f"{scheme} is not a scheme of floats")
    return scheme.element


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _largest(blocks: Tensor, scheme: Scheme) -> Tensor:
    """Greatest magnitudes, float64 ``[rows, groups]`` or ``[1, 1]``."""
    _element(scheme)
    low, high = affine.extremes(blocks, scheme)
    return torch.maximum(-low, high)


def _tensor_scale(largest: Tensor, scheme: Scheme, tensor_scale: Tensor | None) -> Tensor | None:
    if scheme.scale_type != "e4m3" or tensor_scale is not None:
        return tensor_scale
    return nvfp4_tensor_scale(largest.max() if largest.numel() else 0.0)


def _scale(largest: Tensor, scheme: Scheme, tensor_scale: Tensor | None) -> Tensor:
    if scheme.scale_type == "e8m0":
        exponent = torch.frexp(largest).exponent - 1 - _E2M1_EXPONENT
        return torch.where(largest > 0, _power_of_two(exponent), 1.0)
    exact = largest / scheme.largest
    if tensor_scale is not None:
        exact = exact / tensor_scale
    return float_scale(exact, scheme)


def float_scale(exact: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to the nearest value of the scheme's scale type.

    Scales are float64 of any shape, 0 for an empty range; the result is float32 that holds positive
    values of the type, 1 for empty ranges. A power of two is the nearest in ratio.
    """
    if scheme.scale_type == "e8m0":
        return _power_of_two(torch.where(exact > 0, exact, 1.0).log2().round().to(torch.int32))
    if scheme.scale_type != "e4m3":
        return affine.stored_scale(exact, scheme)
    least = 2.0**-9  # the least positive e4m3: a group of small values has a scale, too
    usable = exact.clamp(min=least, max=_E4M3_LARGEST).to(torch.float32)
    return torch.where(exact > 0, usable.to(torch.float8_e4m3fn).to(torch.float32), 1.0)


def _power_of_two(exponent: Tensor) -> Tensor:
    exponent = exponent.clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT)
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def candidate_scales(scale: Tensor, scheme: Scheme) -> list[Tensor]:
    """Other scales near the given ones, of any shape; all are float32 values of the scale type."""
    if scheme.scale_type == "e8m0":
        exponent = torch.frexp(scale).exponent - 1
        return [_power_of_two(exponent + step) for step in _E8M0_STEPS]
    if scheme.scale_type == "e4m3":
        bits = scale.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
        moved = [(bits + step).clamp(_E4M3_LEAST_BITS, _E4M3_LARGEST_BITS) for step in _E4M3_STEPS]
        return [m.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) for m in moved]
    return [
        affine.stored_scale(scale.to(torch.float64) * factor, scheme) for factor in _FINE_FACTORS
    ]


def _in_steps(blocks: Tensor, steps: Tensor, part: slice) -> Tensor:
    return blocks[part].to(torch.float32) / affine.of_rows(steps, part)


def _searched(
    blocks: Tensor,
    scale: Tensor,
    scheme: Scheme,
    tensor_scale: Tensor | None,
    importance: Tensor | None,
) -> Tensor:
    least = _squared_error(blocks, scale, scheme, tensor_scale, importance)
    best = scale
    for tried in candidate_scales(scale, scheme):
        error = _squared_error(blocks, tried, scheme, tensor_scale, importance)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def _squared_error(
    blocks: Tensor,
    scale: Tensor,
    scheme: Scheme,
    tensor_scale: Tensor | None,
    importance: Tensor | None,
) -> Tensor:
    """Squared error of rounding, float64, in the shape of ``scale``."""
    steps = scale if tensor_scale is None else scale * tensor_scale
    errors = []
    for part in row_chunks(blocks):
        values = nearest_values(_in_steps(blocks, steps, part), scheme)
        values.mul_(affine.of_rows(steps, part))
        values.sub_(blocks[part]).square_()
        if importance is not None:
            values.mul_(importance)
        errors.append(values.sum(-1, dtype=torch.float64))
    whole = torch.cat(errors)
    return whole.sum(0, keepdim=True) if scheme.granularity == "tensor" else whole


RangeSearch = Literal["min-max", "mse"]
"""Whether a range holds all values, or is the one of least squared error."""


def round_to_nearest(
    matrix: Tensor,
    scheme: Scheme,
    search: RangeSearch = "min-max",
    tensor_scale: Tensor | None = None,
    importance: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a weight by rounding every value to the nearest that its scheme represents.

    Each row depends on itself only, so rows may be given in any pieces; except with granularity
    ``tensor``, and with scales of type ``e4m3`` where ``tensor_scale`` is not given.

    Args:
        matrix: ``[rows, columns]``, of any float dtype; the arithmetic is float32.
        scheme: how its values are represented.
        search: how ranges are found.
        tensor_scale: nvfp4's scale of the whole weight (``nvfp4_tensor_scale``); ``None`` takes
            the matrix for the whole.
        importance: what a squared error counts in each column when ranges are searched,
            ``[columns]``; ``None`` counts all alike.

    Raises:
        ValueError: the columns do not divide into groups, or an unsigned symmetric scheme meets
            negative values.
    """
    searched = search == "mse"
    if scheme.element == "int":
        if searched:
            scale, zero = affine.mse_parameters(matrix, scheme, importance=importance)
        else:
            scale, zero = affine.absmax_parameters(matrix, scheme)
        return affine.quantize(matrix, scale, zero, scheme)
    if tensor_scale is None:
        tensor_scale = shared_scale([matrix], scheme)
    if searched:
        scale = float_mse_parameters(matrix, scheme, tensor_scale, importance)
    else:
        scale = float_parameters(matrix, scheme, tensor_scale)
    return quantize_floats(matrix, scale, scheme, tensor_scale)


def shortened(values: Tensor, bits: int) -> Tensor:
    """Round floats to so many significant bits, halves to even: the last bits of each are zero.

    >>> shortened(torch.tensor([1.2345, -0.3]), 4)
    tensor([ 1.2500, -0.3125])

    Args:
        values: of any float dtype and shape; what is not finite, or would not be, stays.
        bits: those of the significand, the leading one included.
    """
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    rounded = torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits).to(values.dtype)
    return torch.where(torch.isfinite(rounded), rounded, values)
