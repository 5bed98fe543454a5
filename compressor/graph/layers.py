"""Find the layers of an ONNX IR graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from compressor.graph.values import all_nodes, is_op, static_shape
from compressor.types.layers import Layer, LayerKind

_KINDS: Mapping[str, tuple[LayerKind, int]] = {
    "Conv": ("Conv", 1),
    "ConvInteger": ("Conv", 1),
    "ConvTranspose": ("ConvTranspose", 1),
    "Gemm": ("Gemm", 1),
    "MatMul": ("MatMul", 1),
    "MatMulInteger": ("MatMul", 1),
    "Gather": ("Gather", 0),
}
"""Operators that read a weight: the kind of layer, and which input the weight is."""
_VIEWS = {"DequantizeLinear", "QuantizeLinear", "Cast", "Identity"}


def weight_source(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """Follow a weight back to its initializer, through Q/DQ, casts and transposes.

    Returns:
        The initializer (``None`` if the value is computed from an input) and whether its last
        two axes are swapped on the way.
    """
    swapped = False
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or not node.inputs:
            return None, swapped
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm", None)
            if perm is not None and list(perm) != [1, 0]:
                return None, swapped
            swapped = not swapped
        elif node.op_type not in _VIEWS:
            return None, swapped
        value = node.inputs[0]
    return value, swapped


def layer_name(weight: str) -> str:
    """Return the layer's name for a parameter's name."""
    return weight.removesuffix(".weight")


def layer_of(node: ir.Node) -> Layer | None:
    """Describe a node as a layer, or return ``None`` if no constant weight is multiplied there."""
    kind, index = _KINDS.get(node.op_type, (None, 0))
    if kind is None or node.domain not in ("", "ai.onnx") or len(node.inputs) <= index:
        return None
    source, swapped = weight_source(node.inputs[index])
    if source is None or source.name is None or source.dtype is None:
        return None
    shape = static_shape(source)
    if shape is None or len(shape) < 2 or (kind == "MatMul" and len(shape) != 2):
        return None
    if node.op_type == "Gather" and (len(shape) != 2 or not source.dtype.is_floating_point()):
        return None
    integer = node.op_type.endswith("Integer")  # its third input is a zero point
    bias = node.inputs[2] if len(node.inputs) > 2 and not integer else None
    bias_source, _ = weight_source(bias)
    return Layer(
        name=layer_name(source.name),
        kind=kind,
        weight=source.name,
        shape=shape,
        dtype=source.dtype.numpy().name,
        transposed=_is_transposed(node, swapped),
        groups=node.attributes.get_int("group", 1),
        bias=None if bias_source is None else bias_source.name,
        inputs=tuple(
            v.name or "" for i, v in enumerate(node.inputs) if v is not None and i != index
        ),
        output=(_rescaled(node.outputs[0]) if integer else node.outputs[0]).name or "",
    )


def _is_transposed(node: ir.Node, swapped: bool) -> bool:
    if node.op_type in ("MatMul", "MatMulInteger"):
        return not swapped
    if node.op_type == "Gemm":
        return (node.attributes.get_int("transB", 0) == 0) != swapped
    return False


def _rescaled(value: ir.Value) -> ir.Value:
    """Follow an integer product to the float value that its scales and bias make of it."""
    uses = list(value.uses())
    while len(uses) == 1 and is_op(uses[0].node, "Cast", "Mul", "Add"):
        node = uses[0].node
        if node.op_type == "Add" and not any(
            v.is_initializer() for v in node.inputs if v is not None
        ):
            break
        value = node.outputs[0]
        uses = list(value.uses()) if node.op_type != "Add" else []
    return value


def layers_with_nodes(model: ir.Model) -> Iterator[tuple[Layer, ir.Node]]:
    """Yield every layer and its node in the order of execution, subgraphs included."""
    for node in all_nodes(model.graph):
        layer = layer_of(node)
        if layer is not None:
            yield layer, node


def graph_layers(model: ir.Model) -> tuple[Layer, ...]:
    """Return the layers, each weight once (a shared weight belongs to its first reader)."""
    seen: dict[str, Layer] = {}
    for layer, _ in layers_with_nodes(model):
        seen.setdefault(layer.weight, layer)
    return tuple(seen.values())


def side_tensors(value: ir.Value) -> list[str]:
    """Return the names of the scales and zero points that an initializer is read with."""
    return [
        v.name
        for use in value.uses()
        if use.node.op_type == "DequantizeLinear" and use.idx == 0
        for v in use.node.inputs[1:]
        if v is not None and v.is_initializer() and v.name
    ]
