"""Names for messages: which layer a node of the graph belongs to."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.layers import layers_with_nodes

_WRAPPING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast", "Transpose")


class Owners:
    """Tells which layer a node is of: the layer's own, or what brings it its inputs.

    Args:
        model: the graph.
    """

    def __init__(self, model: ir.Model):
        self._layers: dict[ir.Node, str] = {}
        for layer, node in layers_with_nodes(model):
            self._layers.setdefault(node, layer.name)
            for value in node.inputs:
                self._claim(value, layer.name)

    def subject(self, node: ir.Node) -> str:
        """Return ``layer 'fc'``; for a node of no layer its constant, or its name and operator."""
        layer = self._layers.get(node)
        if layer is not None:
            return f"layer {layer!r}"
        first = node.inputs[0] if node.inputs else None
        if node.op_type in _WRAPPING and first is not None and first.is_initializer():
            return f"tensor {first.name!r}"
        return f"node {node.name!r} ({node.op_type})" if node.name else f"a {node.op_type} node"

    def _claim(self, value: ir.Value | None, layer: str) -> None:
        """Give a layer what wraps an input of its, or computes its weight from constants."""
        node = None if value is None else value.producer()
        if node is None or node in self._layers:
            return
        if node.op_type not in _WRAPPING and not _is_constant(node):
            return
        self._layers[node] = layer
        for inner in node.inputs:
            self._claim(inner, layer)


def _is_constant(node: ir.Node) -> bool:
    """Tell whether a node computes something of initializers alone."""
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if maker is None or not _is_constant(maker):
            return False
    return True
