"""How large an index each of a graph's inputs may hold: token ids pick rows of an embedding."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import all_nodes, is_op, static_shape

_PASSED_ON = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")


def index_limits(model: ir.Model) -> dict[str, int]:
    """Return for each input that picks rows of a table how many rows there are.

    Only tables whose number of rows is known, and inputs that reach ``Gather`` as they are,
    count; of several tables the smallest.
    """
    inputs = {value.name for value in model.graph.inputs if value.name}
    limits: dict[str, int] = {}
    for node in all_nodes(model.graph):
        if not is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
            continue
        table, indices = node.inputs[0], _origin(node.inputs[1])
        shape = None if table is None else static_shape(table)
        name = None if indices is None else indices.name
        if shape and len(shape) > 1 and name in inputs:
            limits[name] = min(limits.get(name, shape[0]), shape[0])
    return limits


def _origin(value: ir.Value | None) -> ir.Value | None:
    """Go back over nodes that leave the elements as they are."""
    while value is not None:
        node = value.producer()
        if node is None or not is_op(node, *_PASSED_ON):
            break
        value = node.inputs[0]
    return value
