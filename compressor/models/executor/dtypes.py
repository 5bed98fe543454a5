"""How ONNX element types live in torch.

Torch has no four-bit and no six-bit elements that can be computed with. They are stored unpacked,
one value a byte: integers of two and four bits as ``int8`` or ``uint8``, floats of four and six
bits as ``float8_e4m3fn``, which represents each of their values exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch
from torch import Tensor

TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ir.DataType.FLOAT8E8M0: torch.float8_e8m0fnu,
    ir.DataType.INT2: torch.int8,
    ir.DataType.INT4: torch.int8,
    ir.DataType.UINT2: torch.uint8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.FLOAT4E2M1: torch.float8_e4m3fn,
    ir.DataType.FLOAT6E2M3: torch.float8_e4m3fn,
    ir.DataType.FLOAT6E3M2: torch.float8_e4m3fn,
}
"""The torch dtype that holds each ONNX element type at run time; strings have none."""

INTEGER_RANGES: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.INT2: (-2, 1),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.INT8: (-(1 << 7), (1 << 7) - 1),
    ir.DataType.INT16: (-(1 << 15), (1 << 15) - 1),
    ir.DataType.INT32: (-(1 << 31), (1 << 31) - 1),
    ir.DataType.UINT2: (0, 3),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.UINT8: (0, (1 << 8) - 1),
    ir.DataType.UINT16: (0, (1 << 16) - 1),
}
"""Smallest and largest value of the integer types that a tensor can be quantized to."""

_WIDE = (torch.uint16, torch.uint32, torch.uint64)

_MOVABLE: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.float8_e5m2fnuz: torch.int8,
    torch.float8_e8m0fnu: torch.int8,
}


def natural_type(dtype: torch.dtype) -> ir.DataType:
    """Return the ONNX type that a torch dtype stands for when nothing else is known of it."""
    return _NATURAL[dtype]


_NATURAL: dict[torch.dtype, ir.DataType] = {
    held: onnx for onnx, held in reversed(TORCH_DTYPES.items())
}


def widened(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let an arithmetic operator take ``uint16``, ``uint32`` and ``uint64``.

    Torch has these types but next to no arithmetic on them, so they are computed in ``int64`` and
    brought back. Values of ``uint64`` from 2**63 on compare and divide as negative numbers.
    """

    def run(*inputs: Tensor) -> Tensor:
        narrow = next((x.dtype for x in inputs if x is not None and x.dtype in _WIDE), None)
        if narrow is None:
            return operator(*inputs)
        wide = (x.to(torch.int64) if x is not None and x.dtype in _WIDE else x for x in inputs)
        result = operator(*wide)
        return result.to(narrow) if result.dtype == torch.int64 else result

    return run


def moved(x: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an operator that only moves elements, whatever their type.

    Types that torch cannot index are viewed as signed integers of the same width meanwhile.
    """
    stand_in = _MOVABLE.get(x.dtype)
    if stand_in is None:
        return operator(x)
    return operator(x.view(stand_in)).view(x.dtype)
