"""Integer biases: int32 codes at the scale of the integer kernel's accumulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.codes import attach_codes, write_out_zero_point
from compressor.graph.layers import layers_with_nodes
from compressor.graph.values import constant_array, value_by_name
from compressor.passes.quantize.static.placement import Placement, Profile, quantized_source
from compressor.passes.quantize.static.qdq import ActivationCode, insert_activation_codes
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, Scheme
from compressor.types.tensors import Array

_MOST = 2.0**30  # codes of a bias stay below, so that the accumulator does not overflow


def least_weight_scale(bias: ir.Value, input_scale: float) -> Callable[[], torch.Tensor]:
    """Return a function giving each row's least weight scale at which the bias fits int32.

    Args:
        bias: a float initializer ``[rows]``.
        input_scale: scale of the layer's input.

    Returns:
        A function that returns ``[rows, 1]``.
    """
    tensor = bias.const_value
    assert tensor is not None

    def least() -> torch.Tensor:
        size = np.abs(tensor.numpy().astype(np.float64)) / (input_scale * _MOST)
        return torch.from_numpy(size.astype(np.float32))[:, None]

    return least


def attach_bias_codes(
    graph: ir.Graph, bias: ir.Value, input_scale: float, weight: Callable[[], QuantizedTensor]
) -> ir.Value:
    """Replace a float bias by int32 codes and return the dequantized value.

    The bias' scale is the product of the input's and the weight's, as the integer product has it
    (Jacob et al. 2017, section 2.4).

    Args:
        graph: the graph; the bias must have no other reader.
        bias: a float initializer ``[rows]``.
        input_scale: scale of the layer's input.
        weight: the quantized weight.
    """
    name = bias.name or ""
    values = bias.const_value
    assert values is not None
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
    node = ir.Node(
        "",
        "DequantizeLinear",
        [coded, scales],
        attributes=[ir.AttrInt64("axis", 0)],
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


LeastScale: TypeAlias = "Callable[[], torch.Tensor] | None"
MakeCodes: TypeAlias = Callable[[Layer, LeastScale], Callable[[], QuantizedTensor]]
"""Returns what quantizes a layer's weight when it is called; the least scale of each row that the
layer's bias allows is ``[rows, 1]``, or ``None`` where any will do."""


@dataclass(frozen=True)
class StaticCodes:
    """How everything in a graph is quantized.

    Attributes:
        placement: which values and layers.
        schemes: of the layers' weights.
        activations: by value.
    """

    placement: Placement
    schemes: Mapping[str, Scheme]
    activations: Mapping[str, ActivationCode]


def write_static_codes(
    model: ir.Model, profile: Profile, codes: StaticCodes, make_codes: MakeCodes
) -> dict[str, Callable[[], QuantizedTensor]]:
    """Quantize a graph in place; weights are computed when they are first read.

    Args:
        model: the graph that the codes were found for.
        profile: the target's rules.
        codes: what is quantized, and how.
        make_codes: called once for each layer, in the order of execution.

    Returns:
        What computes each layer's weight, by the layer's name.
    """
    scales = _input_scales(model, codes)
    nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
    makers: dict[str, Callable[[], QuantizedTensor]] = {}
    for layer, value in codes.placement.layers:
        if layer.name in makers:
            continue
        node, scheme = nodes[layer.name], codes.schemes[layer.name]
        bias = own_bias(node) if profile.integer_bias else None
        least = None if bias is None else least_weight_scale(bias, scales[value])
        make = makers[layer.name] = make_codes(layer, least)
        stored = attach_codes(model, layer, scheme, make)
        if layer.kind in profile.explicit_zero and stored.zero_point is None:
            write_out_zero_point(model.graph, stored)
        if bias is not None:
            node.replace_input_with(2, attach_bias_codes(model.graph, bias, scales[value], make))
    insert_activation_codes(model, codes.placement, codes.activations)
    return makers


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
    values = value_by_name(model)
    placed = set(placement.values)
    found: dict[str, ir.Value] = {}
    for _, name in placement.layers:
        value: ir.Value | None = values[name]
        while value is not None and value.name not in placed and quantized_source(value) is None:
            node = value.producer()
            value = None if node is None else node.inputs[0]
        if value is not None:
            found[name] = value
    return found


def _input_scales(model: ir.Model, codes: StaticCodes) -> dict[str, float]:
    """Return the scale of each layer's input."""
    found: dict[str, float] = {}
    for name, value in input_sources(model, codes.placement).items():
        source = quantized_source(value)
        if source is None:
            found[name] = codes.activations[value.name or ""].scale
            continue
        known = constant_array(source.inputs[1])
        assert known is not None
        found[name] = float(known)
    return found
