"""Count parameters, bytes and multiply-accumulates of an ONNX IR graph."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from compressor.graph.layers import layer_of, looked_up, weight_source
from compressor.graph.values import INTEGER_CODES, all_nodes, dims, is_op, static_shape

_PRODUCTS = ("Conv", "ConvInteger", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger")


def initializer_bytes(model: ir.Model) -> int:
    """Bytes of all initializers as stored (codes narrower than a byte are packed)."""
    return sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )


def parameters(model: ir.Model) -> int:
    """Number of weights: elements of initializers that are floating point or quantized codes.

    Scales, zero points and tables of codes are not counted, nor are integer constants such as
    shapes, single numbers, and the running statistics of batch-norm, which nobody trained.
    """
    side = _quantization_parameters(model) | _running_statistics(model)
    packed = _packed(model)
    total = 0
    for name, value in model.graph.initializers.items():
        shape = static_shape(value)
        if name in side or not shape or value.dtype is None:
            continue
        if name in packed:
            total += packed[name]
        elif value.dtype.is_floating_point() or _is_codes(value):
            total += prod(shape)
    return total


def node_macs(node: ir.Node) -> int:
    """Multiply-accumulates of one node for one sample; 0 where shapes are not known.

    Dynamic axes count as 1. Convolutions and matrix products are counted, as is usual.
    """
    if node.op_type == "MatMulNBits":
        given = None if node.inputs[0] is None else dims(node.inputs[0])
        return 0 if given is None else prod(given) * node.attributes.get_int("N", 0)
    if node.op_type not in _PRODUCTS or not node.outputs:
        return 0
    output = dims(node.outputs[0])
    if output is None:
        return 0
    if node.op_type == "ConvTranspose":
        source, _ = weight_source(node.inputs[1])
        entry = None if node.inputs[0] is None else dims(node.inputs[0])
        weight = None if source is None else static_shape(source)
        return 0 if entry is None or weight is None else prod(entry) * prod(weight[1:])
    layer = layer_of(node)
    if layer is not None:
        return prod(output) * layer.columns
    if node.op_type == "Conv":  # of a weight that the graph computes
        weight = None if node.inputs[1] is None else dims(node.inputs[1])
        return 0 if weight is None else prod(output) * prod(weight[1:])
    first = None if node.inputs[0] is None else dims(node.inputs[0])
    return 0 if not first else prod(output) * first[-1]


def macs(model: ir.Model) -> int:
    """Multiply-accumulates of the whole graph for one sample."""
    return sum(node_macs(node) for node in all_nodes(model.graph))


def _is_codes(value: ir.Value) -> bool:
    """Tell codes of a parameter from other integers.

    They are dequantized, or they are a byte at most and a matrix at least.
    """
    dequantized = any(is_op(u.node, "DequantizeLinear") and u.idx == 0 for u in value.uses())
    narrow = value.dtype in INTEGER_CODES and value.shape is not None and len(value.shape) >= 2
    return dequantized or narrow


def _packed(model: ir.Model) -> dict[str, int]:
    """Return how many weights an initializer holds whose elements hold several each."""
    found: dict[str, int] = {}
    for node in all_nodes(model.graph):
        if node.op_type == "MatMulNBits" and len(node.inputs) > 1 and node.inputs[1] is not None:
            count = node.attributes.get_int("N", 0) * node.attributes.get_int("K", 0)
            found[node.inputs[1].name or ""] = count
            continue
        codes = looked_up(node)
        table = node.inputs[0] if codes is not None else None
        if codes is not None and table is not None:
            each = prod((static_shape(table) or ())[1:])
            found[codes.name or ""] = prod(static_shape(codes) or ()) * each
    return found


def _running_statistics(model: ir.Model) -> set[str]:
    norms = (n for n in all_nodes(model.graph) if is_op(n, "BatchNormalization"))
    return {v.name for node in norms for v in node.inputs[3:] if v is not None and v.name}


def _quantization_parameters(model: ir.Model) -> set[str]:
    known = model.graph.initializers
    names = {f"{name}{end}" for name in known for end in ("_scale", "_zero_point")} & set(known)
    for node in all_nodes(model.graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            names.update(v.name for v in node.inputs[1:] if v is not None and v.name)
        elif looked_up(node) is not None and node.inputs[0] is not None:
            names.add(node.inputs[0].name or "")
    return names
