"""Write QuantizeLinear and DequantizeLinear into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import value_by_name
from compressor.passes.quantize.static.placement import Placement
from compressor.types.tensors import Array


@dataclass(frozen=True)
class ActivationCode:
    """How one activation is quantized.

    Attributes:
        scale: step between codes.
        zero_point: code of zero.
        dtype: type of the codes.
        limits: for codes narrower than their type: least and greatest value that is represented.
            Runtimes have kernels for 8-bit activations only, so 4-bit ones are clipped to 16
            values and kept in bytes.
    """

    scale: float
    zero_point: int
    dtype: ir.DataType
    limits: tuple[float, float] | None = None


def insert_activation_codes(
    model: ir.Model, placement: Placement, codes: Mapping[str, ActivationCode]
) -> None:
    """Quantize the placed values, in place.

    The value itself keeps its name and its float type. All readers get the dequantized codes,
    except nodes that only move elements: they get the codes.

    Args:
        model: the graph.
        placement: which values.
        codes: how each is quantized, by the value's name.
    """
    values = value_by_name(model)
    for name in placement.values:
        _quantize_value(model.graph, values[name], codes[name], placement.carried)


def _quantize_value(
    graph: ir.Graph, value: ir.Value, code: ActivationCode, carried: frozenset[str]
) -> None:
    uses = list(value.uses())
    name = value.name or ""
    scale = _constant(graph, f"{name}_scale", np.asarray(code.scale, np.float32), None)
    zero = _constant(graph, f"{name}_zero_point", np.asarray(code.zero_point), code.dtype)
    added = []
    source = value
    if code.limits is not None:
        ends = [
            _constant(graph, f"{name}_{end}", np.asarray(limit, np.float32), None)
            for end, limit in zip(("low", "high"), code.limits, strict=True)
        ]
        clip = _node("Clip", [value, *ends], f"{name}_clipped", ir.DataType.FLOAT, value)
        added.append(clip)
        source = clip.outputs[0]
    quantized = _node("QuantizeLinear", [source, scale, zero], f"{name}_codes", code.dtype, value)
    added.append(quantized)
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], added)
    else:
        graph.insert_after(producer, added)
    _read_codes(graph, quantized.outputs[0], (scale, zero), uses, carried)
    if value.is_graph_output():
        _replace_output(graph, value, quantized.outputs[0], (scale, zero))


def _read_codes(
    graph: ir.Graph,
    codes: ir.Value,
    parameters: tuple[ir.Value, ir.Value],
    uses: Sequence[tuple[ir.Node, int]],
    carried: frozenset[str],
) -> None:
    """Let the readers of a float value read its codes."""
    moves = [node for node, index in uses if index == 0 and node.name in carried]
    plain = [(node, index) for node, index in uses if index != 0 or node.name not in carried]
    if plain:
        dequantized = _dequantized(graph, codes, parameters)
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
        moved.name = f"{moved.name}_codes"
        _read_codes(graph, moved, parameters, readers, carried)
        if output:
            _replace_output(graph, moved, moved, parameters)


def _dequantized(
    graph: ir.Graph, codes: ir.Value, parameters: tuple[ir.Value, ir.Value]
) -> ir.Value:
    name = (codes.name or "").removesuffix("_codes") + "_dequantized"
    node = _node("DequantizeLinear", [codes, *parameters], name, ir.DataType.FLOAT, codes)
    producer = codes.producer()
    assert producer is not None
    graph.insert_after(producer, node)
    return node.outputs[0]


def _replace_output(
    graph: ir.Graph, value: ir.Value, codes: ir.Value, parameters: tuple[ir.Value, ir.Value]
) -> None:
    """Let a graph output be the dequantized codes, under its own name."""
    name = (value.name or "").removesuffix("_codes")
    if value is not codes:
        value.name = f"{name}_float"
    result = _dequantized(graph, codes, parameters)
    result.name = name
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = result


def _node(
    op_type: str, inputs: list[ir.Value], name: str, dtype: ir.DataType, like: ir.Value
) -> ir.Node:
    output = ir.Value(name=name, shape=like.shape, type=ir.TensorType(dtype))
    return ir.Node("", op_type, inputs, outputs=[output], name=f"{name}_node")


def _constant(graph: ir.Graph, name: str, array: Array, dtype: ir.DataType | None) -> ir.Value:
    if dtype is not None:
        array = array.astype(dtype.numpy())
    tensor = ir.tensor(array, name=name, dtype=dtype)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
