"""ONNX element types in torch: which dtype holds which, and conversion with ONNX's rounding.

Torch has no four-bit and no six-bit elements that can be computed with. They are stored unpacked,
one value a byte: integers of two and four bits as ``int8`` or ``uint8``, floats of four and six
bits as ``float8_e4m3fn``, which represents each of their values exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from compressor.errors import ModelError
from compressor.types.tensors import Array

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

_NATURAL = {held: dtype for dtype, held in reversed(TORCH_DTYPES.items())}

_WIDE = (torch.uint16, torch.uint32, torch.uint64)

_SAME_WIDTH = {
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


def widened(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an arithmetic operator accept ``uint16``, ``uint32`` and ``uint64``.

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
    stand_in = _SAME_WIDTH.get(x.dtype)
    if stand_in is None:
        return operator(x)
    return operator(x.view(stand_in)).view(x.dtype)


_UNPACKED = {
    ir.DataType.INT2: np.int8,
    ir.DataType.INT4: np.int8,
    ir.DataType.UINT2: np.uint8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.FLOAT4E2M1: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT6E2M3: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT6E3M2: ml_dtypes.float8_e4m3fn,
}


def from_numpy(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return an ONNX tensor as a torch tensor on the CPU.

    The memory is shared wherever the element type allows it, so a tensor in an external data file
    stays on disk until it is read; do not write to the result. Elements of less than eight bits
    are unpacked.

    Raises:
        ModelError: the tensor holds strings.
    """
    held = TORCH_DTYPES.get(tensor.dtype)
    if held is None:
        raise ModelError(
            f"tensor '{tensor.name}'",
            f"its element type {tensor.dtype.name} has no counterpart in torch",
            "remove the strings from the model, or run it in ONNX Runtime",
        )
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor) and raw.dtype == held:
        return raw.detach()
    array = tensor.numpy()
    unpacked = _UNPACKED.get(tensor.dtype)
    if unpacked is not None:
        array = array.astype(unpacked)
    if held == torch.bfloat16:
        return _shared(array.view(np.int16)).view(held)
    if held.is_floating_point and held.itemsize == 1:
        return _shared(array.view(np.uint8)).view(held)
    return _shared(array)


def tensor_of(value: ir.Value) -> torch.Tensor:
    """Return an initializer as a torch tensor; see :func:`from_numpy`."""
    assert value.const_value is not None
    return from_numpy(value.const_value)


def of_numpy(array: Array) -> torch.Tensor:
    """Return an array's elements as a tensor; bfloat16 keeps its type, which PyTorch refuses."""
    return from_numpy(ir.tensor(array))


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements as an array; bfloat16 keeps its type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _shared(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.flags.writeable:
        return torch.from_numpy(array)
    return from_dlpack(array)  # from_numpy warns of every array that is read-only


_FLOAT8 = {
    # largest value, smallest value that rounds to a larger one, and what such values become
    # unless they saturate. The largest E4M3FN is even, so the tie at 464 rounds down to it.
    ir.DataType.FLOAT8E4M3FN: (448.0, 464.00003, float("nan")),
    ir.DataType.FLOAT8E4M3FNUZ: (240.0, 248.0, float("nan")),
    ir.DataType.FLOAT8E5M2: (57344.0, 61440.0, float("inf")),
    ir.DataType.FLOAT8E5M2FNUZ: (57344.0, 61440.0, float("nan")),
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
        x: rounded floats, the zero point added; they are changed in place.
        dtype: an integer type of `INTEGER_RANGES`.
    """
    least, greatest = INTEGER_RANGES[dtype]
    return x.clamp_(least, greatest).to(TORCH_DTYPES[dtype])


def _wrapped(x: Tensor, dtype: ir.DataType) -> Tensor:
    """Keep the low bits only, which is what a conversion between integers does."""
    least, greatest = INTEGER_RANGES[dtype]
    width = greatest - least + 1
    return torch.remainder(x.to(torch.int64) - least, width) + least


def _to_float8(x: Tensor, dtype: ir.DataType, saturate: bool) -> Tensor:
    largest, overflow, infinity = _FLOAT8[dtype]
    wide = x.to(torch.float32)
    result = torch.clamp(wide, -largest, largest)
    if not saturate:
        beyond = torch.copysign(torch.full_like(wide, infinity), wide)
        result = torch.where(wide.abs() >= overflow, beyond, result)
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


def run_without_numpy(
    session: Any, outputs: Sequence[str], feed: Mapping[str, Array]
) -> list[Array]:
    """Run a session of ONNX Runtime that takes or gives bfloat16, which its numpy does not know."""
    import onnxruntime as ort

    bfloat16 = ir.DataType.BFLOAT16
    values = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(array).view(np.uint16), bfloat16.value
        )
        if array.dtype == bfloat16.numpy()
        else ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        for name, array in feed.items()
    }
    return [to_numpy(from_dlpack(v)) for v in session.run_with_ort_values(outputs, values)]
