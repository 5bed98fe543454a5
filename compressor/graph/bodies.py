"""Branches of ``If`` and bodies of loops: what holds in them and not elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from compressor.graph.editing import Editor
from compressor.graph.inference import infer_shapes
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_array, input_of, is_op, origin

_STATES = 2  # inputs of a body in front: the number of the turn, and whether it is taken
_RESULTS = 1  # outputs in front: whether another turn follows


def settle_constants(model: ir.Model, limit: int) -> None:
    """Give bodies nodes for the constants that have to lie in them, in place.

    These are axes and lengths, since onnx infers shapes in a body without values from outside, and
    what it returns, of which it makes a copy.

    Args:
        limit: elements of the longest axes and lengths.
    """
    bodies = list(model.graph.subgraphs())
    editor = Editor(model) if bodies else None
    for body in bodies:
        assert editor is not None
        made: dict[ir.Value, ir.Node] = {}
        for node in body:
            for index, value in enumerate(node.inputs):
                if value is not None and _is_short(value, limit):
                    if value not in made:
                        made[value] = _constant(editor, value)
                    node.replace_input_with(index, made[value].outputs[0])
        if made:
            body.insert_before(body[0], list(made.values()))
        for index, value in enumerate(body.outputs):
            if value.is_initializer() and not value.is_graph_input():
                node = editor.node("Identity", [value], f"{value.name}_copy", value.dtype)
                node.outputs[0].shape = value.shape
                body.append(node)
                body.outputs[index] = node.outputs[0]
        for value in made:
            if not value.uses() and value.graph is not None and not value.is_graph_output():
                del value.graph.initializers[value.name or ""]


def _is_short(value: ir.Value, limit: int) -> bool:
    tensor = value.const_value if value.is_initializer() and not value.is_graph_input() else None
    if tensor is None or isinstance(tensor, ir.LazyTensor):
        return False
    return tensor.dtype == ir.DataType.INT64 and tensor.size <= limit


def _constant(editor: Editor, value: ir.Value) -> ir.Node:
    node = editor.node("Constant", [], f"{value.name}_inside", value.dtype)
    assert value.const_value is not None
    node.attributes["value"] = ir.AttrTensor("value", value.const_value)
    node.outputs[0].shape = value.shape
    return node


def free_states(model: ir.Model) -> None:
    """Forget lengths of a loop's states that a turn changes, in place.

    Exporters note the shape that a state has at first, such as that of a list with nothing in it,
    and what is computed of that holds for the first turn alone.
    """
    loops = [node for node in all_nodes(model.graph) if is_op(node, "Loop")]
    if loops:
        infer_shapes(model)
    for loop in loops:
        body = loop.attributes["body"].as_graph()
        for before, after in zip(body.inputs[_STATES:], body.outputs[_RESULTS:], strict=False):
            if before.shape is None:
                continue
            lengths = None if after.shape is None else after.shape.dims
            if lengths is None or len(lengths) != len(before.shape.dims):
                before.shape = None
                continue
            before.shape = ir.Shape(
                [n if n == m else None for n, m in zip(before.shape.dims, lengths, strict=True)]
            )


def in_turns(graph: ir.Graph, turns: int = 1) -> Iterator[tuple[ir.Node, int]]:
    """Yield every node with how often it is computed, those of subgraphs included.

    All branches count, and a loop whose turns are not known is taken to have one.

    Args:
        turns: how often the graph itself is computed.
    """
    for node in graph:
        yield node, turns
        inner = turns_of(node)
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from in_turns(attribute.as_graph(), turns * (1 if inner is None else inner))


def turns_of(node: ir.Node) -> int | None:
    """Return how often a node computes its subgraphs; ``None`` where values decide it."""
    if is_op(node, "Scan"):
        ends = node.attributes.get_ints("scan_input_axes", (0,))
        shape = None if node.inputs[-1] is None else node.inputs[-1].shape
        length = None if shape is None else shape[ends[-1]]
        return length if isinstance(length, int) else None
    if not is_op(node, "Loop"):
        return 1
    body = node.attributes["body"].as_graph()
    goes_on = origin(body.outputs[0], lambda maker: operator(maker).moves == "same")
    count, first = constant_array(node.inputs[0]), input_of(node, 1)
    follows = [first] if goes_on is body.inputs[1] else [first, goes_on]
    if count is None or not all(v is None or _is_true(v) for v in follows):
        return None
    return max(int(count.reshape(())), 0)


def _is_true(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and bool(array.all())
