"""The element types and shapes in which a weight's codes, scales and zero points are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.editing import Attributes
from compressor.types.layers import E2M1_VALUES, Layer, QuantizedTensor, Scheme
from compressor.types.tensors import Array

FLOATS = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
"""The types of weights that can be quantized, by the names that layers give them."""


@dataclass(frozen=True)
class CodeForm:
    """How one layer's weight is stored under a scheme.

    ``DequantizeLinear`` takes integers and ``e4m3`` directly. Neither opset 21 nor ONNX Runtime on
    the CPU has four-bit floats, so ``e2m1`` is stored as ``uint4`` patterns, which are looked up in
    a table of doubled values (integers); half the scale undoes the doubling exactly.
    """

    layer: Layer
    scheme: Scheme

    @property
    def looked_up(self) -> bool:
        """The codes are indices into a table."""
        return self.scheme.element == "e2m1"

    @property
    def code_type(self) -> ir.DataType:
        """The narrowest element type of opset 21 that holds the codes."""
        scheme = self.scheme
        if scheme.element == "e4m3":
            return ir.DataType.FLOAT8E4M3FN
        if scheme.element == "e2m1":
            return ir.DataType.UINT4
        if scheme.bits <= 4:
            return ir.DataType.INT4 if scheme.signed else ir.DataType.UINT4
        return ir.DataType.INT8 if scheme.signed else ir.DataType.UINT8

    @property
    def scale_type(self) -> ir.DataType:
        """The element type of scales; those of eight bits are stored as they are.

        Half-precision scales stay so where the weight has the same type, because
        ``DequantizeLinear`` returns the type of its scale. Powers of two (``e8m0``, which opset
        21 lacks) are stored as their biased exponents.
        """
        scheme = self.scheme
        if self.looked_up:
            narrow = {"e4m3": ir.DataType.FLOAT8E4M3FN, "e8m0": ir.DataType.UINT8}
            return narrow.get(scheme.scale_type, ir.DataType.FLOAT)
        if scheme.scale_type == self.layer.dtype:
            return FLOATS[self.layer.dtype]
        return ir.DataType.FLOAT

    @property
    def float_type(self) -> ir.DataType:
        """The element type that ``DequantizeLinear`` returns."""
        return ir.DataType.FLOAT if self.looked_up else self.scale_type

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of scales and zero points."""
        layer, scheme = self.layer, self.scheme
        if layer.is_recurrent and layer.transposed:  # of the operator that multiplies integers
            directions, _, rows = layer.shape
            return (directions, rows) if scheme.granularity == "channel" else (directions,)
        if scheme.granularity == "tensor":
            return ()
        if scheme.granularity == "channel" and not self.blocked:
            return (layer.rows,)
        groups = scheme.groups(layer.columns)
        if layer.is_recurrent:
            return (*layer.shape[:2], groups)
        if layer.transposed:
            return (groups, layer.rows)
        return (layer.rows, groups, *layer.shape[2:])

    @property
    def axis(self) -> Attributes:
        """Attributes of ``DequantizeLinear`` that say along which axis the scales vary."""
        layer, scheme = self.layer, self.scheme
        if scheme.granularity == "tensor":
            return {}
        if self.blocked:
            return {"axis": 2, "block_size": scheme.group or layer.columns}
        if scheme.granularity == "channel":
            return {"axis": layer.output_axis}
        return {"axis": 0 if layer.transposed else 1, "block_size": scheme.group or 1}

    @property
    def blocked(self) -> bool:
        """The scales of a recurrent layer vary along several axes: with groups or directions."""
        grouped = self.scheme.granularity == "group" or self.layer.shape[0] > 1
        return self.layer.is_recurrent and self.scheme.granularity != "tensor" and grouped

    def codes(self, quantized: QuantizedTensor) -> ir.TensorProtocol:
        """Return the codes in the weight's stored shape."""
        return onnx_tensor(self.layer.stored(quantized.codes), self.code_type)

    def zero_point(self, quantized: QuantizedTensor) -> ir.TensorProtocol:
        """Return the zero points in their stored shape."""
        return onnx_tensor(self._parameter(quantized.zero_point), self.code_type)

    def scale(self, quantized: QuantizedTensor) -> ir.TensorProtocol:
        """Return the scales in their stored shape and type."""
        value = self._parameter(quantized.scale)
        if self.scale_type == ir.DataType.UINT8:
            _, exponent = torch.frexp(value)  # of fractions from a half to one
            return onnx_tensor((exponent + 126).to(torch.uint8), self.scale_type)
        if self.looked_up and self.scale_type == ir.DataType.FLOAT:
            value = value / 2
        return onnx_tensor(value, self.scale_type)

    def _parameter(self, value: torch.Tensor) -> torch.Tensor:
        """Bring ``[rows, groups]`` or ``[1, 1]`` to the stored shape."""
        if self.scheme.granularity == "group" and self.layer.transposed:
            value = value.T
        if value.numel() == 1:
            value = value.expand(prod(self.parameter_shape), 1)
        return value.reshape(self.parameter_shape)


class Once:
    """Quantizes a weight once, and drops the function with all that it holds."""

    def __init__(self, function: Callable[[], QuantizedTensor]):
        self._function: Callable[[], QuantizedTensor] | None = function
        self._result: QuantizedTensor | None = None

    def __call__(self) -> QuantizedTensor:
        """Return what the function returns."""
        if self._function is not None:
            self._result = self._function()
            self._function = None
        assert self._result is not None
        return self._result

    def tensor(
        self,
        make: Callable[[QuantizedTensor], ir.TensorProtocol],
        dtype: ir.DataType,
        shape: Sequence[int],
    ) -> ir.LazyTensor:
        """Return a tensor that is made of the quantized weight when it is first read."""
        return ir.LazyTensor(lambda: make(self()), dtype, ir.Shape(shape))


def doubled_e2m1() -> Array:
    """Return twice the value of each four-bit float, int8 ``[16]``."""
    return np.array([sign * 2 * v for sign in (1, -1) for v in E2M1_VALUES], np.int8)


def halved_powers() -> Array:
    """Return half the value of each biased exponent of ``e8m0``, float32 ``[256]``.

    The last one, which is not a number in ``e8m0``, is never stored.
    """
    return np.ldexp(np.float32(0.5), np.arange(256) - 127).astype(np.float32)


_VIEWED = {
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
}


def onnx_tensor(value: torch.Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    """Return a torch tensor as an ONNX one of an element type that holds its values."""
    if value.is_floating_point() and dtype != ir.DataType.FLOAT:
        value = value.to(_TORCH[dtype])
    viewed = _VIEWED.get(value.dtype)
    array: Array
    if viewed is None:
        array = value.contiguous().numpy()
    else:
        array = value.contiguous().view(viewed[0]).numpy().view(viewed[1])
    return ir.Tensor(array.astype(dtype.numpy(), copy=False), dtype=dtype)


_TORCH = {
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
}
