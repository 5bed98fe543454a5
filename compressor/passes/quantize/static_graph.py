"""Put integer weights, integer biases and Q/DQ of activations into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir
import torch

from compressor.graph.codes import attach_codes, write_out_zero_point
from compressor.graph.layers import layers_with_nodes
from compressor.graph.values import constant_array, value_by_name
from compressor.passes.quantize.bias import attach_bias_codes, least_weight_scale
from compressor.passes.quantize.placement import Placement, quantized_source
from compressor.passes.quantize.profiles import Profile
from compressor.passes.quantize.qdq import ActivationCode, insert_activation_codes
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, Scheme

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
