"""Conversion of tensors to an ONNX element type, with ONNX's rounding and saturation."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.models.executor.dtypes import INTEGER_RANGES, TORCH_DTYPES


@dataclass(frozen=True)
class _Float8:
    """The range of an eight-bit float.

    Attributes:
        largest: the largest finite value.
        overflow: the smallest value that rounds to something larger.
        infinity: what takes the place of such values unless they saturate.
    """

    largest: float
    overflow: float
    infinity: float


_NAN = float("nan")

_FLOAT8 = {
    # The largest E4M3FN has an even mantissa, so the tie at 464 rounds down to it.
    ir.DataType.FLOAT8E4M3FN: _Float8(448.0, 464.00003, _NAN),
    ir.DataType.FLOAT8E4M3FNUZ: _Float8(240.0, 248.0, _NAN),
    ir.DataType.FLOAT8E5M2: _Float8(57344.0, 61440.0, float("inf")),
    ir.DataType.FLOAT8E5M2FNUZ: _Float8(57344.0, 61440.0, _NAN),
}

_SMALL_FLOATS = {
    # mantissa bits, smallest exponent, largest value
    ir.DataType.FLOAT4E2M1: (1, 0, 6.0),
    ir.DataType.FLOAT6E2M3: (3, 0, 7.5),
    ir.DataType.FLOAT6E3M2: (2, -2, 28.0),
}

FLOAT_TARGETS = frozenset((*_FLOAT8, *_SMALL_FLOATS))
"""The float types that a tensor can be quantized to."""


def convert(x: Tensor, dtype: ir.DataType, saturate: bool = True, mode: str = "up") -> Tensor:
    """Return the elements as ``Cast`` gives them.

    Args:
        x: any tensor.
        dtype: the element type asked for.
        saturate: whether values beyond an eight-bit float's range become its largest value.
        mode: rounding to ``FLOAT8E8M0``: ``up``, ``down`` or ``nearest``.
    """
    if dtype in _FLOAT8:
        return _to_float8(x, dtype, saturate)
    if dtype in _SMALL_FLOATS:
        return _to_small_float(x, dtype)
    if dtype == ir.DataType.FLOAT8E8M0:
        return _to_power_of_two(x, saturate, mode)
    held = TORCH_DTYPES[dtype]
    if dtype in (ir.DataType.INT2, ir.DataType.INT4, ir.DataType.UINT2, ir.DataType.UINT4):
        return _wrapped(x, dtype).to(held)
    if x.dtype == torch.float8_e8m0fnu or (x.dtype.itemsize == 1 and x.is_floating_point()):
        return x.to(torch.float32).to(held)
    return x.to(held)


def saturated(x: Tensor, dtype: ir.DataType) -> Tensor:
    """Limit whole numbers to the range of an integer type and convert them to it.

    Args:
        x: rounded floats, the zero point added.
        dtype: an integer type of `INTEGER_RANGES`.
    """
    least, greatest = INTEGER_RANGES[dtype]
    return torch.clamp(x, least, greatest).to(TORCH_DTYPES[dtype])


def _wrapped(x: Tensor, dtype: ir.DataType) -> Tensor:
    """Keep the low bits only, which is what a conversion between integers does."""
    least, greatest = INTEGER_RANGES[dtype]
    width = greatest - least + 1
    return torch.remainder(x.to(torch.int64) - least, width) + least


def _to_float8(x: Tensor, dtype: ir.DataType, saturate: bool) -> Tensor:
    limits = _FLOAT8[dtype]
    wide = x.to(torch.float32)
    result = torch.clamp(wide, -limits.largest, limits.largest)
    if not saturate:
        beyond = torch.copysign(torch.full_like(wide, limits.infinity), wide)
        result = torch.where(wide.abs() >= limits.overflow, beyond, result)
    return result.to(TORCH_DTYPES[dtype])


def _to_small_float(x: Tensor, dtype: ir.DataType) -> Tensor:
    """Round to the nearest value m * 2**e of the format, ties to the even mantissa.

    These formats cannot say that something is not a number; it becomes zero, as in ONNX.
    """
    mantissa_bits, least_exponent, largest = _SMALL_FLOATS[dtype]
    wide = torch.nan_to_num(x.to(torch.float32), nan=0.0, posinf=largest, neginf=-largest)
    _, exponent = torch.frexp(wide)
    exponent = torch.clamp(exponent - 1, min=least_exponent)
    step = torch.ldexp(torch.ones_like(wide), exponent - mantissa_bits)
    result = torch.clamp(torch.round(wide / step) * step, -largest, largest)
    return result.to(TORCH_DTYPES[dtype])


def _to_power_of_two(x: Tensor, saturate: bool, mode: str) -> Tensor:
    """Round to 2**e; the eight bits are e + 127, and 255 stands for not a number."""
    wide = x.to(torch.float32)
    fraction, exponent = torch.frexp(wide)
    if mode == "up":
        exponent = torch.where(fraction > 0.5, exponent, exponent - 1)
    elif mode == "down":
        exponent = exponent - 1
    else:
        exponent = torch.where(fraction >= 0.75, exponent, exponent - 1)
    exponent = torch.where(wide == 0, -128, exponent)
    exponent = torch.where(torch.isinf(wide), 128, exponent)
    invalid = torch.isnan(wide)
    if not saturate:
        invalid = invalid | (exponent < -127) | (exponent > 127)
    code = torch.where(invalid, 255, torch.clamp(exponent, -127, 127) + 127)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)
