"""Branches of ``If`` and bodies of loops: what holds in them and not elsewhere."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.editing import Editor
from compressor.graph.inference import infer_shapes
from compressor.graph.values import all_nodes, is_op

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
