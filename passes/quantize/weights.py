"""Put quantized weights into an ONNX IR graph in place of the float ones.

A weight ``fc.weight`` becomes codes of the same name with ``fc.weight_scale`` and, unless the
scheme is symmetric, ``fc.weight_zero_point`` beside it. Nothing is quantized before somebody reads
one of the three, so a graph for planning costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from torch import Tensor

from compressor.graph.values import is_op
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, Scheme
from compressor.types.tensors import Array
from passes.quantize.editing import Attributes, Editor

_FLOATS = ("float32", "float16", "bfloat16")
_NARROW_OPSET = 21  # the first with 4-bit codes and scales for blocks
_NARROW_IR = 10


@dataclass(frozen=True)
class Codes:
    """A weight that is stored as codes.

    Attributes:
        layer: whose weight it is.
        scheme: what the codes mean.
        codes: the initializer of the codes, in the weight's stored shape.
        scale: the initializer of the scale, in the form that ``DequantizeLinear`` wants.
        zero_point: that of the zero point; ``None`` where the scheme is symmetric.
        quantized: the weight in canonical form; computed at the first call.
    """

    layer: Layer
    scheme: Scheme
    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    quantized: Callable[[], QuantizedTensor]


def obstacle(layer: Layer, scheme: Scheme, opset: int) -> str | None:
    """Say why a layer's weight cannot be stored under a scheme, or return ``None``."""
    if layer.dtype not in _FLOATS:
        return f"its weight is {layer.dtype} already"
    if not 2 <= scheme.bits <= 8:
        return f"ONNX stores codes of 2 to 8 bits, not {scheme.bits}"
    if scheme.granularity != "tensor" and layer.kind == "ConvTranspose" and layer.groups > 1:
        return "its output channels lie along two axes, ConvTranspose has groups"
    if scheme.granularity == "group":
        if layer.kind == "ConvTranspose" or any(d != 1 for d in layer.shape[2:]):
            return "blocks of a convolution's kernel are not a form that ONNX has"
        if not scheme.group or layer.columns % scheme.group:
            return f"{layer.columns} columns do not divide into groups of {scheme.group}"
    if opset < _NARROW_OPSET and (scheme.bits <= 4 or scheme.granularity == "group"):
        return f"opset {opset} has no 4-bit codes and no blocks; opset {_NARROW_OPSET} has"
    return None


def attach_codes(
    model: ir.Model, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]
) -> Codes:
    """Store a weight as codes; everything that read it reads ``DequantizeLinear`` of them.

    Args:
        model: changed in place.
        layer: its weight is a float initializer of the main graph.
        scheme: what ``compute`` will return.
        compute: quantizes the weight; called once at most, when a value is first asked for.

    Raises:
        ValueError: the weight cannot be stored under the scheme, see :func:`obstacle`.
    """
    editor = Editor(model)
    weight = model.graph.initializers[layer.weight]
    codes = store_codes(editor, layer, scheme, compute)
    read_through(editor, weight, codes)
    return codes


def store_codes(
    editor: Editor, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]
) -> Codes:
    """Replace a weight's initializer by codes, and leave what reads it to the caller.

    The arguments are those of :func:`attach_codes`. Whatever still reads the old value when the
    caller is done must be passed to :func:`read_through`.

    Raises:
        ValueError: the weight cannot be stored under the scheme, see :func:`obstacle`.
    """
    model = editor.model
    problem = obstacle(layer, scheme, model.opset_imports.get("", 0))
    if problem:
        raise ValueError(f"layer {layer.name!r}: {problem}")
    quantized = _Once(compute)
    editor.release(model.graph.initializers[layer.weight])
    if scheme.bits <= 4:
        model.ir_version = max(model.ir_version, _NARROW_IR)
    kind, shape = _code_type(scheme), _parameter_shape(layer, scheme)

    def codes() -> ir.TensorProtocol:
        return _tensor(layer.stored(quantized().codes), kind)

    def scale() -> ir.TensorProtocol:
        return _tensor(_parameter(layer, scheme, quantized().scale), ir.DataType.FLOAT)

    def zero_point() -> ir.TensorProtocol:
        return _tensor(_parameter(layer, scheme, quantized().zero_point), kind)

    def lazy(suffix: str, function: Callable[[], ir.TensorProtocol], form: ir.Shape) -> ir.Value:
        dtype = ir.DataType.FLOAT if function is scale else kind
        return editor.initializer(layer.weight + suffix, ir.LazyTensor(function, dtype, form))

    return Codes(
        layer,
        scheme,
        codes=lazy("", codes, ir.Shape(layer.shape)),
        scale=lazy("_scale", scale, ir.Shape(shape)),
        zero_point=None if scheme.symmetric else lazy("_zero_point", zero_point, ir.Shape(shape)),
        quantized=quantized,
    )


def read_through(editor: Editor, weight: ir.Value, codes: Codes) -> None:
    """Let what still reads the old ``weight`` read the codes instead.

    A table that is looked up is looked up in its codes: a row is dequantized when it is wanted,
    rather than all of them in every run. Anything else reads ``DequantizeLinear``.
    """
    for use in tuple(weight.uses()):
        if use.idx == 0 and _looks_up_rows(use.node, codes):
            _look_up_codes(editor, use.node, codes)
    before = editor.first_reader(weight)
    if before is None:
        return
    dequantize = editor.node(
        "DequantizeLinear",
        [codes.codes, codes.scale] + ([codes.zero_point] if codes.zero_point else []),
        f"{codes.layer.weight}_dequantized",
        ir.DataType.FLOAT,
        _axis(codes.layer, codes.scheme),
    )
    added = [dequantize]
    if weight.dtype not in (None, ir.DataType.FLOAT):
        name = f"{codes.layer.weight}_{codes.layer.dtype}"
        to: Attributes = {"to": weight.dtype}
        added.append(editor.node("Cast", dequantize.outputs, name, weight.dtype, to))
    for node in added:
        node.outputs[0].shape = ir.Shape(codes.layer.shape)
    before.prepend(added)
    weight.replace_all_uses_with(added[-1].outputs[0])


def write_out_zero_point(graph: ir.Graph, stored: Codes) -> None:
    """Give the ``DequantizeLinear`` of symmetric codes the zero point that it has by default.

    ONNX Runtime turns ``Gemm`` into ``QGemm`` only where the zero point is written out.
    """
    dtype = stored.codes.dtype
    assert dtype is not None
    assert stored.scale.shape is not None
    shape = tuple(int(d) for d in stored.scale.shape.numpy())
    tensor = ir.tensor(np.zeros(shape, dtype.numpy()), name=f"{stored.codes.name}_zero_point")
    zero = ir.Value(
        name=tensor.name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor
    )
    graph.register_initializer(zero)
    for node, index in tuple(stored.codes.uses()):
        if index == 0 and is_op(node, "DequantizeLinear") and len(node.inputs) == 2:
            node.resize_inputs(3)
            node.replace_input_with(2, zero)


class _Once:
    """Calls a function at the first call, and lets go of what it holds."""

    def __init__(self, function: Callable[[], QuantizedTensor]):
        self._function: Callable[[], QuantizedTensor] | None = function
        self._result: QuantizedTensor | None = None

    def __call__(self) -> QuantizedTensor:
        if self._function is not None:
            self._result = self._function()
            self._function = None
        assert self._result is not None
        return self._result


def _code_type(scheme: Scheme) -> ir.DataType:
    """The narrowest element type of opset 21 that holds the codes."""
    if scheme.bits <= 4:
        return ir.DataType.INT4 if scheme.signed else ir.DataType.UINT4
    return ir.DataType.INT8 if scheme.signed else ir.DataType.UINT8


def _parameter_shape(layer: Layer, scheme: Scheme) -> tuple[int, ...]:
    if scheme.granularity == "tensor":
        return ()
    if scheme.granularity == "channel":
        return (layer.rows,)
    groups = layer.columns // (scheme.group or 1)
    if layer.transposed:
        return (groups, layer.rows)
    return (layer.rows, groups, *layer.shape[2:])


def _parameter(layer: Layer, scheme: Scheme, value: Tensor) -> Tensor:
    """Bring a scale or zero point, ``[rows, groups]`` or ``[1, 1]``, to its stored shape."""
    if scheme.granularity == "group" and layer.transposed:
        value = value.T
    return value.reshape(_parameter_shape(layer, scheme))


def _axis(layer: Layer, scheme: Scheme) -> Attributes:
    """Attributes of ``DequantizeLinear``: where in the stored weight the scales run."""
    if scheme.granularity == "tensor":
        return {}
    if scheme.granularity == "channel":
        return {"axis": layer.output_axis}
    return {"axis": 0 if layer.transposed else 1, "block_size": scheme.group or 1}


def _tensor(value: Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    array: Array = value.contiguous().numpy()
    return ir.Tensor(array.astype(dtype.numpy(), copy=False), dtype=dtype)


def _looks_up_rows(node: ir.Node, codes: Codes) -> bool:
    if not is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
        return False
    scheme, layer = codes.scheme, codes.layer
    fits = scheme.granularity == "tensor" or (
        scheme.granularity == "channel" and scheme.symmetric and layer.output_axis == 0
    )
    # Gather takes no 4-bit elements.
    return fits and scheme.bits > 4 and len(layer.shape) == 2 and layer.dtype == "float32"


def _look_up_codes(editor: Editor, gather: ir.Node, codes: Codes) -> None:
    """Replace ``Gather(weight, i)`` by ``Gather(codes, i) * Gather(scale, i)``."""
    name, indices = gather.outputs[0].name or "", gather.inputs[1]
    found = editor.node("Gather", [codes.codes, indices], f"{name}_codes", codes.codes.dtype)
    added = [found]

    def add(
        op_type: str, inputs: list[ir.Value | None], suffix: str, **to: ir.DataType
    ) -> ir.Value:
        node = editor.node(op_type, inputs, name + suffix, ir.DataType.FLOAT, to)
        added.append(node)
        return node.outputs[0]

    if codes.scheme.granularity == "tensor":
        zero = [codes.zero_point] if codes.zero_point else []
        add("DequantizeLinear", [found.outputs[0], codes.scale, *zero], "_dequantized")
    else:
        last = editor.constant(f"{name}_axis", np.array([-1], np.int64))
        scale = add("Unsqueeze", [add("Gather", [codes.scale, indices], "_scale"), last], "_column")
        floats = add("Cast", [found.outputs[0]], "_float", to=ir.DataType.FLOAT)
        add("Mul", [floats, scale], "_dequantized")
    assert gather.graph is not None
    ir.convenience.replace_nodes_and_values(
        gather.graph, gather, [gather], added, gather.outputs, added[-1].outputs
    )
