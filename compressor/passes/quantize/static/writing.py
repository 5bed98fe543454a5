"""Write the codes of weights, biases and activations into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.codes import attach_codes, write_out_zero_point
from compressor.graph.editing import Editor, insert_behind
from compressor.graph.operators import operator
from compressor.graph.values import constant_array, constant_of, static_shape, value_by_name
from compressor.passes.quantize.maths.affine import quantize
from compressor.passes.quantize.static.placement import (
    ActivationCode,
    Placement,
    quantized_source,
)
from compressor.passes.quantize.static.settings import Decision
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.tensors import Array

_MOST = 2.0**30  # codes of a bias stay below, so that the accumulator does not overflow


LeastScale: TypeAlias = "Callable[[], torch.Tensor] | None"
MakeCodes: TypeAlias = Callable[[Layer, LeastScale], Callable[[], QuantizedTensor]]
"""Returns what quantizes a layer's weight when it is called; the least scale of each row that the
layer's bias allows is ``[rows, 1]``, or ``None`` where any will do."""


def write_static_codes(
    decision: Decision, activations: Mapping[str, ActivationCode], make_codes: MakeCodes
) -> dict[str, Callable[[], QuantizedTensor]]:
    """Quantize a graph in place; return what computes each layer's weight when it is first read.

    ``make_codes`` is called once for each layer, in the order of execution.
    """
    model, placement, profile = decision.model, decision.placement, decision.settings.profile
    scales = _input_scales(model, placement, activations)
    makers: dict[str, Callable[[], QuantizedTensor]] = {}
    for layer, value in placement.layers:
        if layer.name in makers:
            continue
        node = decision.nodes[layer.name]
        if profile.integer_bias:
            _give_own_bias(model, node, layer)
        bias = own_bias(node) if profile.integer_bias else None
        least = None if bias is None else partial(_least_weight_scale, _tensor(bias), scales[value])
        make = makers[layer.name] = make_codes(layer, least)
        stored = attach_codes(Editor(model), layer, decision.schemes[layer.name], make)
        if layer.kind in profile.explicit_zero and stored.zero_point is None:
            write_out_zero_point(model.graph, stored)
        if bias is not None and profile.stores_bias(node, decision.schemes[layer.name]):
            node.replace_input_with(2, _attach_bias_codes(model.graph, bias, scales[value], make))
    values, editor = value_by_name(model), Editor(model)
    for name in placement.values:
        _quantize_value(editor, values[name], activations[name], placement.carried)
    return makers


def widened(codes: QuantizedTensor, least: LeastScale) -> QuantizedTensor:
    """Return codes whose scales are large enough for the layer's integer bias."""
    if least is None:
        return codes
    needed = least()
    needed = needed.amax(0, keepdim=True) if codes.scale.shape[0] == 1 else needed
    if bool((codes.scale >= needed).all()):
        return codes
    wider = torch.maximum(codes.scale, needed)
    return quantize(codes.dequantize(), wider, codes.zero_point, codes.scheme)


def _least_weight_scale(bias: ir.TensorProtocol, input_scale: float) -> torch.Tensor:
    """Return each row's least weight scale at which the bias fits int32, ``[rows, 1]``."""
    size = np.abs(bias.numpy().astype(np.float64)) / (input_scale * _MOST)
    return torch.from_numpy(size.astype(np.float32))[:, None]


def _attach_bias_codes(
    graph: ir.Graph, bias: ir.Value, input_scale: float, weight: Callable[[], QuantizedTensor]
) -> ir.Value:
    """Replace a float bias ``[rows]`` without other readers by int32 codes; return it dequantized.

    The bias' scale is the product of the input's and the weight's, as the integer product has it
    (Jacob et al. 2017, section 2.4).
    """
    name, values = bias.name or "", _tensor(bias)
    rows = int(values.shape.numpy()[0])

    def scale() -> Array:
        spread = np.broadcast_to(weight().scale[:, 0].numpy().astype(np.float64), (rows,))
        return np.asarray((spread * input_scale).astype(np.float32))

    def codes() -> Array:
        levels = np.rint(values.numpy().astype(np.float64) / scale().astype(np.float64))
        return np.asarray(np.clip(levels, -_MOST, _MOST).astype(np.int32))

    del graph.initializers[name]
    coded = _lazy(graph, name, codes, ir.DataType.INT32, rows)
    scales = _lazy(graph, f"{name}_scale", scale, ir.DataType.FLOAT, rows)
    output = ir.Value(
        name=f"{name}_dequantized", shape=ir.Shape((rows,)), type=ir.TensorType(ir.DataType.FLOAT)
    )
    node = ir.node(
        "DequantizeLinear",
        [coded, scales],
        {"axis": 0},
        outputs=[output],
        name=f"{name}_dequantize",
    )
    graph.insert_before(graph[0], node)
    return output


def _lazy(
    graph: ir.Graph, name: str, make: Callable[[], Array], dtype: ir.DataType, rows: int
) -> ir.Value:
    shape = ir.Shape((rows,))
    tensor = ir.LazyTensor(
        lambda: ir.tensor(make(), name=name, dtype=dtype),
        dtype=dtype,
        shape=shape,
        name=name,
        cache=True,
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _give_own_bias(model: ir.Model, node: ir.Node, layer: Layer) -> None:
    """Make a bias that several layers share, or one of the shape ``[1, rows]``, the layer's vector.

    Its codes have the layer's scale, and integer kernels take vectors only. With a bias of floats,
    ONNX Runtime dequantizes the weight in every run, which takes up to ninety times as long.
    """
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = constant_of(bias)
    if bias is None or tensor is None or own_bias(node) is not None:
        return
    row = (1, layer.rows) if layer.is_linear else ()
    if bias.dtype != ir.DataType.FLOAT or static_shape(bias) not in ((layer.rows,), row):
        return
    vector = ir.LazyTensor(
        lambda: ir.tensor(np.array(tensor.numpy()).reshape(layer.rows)),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape((layer.rows,)),
    )
    node.replace_input_with(2, Editor(model).initializer(f"{layer.name}.own_bias", vector))
    if bias.is_initializer() and not bias.uses() and not bias.is_graph_output():
        del model.graph.initializers[bias.name or ""]


def own_bias(node: ir.Node) -> ir.Value | None:
    """Return the node's bias if it is a vector that nothing else reads."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None or not bias.is_initializer() or len(list(bias.uses())) != 1:
        return None
    shape = bias.shape
    if shape is None or len(shape) != 1 or bias.dtype != ir.DataType.FLOAT:
        return None
    return bias


def input_sources(model: ir.Model, placement: Placement) -> dict[str, ir.Value]:
    """Return, for each value that a layer reads, the quantized one whose codes it carries.

    That is one of the placement's, or the output of a ``DequantizeLinear`` that was there before.
    """
    values, placed = value_by_name(model), set(placement.values)
    sources: dict[str, ir.Value] = {}
    for _, name in placement.layers:
        value: ir.Value | None = values[name]
        while value is not None and value.name not in placed and quantized_source(value) is None:
            node = value.producer()
            value = None if node is None else node.inputs[0]
        if value is not None:
            sources[name] = value
    return sources


def _input_scales(
    model: ir.Model, placement: Placement, activations: Mapping[str, ActivationCode]
) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, value in input_sources(model, placement).items():
        source = quantized_source(value)
        if source is None:
            scales[name] = activations[value.name or ""].scale
        else:
            scale = constant_array(source.inputs[1])
            assert scale is not None
            scales[name] = float(scale)
    return scales


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    tensor = value.const_value
    assert tensor is not None
    return tensor


def _quantize_value(
    editor: Editor, value: ir.Value, code: ActivationCode, carried: frozenset[str]
) -> None:
    """Write Q/DQ behind a value, which keeps its name and its float type.

    Nodes that only move elements (those in ``carried``) or read lengths read the codes, all other
    readers the dequantized codes.
    """
    uses = list(value.uses())
    name = value.name or ""
    scale = _constant(editor, f"{name}_scale", np.asarray(code.scale, np.float32), None)
    zero = _constant(editor, f"{name}_zero_point", np.asarray(code.zero_point), code.dtype)
    added = []
    source = value
    if code.limits is not None:
        ends = [
            _constant(editor, f"{name}_{end}", np.asarray(limit, np.float32), None)
            for end, limit in zip(("low", "high"), code.limits, strict=True)
        ]
        clip = _node(editor, "Clip", [value, *ends], f"{name}_clipped", ir.DataType.FLOAT, value)
        added.append(clip)
        source = clip.outputs[0]
    inputs = [source, scale, zero]
    quantized = _node(editor, "QuantizeLinear", inputs, f"{name}_codes", code.dtype, value)
    added.append(quantized)
    insert_behind(editor.model.graph, value, added)
    _read_codes(editor, quantized.outputs[0], (scale, zero), uses, carried)
    if value.is_graph_output():
        _replace_output(editor, value, quantized.outputs[0], (scale, zero))


def _read_codes(
    editor: Editor,
    codes: ir.Value,
    parameters: tuple[ir.Value, ir.Value],
    uses: Sequence[tuple[ir.Node, int]],
    carried: frozenset[str],
) -> None:
    moves = [node for node, index in uses if index == 0 and node.name in carried]
    lengths = [(node, index) for node, index in uses if operator(node).family == "shape"]
    for node, index in lengths:  # the runtime would dequantize all codes for them
        node.replace_input_with(index, codes)
    other = [use for use in uses if use not in lengths]
    plain = [(node, index) for node, index in other if index != 0 or node.name not in carried]
    if plain:
        dequantized = _dequantized(editor, codes, parameters)
        for node, index in plain:
            node.replace_input_with(index, dequantized)
    for node in moves:
        readers = list(node.outputs[0].uses())
        node.replace_input_with(0, codes)
        mode = node.attributes.get_string("mode", "constant")
        if operator(node).moves == "padded" and mode == "constant":
            if len(node.inputs) < 3:
                node.resize_inputs(3)
            node.replace_input_with(2, parameters[1])
        moved = node.outputs[0]
        output = moved.is_graph_output()
        moved.type = codes.type
        moved.name = editor.free_name(f"{moved.name}_codes")
        _read_codes(editor, moved, parameters, readers, carried)
        if output:
            _replace_output(editor, moved, moved, parameters)


def _dequantized(
    editor: Editor, codes: ir.Value, parameters: tuple[ir.Value, ir.Value]
) -> ir.Value:
    name = (codes.name or "").removesuffix("_codes") + "_dequantized"
    node = _node(editor, "DequantizeLinear", [codes, *parameters], name, ir.DataType.FLOAT, codes)
    producer = codes.producer()
    assert producer is not None
    editor.model.graph.insert_after(producer, node)
    return node.outputs[0]


def _replace_output(
    editor: Editor, value: ir.Value, codes: ir.Value, parameters: tuple[ir.Value, ir.Value]
) -> None:
    """Make the dequantized codes a graph output, under its own name."""
    name = (value.name or "").removesuffix("_codes")
    if value is not codes:
        value.name = editor.free_name(f"{name}_float")
    result = _dequantized(editor, codes, parameters)
    result.name = name
    outputs = editor.model.graph.outputs
    for index, output in enumerate(outputs):
        if output is value:
            outputs[index] = result


def _node(
    editor: Editor,
    op_type: str,
    inputs: list[ir.Value],
    name: str,
    dtype: ir.DataType,
    like: ir.Value,
) -> ir.Node:
    name = editor.free_name(name)  # a file that holds codes already may have the name
    output = ir.Value(name=name, shape=like.shape, type=ir.TensorType(dtype))
    return ir.Node("", op_type, inputs, outputs=[output], name=f"{name}_node")


def _constant(editor: Editor, name: str, array: Array, dtype: ir.DataType | None) -> ir.Value:
    if dtype is not None:
        array = array.astype(dtype.numpy())
    return editor.initializer(name, ir.tensor(array, dtype=dtype))
