"""Questions and small edits that all rules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from compressor.graph.values import constant_array, is_op

Dim = int | ir.SymbolicDim
AttributeValue = int | float | str | Sequence[int]


def sole_reader(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads a value, if there is no other and it is no graph output."""
    uses = tuple(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node


def maker(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that writes a value if it is one of these operators."""
    node = None if value is None else value.producer()
    return node if is_op(node, *op_types) else None


def private_maker(value: ir.Value | None, reader: ir.Node, *op_types: str) -> ir.Node | None:
    """Like :func:`maker`, if besides nothing but ``reader``, in the same graph, reads the value."""
    node = maker(value, *op_types)
    if node is None or value is None or sole_reader(value) is not reader:
        return None
    return node if node.graph is reader.graph else None


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or ``None`` where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def scalar(value: ir.Value | None) -> float | None:
    """Return the number in a constant of one element."""
    array = constant_array(value)
    if array is None or array.size != 1 or array.dtype.kind in "OSU":
        return None
    return float(array.reshape(()))


def integers(value: ir.Value | None) -> list[int] | None:
    """Return the numbers in an integer constant."""
    array = constant_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return [int(i) for i in array.reshape(-1)]


def rank(value: ir.Value | None) -> int | None:
    """Return the number of axes, if known."""
    return None if value is None or value.shape is None else len(value.shape)


def axes_of(node: ir.Node, count: int | None) -> list[int] | None:
    """Return a node's axes, an input or (before opset 13 or 18) an attribute, as axes >= 0."""
    attribute = node.attributes.get_ints("axes", None)
    axes = list(attribute) if attribute is not None else integers(input_of(node, 1))
    return axes if axes is None else positive(axes, count)


def positive(axes: Sequence[int], count: int | None) -> list[int] | None:
    """Count negative axes from the front; ``None`` where the number of axes is not known."""
    if count is None:
        return list(axes) if all(a >= 0 for a in axes) else None
    return [a + count if a < 0 else a for a in axes]


def same_dim(first: Dim, second: Dim) -> bool:
    """Tell whether two lengths are surely equal: the same number or the same symbol."""
    if isinstance(first, int) or isinstance(second, int):
        return isinstance(first, int) and isinstance(second, int) and first == second
    return first.value is not None and first.value == second.value


def put(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, AttributeValue] | None = None,
) -> ir.Node:
    """Insert a new node before ``node`` and return it; its output has the same type."""
    made = ir.node(op_type, inputs, attributes)
    made.outputs[0].type = node.outputs[0].type
    node_graph(node).insert_before(node, made)
    return made


def replace(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, AttributeValue] | None = None,
) -> ir.Node:
    """Put a new node in place of ``node``; its output keeps the name, shape and readers."""
    made = ir.node(op_type, inputs, attributes)
    ir.convenience.replace_nodes_and_values(
        node_graph(node), node, [node], [made], [node.outputs[0]], [made.outputs[0]]
    )
    return made


def bypass(node: ir.Node, source: ir.Value) -> None:
    """Remove a node; ``source``, which nothing else reads, takes its output's place and name."""
    output = node.outputs[0]
    name = output.name
    ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
    if source.shape is None:
        source.shape = output.shape
    node_graph(node).remove(node, safe=True)
    source.name = name


def node_graph(node: ir.Node) -> ir.Graph:
    """Return the graph a node lies in."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is in no graph")
    return graph
