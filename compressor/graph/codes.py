"""Replace float weights of an ONNX IR graph by quantized ones.

A weight ``fc.weight`` becomes codes of the same name with ``fc.weight_scale`` and, unless the
scheme is symmetric, ``fc.weight_zero_point``; where the scales of groups have a scale of their own,
``fc.weight_half_scale`` is half of it. Nothing is quantized before one of them is read, so a graph
for planning costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.graph.code_forms import FLOATS, CodeForm, Once, doubled_e2m1, halved_powers
from compressor.graph.editing import Chain, Editor
from compressor.graph.operators import operator
from compressor.types.layer_rules import unfit_type
from compressor.types.layers import Layer, QuantizedTensor, Scheme
from compressor.types.tensors import Array

BITS = "compressor.bits"
"""Metadata key of ``DequantizeLinear``: the bits of codes stored in a wider type."""

_NARROW_OPSET = 21  # the first with 4-bit codes and scales for blocks
_FLOAT8_OPSET = 19
_NARROW_IR = 10
_FLOAT_BITS = {"e4m3": 8, "e2m1": 4}


@dataclass(frozen=True)
class Codes:
    """A weight that is stored as codes.

    Attributes:
        codes: the initializer of the codes, in the weight's stored shape.
        scale: the initializer of the scale; see :class:`compressor.graph.code_forms.CodeForm`
            for its type.
        zero_point: that of the zero point; ``None`` where the scheme is symmetric.
        half_scale: half of the number that the scales are multiplied with, if there is one.
        quantized: the weight in canonical form; computed at the first call.
    """

    layer: Layer
    scheme: Scheme
    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    half_scale: ir.Value | None
    quantized: Callable[[], QuantizedTensor]

    @property
    def form(self) -> CodeForm:
        """The types and shapes of the initializers."""
        return CodeForm(self.layer, self.scheme)


def obstacle(layer: Layer, scheme: Scheme, opset: int) -> str | None:
    """Return why a layer's weight cannot be stored under a scheme, or ``None`` if it can."""
    if layer.dtype not in FLOATS:
        return unfit_type(layer.dtype)
    problem = _no_form(scheme)
    if problem is not None:
        return problem
    if scheme.granularity != "tensor" and layer.is_transposed_convolution and layer.groups > 1:
        return "its output channels lie along two axes, ConvTranspose has groups"
    if scheme.granularity == "group":
        kernel = () if layer.is_recurrent else layer.shape[2:]
        if layer.is_transposed_convolution or any(d != 1 for d in kernel):
            return "blocks of a convolution's kernel are not a form that ONNX has"
        if not scheme.group or layer.columns % scheme.group:
            return f"{layer.columns} columns do not divide into groups of {scheme.group}"
    blocked = scheme.granularity == "group" or CodeForm(layer, scheme).blocked
    if opset < _NARROW_OPSET and (scheme.bits <= 4 or blocked):
        return f"opset {opset} has no 4-bit codes and no blocks; opset {_NARROW_OPSET} has"
    if opset < _FLOAT8_OPSET and scheme.element == "e4m3":
        return f"opset {opset} has no 8-bit floats; opset {_FLOAT8_OPSET} has"
    return None


def _no_form(scheme: Scheme) -> str | None:
    if scheme.element in ("int", "codebook"):
        least = 2 if scheme.element == "int" else 1
        if least <= scheme.bits <= 8:
            return None
        return f"ONNX stores codes of {least} to 8 bits, not {scheme.bits}"
    if scheme.bits != _FLOAT_BITS[scheme.element]:
        return f"{scheme.element} has {_FLOAT_BITS[scheme.element]} bits, not {scheme.bits}"
    if not scheme.symmetric:
        return f"{scheme.element} has no zero points"
    if scheme.element == "e4m3" and scheme.scale_type in ("e4m3", "e8m0"):
        return f"8-bit codes with scales in {scheme.scale_type} are not a form that ONNX has"
    return None


def attach_codes(
    editor: Editor, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]
) -> Codes:
    """Store a weight as codes; everything that read it reads ``DequantizeLinear`` of them.

    Args:
        editor: of the model, which is changed in place. Making one looks at every node, so one
            serves many layers.
        layer: its weight is a float initializer of the main graph.
        scheme: what ``compute`` will return.
        compute: quantizes the weight; called once at most, when a value is first asked for.

    Raises:
        ValueError: the weight cannot be stored under the scheme, see :func:`obstacle`.
    """
    weight = editor.model.graph.initializers[layer.weight]
    codes = store_codes(editor, layer, scheme, compute)
    read_through(editor, weight, codes)
    return codes


def store_codes(
    editor: Editor, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]
) -> Codes:
    """Replace a weight's initializer by codes, and leave its readers to the caller.

    The arguments are those of :func:`attach_codes`. The caller must pass the old value to
    :func:`read_through` if anything still reads it.

    Raises:
        ValueError: the weight cannot be stored under the scheme, see :func:`obstacle`.
    """
    checked_opset(editor.model, layer, scheme)
    quantized = Once(compute)
    form = CodeForm(layer, scheme)
    editor.release(editor.model.graph.initializers[layer.weight])

    def lazy(
        suffix: str,
        make: Callable[[QuantizedTensor], ir.TensorProtocol],
        dtype: ir.DataType,
        shape: Sequence[int],
    ) -> ir.Value:
        return editor.initializer(layer.weight + suffix, quantized.tensor(make, dtype, shape))

    codes = lazy("", form.codes, form.code_type, layer.shape)
    scale = lazy("_scale", form.scale, form.scale_type, form.parameter_shape)
    zero_point = half_scale = None
    if not scheme.symmetric:
        zero_point = lazy("_zero_point", form.zero_point, form.code_type, form.parameter_shape)
    if form.scale_type == ir.DataType.FLOAT8E4M3FN:
        half_scale = lazy("_half_scale", _half_scale, ir.DataType.FLOAT, ())
    return Codes(layer, scheme, codes, scale, zero_point, half_scale, quantized)


def checked_opset(model: ir.Model, layer: Layer, scheme: Scheme) -> None:
    """Check that a model can store a layer's weight under a scheme; raise its IR version if needed.

    Raises:
        ValueError: it cannot, see :func:`obstacle`.
    """
    problem = obstacle(layer, scheme, model.opset_imports.get("", 0))
    if problem:
        raise ValueError(f"layer {layer.name!r}: {problem}")
    if scheme.bits <= 4:
        model.ir_version = max(model.ir_version, _NARROW_IR)


def read_through(editor: Editor, weight: ir.Value, codes: Codes) -> None:
    """Make the remaining readers of the old ``weight`` read the codes instead.

    Rows of a table are looked up in its codes, so that only the rows in use are dequantized. Any
    other reader gets the output of ``DequantizeLinear``.
    """
    for use in tuple(weight.uses()):
        if use.idx == 0 and _looks_up_rows(use.node, codes):
            _look_up_codes(editor, use.node, codes)
    before = editor.first_reader(weight)
    if before is None:
        return
    chain = Chain(editor)
    floats = _dequantized(editor, chain, codes)
    if weight.dtype not in (None, floats.dtype):
        name = f"{codes.layer.weight}_{codes.layer.dtype}"
        floats = chain.add("Cast", [floats], name, weight.dtype, {"to": weight.dtype})
        floats.shape = ir.Shape(codes.layer.shape)
    before.prepend(chain.nodes)
    weight.replace_all_uses_with(floats)


def _dequantized(editor: Editor, chain: Chain, codes: Codes) -> ir.Value:
    """Add the nodes that turn codes into floats; return the weight."""
    form, name = codes.form, codes.layer.weight
    elements, scale = codes.codes, codes.scale
    if form.looked_up:
        elements = _looked_up(editor, chain, codes.codes, (_E2M1, doubled_e2m1()))
    if form.scale_type == ir.DataType.UINT8:
        scale = _looked_up(editor, chain, codes.scale, (_E8M0, halved_powers()))
    elif codes.half_scale is not None:
        parts = [codes.scale, codes.half_scale]
        scale = chain.add("DequantizeLinear", parts, f"{name}_scale_float")
        scale.shape = codes.scale.shape
    inputs = [elements, scale] + ([codes.zero_point] if codes.zero_point else [])
    floats = chain.add(
        "DequantizeLinear", inputs, f"{name}_dequantized", form.float_type, form.axis
    )
    floats.shape = ir.Shape(codes.layer.shape)
    if codes.scheme.element == "int" and codes.scheme.bits < form.code_type.bitwidth:
        chain.nodes[-1].metadata_props[BITS] = str(codes.scheme.bits)
    return floats


_E2M1 = "e2m1_doubled"
_E8M0 = "e8m0_halved"


def _looked_up(
    editor: Editor, chain: Chain, places: ir.Value, table: tuple[str, Array]
) -> ir.Value:
    held, kind = editor.shared_constant(*table), ir.DataType.INT32
    index = chain.add("Cast", [places], f"{places.name}_index", kind, {"to": kind})
    value = chain.add("Gather", [held, index], f"{places.name}_value", held.dtype)
    index.shape = value.shape = places.shape
    return value


def _half_scale(quantized: QuantizedTensor) -> ir.TensorProtocol:
    whole = quantized.tensor_scale
    return ir.tensor(np.float32(0.5 if whole is None else whole.item() / 2))


def write_out_zero_point(graph: ir.Graph, stored: Codes) -> None:
    """Add the default zero point to the ``DequantizeLinear`` of symmetric codes.

    ONNX Runtime turns ``Gemm`` into ``QGemm`` only if the zero point is explicit.
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
        if index == 0 and operator(node).dequantizes and len(node.inputs) == 2:
            node.resize_inputs(3)
            node.replace_input_with(2, zero)


def _looks_up_rows(node: ir.Node, codes: Codes) -> bool:
    if not operator(node).is_table or node.attributes.get_int("axis", 0) != 0:
        return False
    scheme, layer = codes.scheme, codes.layer
    rows = layer.output_axis == 0 and (scheme.symmetric or scheme.granularity == "group")
    # Gather takes no elements of four bits, and none that are 8-bit floats.
    stored = scheme.bits > 4 and scheme.element == "int"
    fits = scheme.granularity == "tensor" or rows
    return fits and stored and len(layer.shape) == 2 and layer.dtype == "float32"


def _look_up_codes(editor: Editor, gather: ir.Node, codes: Codes) -> None:
    """Look up rows in the codes, scales and zero points instead of the weight."""
    name, indices = gather.outputs[0].name or "", gather.inputs[1]
    assert indices is not None
    zero, granularity = codes.zero_point, codes.scheme.granularity
    chain = Chain(editor, name)

    def rows_of(table: ir.Value, suffix: str) -> ir.Value:
        found = chain.add("Gather", [table, indices], suffix, table.dtype)
        if indices.shape is not None and table.shape is not None:  # exporters read it
            found.shape = ir.Shape([*indices.shape.dims, *table.shape.dims[1:]])
        return found

    rows = rows_of(codes.codes, "_codes")
    if granularity == "channel":
        last = editor.constant(f"{name}_axis", np.array([-1], np.int64))
        scales = rows_of(codes.scale, "_scale")
        scale = chain.add("Unsqueeze", [scales, last], "_column")
        scale.shape = None if scales.shape is None else ir.Shape([*scales.shape.dims, 1])
        floats = chain.add("Cast", [rows], "_float", attributes={"to": ir.DataType.FLOAT})
        floats.shape = rows.shape
        result = chain.add("Mul", [floats, scale], "_dequantized")
    elif granularity == "tensor":
        inputs = [rows, codes.scale, *([zero] if zero else [])]
        result = chain.add("DequantizeLinear", inputs, "_dequantized")
    else:
        inputs = [rows, rows_of(codes.scale, "_scale")]
        if zero is not None:
            inputs.append(rows_of(zero, "_zero_point"))
        blocks = {"axis": -1, "block_size": codes.scheme.group or 1}
        result = chain.add("DequantizeLinear", inputs, "_dequantized", attributes=blocks)
    assert gather.graph is not None
    result.shape = gather.outputs[0].shape
    ir.convenience.replace_nodes_and_values(
        gather.graph, gather, [gather], chain.nodes, gather.outputs, [result]
    )
