"""Four-bit floats as elements of their own, which TensorRT has and opset 23 is the first with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir

from compressor.exporters.onnx.weight_only import WeightOnly
from compressor.graph.editing import Editor
from compressor.graph.layers import looked_up
from compressor.graph.values import is_op, static_shape
from compressor.types.tensors import Array


def as_four_bit_floats(editor: Editor, weight: WeightOnly) -> None:
    """Store codes that are looked up in a table of doubled values as ``FLOAT4E2M1``.

    The scale is doubled again, to what it is meant to be. Scales of 8 bits keep their type and
    the scale that they have in turn; powers of two become floats, because the parser of TensorRT
    refuses ``FLOAT8E8M0``.
    """
    node = weight.dequantize
    if node.inputs[0] is weight.codes:
        return
    four = ir.DataType.FLOAT4E2M1
    node.replace_input_with(0, _changed(editor, weight.codes, _patterns, four))
    scale, maker = weight.scale, weight.scale.producer()
    if maker is not None and is_op(maker, "DequantizeLinear"):
        half = maker.inputs[1]
        assert half is not None
        name = (half.name or "").replace("_half_scale", "_tensor_scale")
        maker.replace_input_with(1, _changed(editor, half, _doubled, ir.DataType.FLOAT, name))
        return
    exponents = None if maker is None else looked_up(maker)
    if exponents is None:
        made = _changed(editor, scale, _doubled, ir.DataType.FLOAT)
    else:
        made = _changed(editor, exponents, _powers, ir.DataType.FLOAT)
    node.replace_input_with(1, made)


def _changed(
    editor: Editor,
    value: ir.Value,
    function: Callable[[Array], Array],
    dtype: ir.DataType,
    name: str = "",
) -> ir.Value:
    """Put another form of an initializer in its place; nothing is computed yet."""
    tensor, shape = value.const_value, static_shape(value)
    assert tensor is not None
    assert shape is not None
    editor.release(value)
    lazy = ir.LazyTensor(partial(_computed, tensor, function, dtype), dtype, ir.Shape(shape))
    return editor.initializer(name or value.name or "", lazy)


def _computed(
    tensor: ir.TensorProtocol, function: Callable[[Array], Array], dtype: ir.DataType
) -> ir.TensorProtocol:
    return ir.Tensor(function(np.asarray(tensor.numpy())), dtype=dtype)


def _patterns(codes: Array) -> Array:
    """Return the floats whose bits the codes are."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)


def _doubled(half: Array) -> Array:
    return np.asarray(half * np.float32(2))


def _powers(exponents: Array) -> Array:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
