"""Transpositions of float16 values in front of products, as ONNX Runtime can open them."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.editing import Chain, Editor
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes

_FEWEST_AXES = 3  # of two, a product reads them in either order


def transpose_as_floats(model: ir.Model) -> bool:
    """Let products read such transpositions through float32, in place; return whether any do.

    ONNX Runtime (1.31) computes products of float16 in float32 on the CPU. It exchanges the cast
    that it inserts with a ``Transpose`` in front, and merges that with the product if the first
    axis becomes one of the last two. If the product's other side is constant, the process then
    ends with a segmentation fault. Between two casts, the ``Transpose`` stays where it is.
    """
    editor: Editor | None = None
    for node in list(all_nodes(model.graph)):
        readers = _products(node) if _moves_first_axis(node) else []
        if not readers:
            continue
        editor = editor or Editor(model)
        chain = Chain(editor, node.outputs[0].name or "")
        wide = {"to": ir.DataType.FLOAT}
        value = chain.add("Cast", [node.inputs[0]], "_wide", attributes=wide)
        order = {"perm": node.attributes.get_ints("perm", ())}
        turned = chain.add("Transpose", [value], "_turned", attributes=order)
        half = ir.DataType.FLOAT16
        value = chain.add("Cast", [turned], "_half", half, {"to": half})
        turned.shape = value.shape = node.outputs[0].shape
        assert node.graph is not None
        node.graph.insert_after(node, chain.nodes)
        for reader in readers:
            given = reader.inputs[0]
            floats = given is not None and given.dtype == ir.DataType.FLOAT
            reader.replace_input_with(0, turned if floats else value)
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            node.graph.remove(node, safe=True)
    return editor is not None


def _moves_first_axis(node: ir.Node) -> bool:
    """Return whether a node transposes float16 so that the first axis is one of the last two."""
    if operator(node).moves != "order" or node.outputs[0].dtype != ir.DataType.FLOAT16:
        return False
    order = list(node.attributes.get_ints("perm", ()))
    if len(order) < _FEWEST_AXES or 0 not in order[-2:]:
        return False
    order.remove(0)
    return order == sorted(order)


def _products(node: ir.Node) -> list[ir.Node]:
    """Return the products whose first side is a node's output, also behind casts of it."""
    found, values = [], [node.outputs[0]]
    while values:
        for reader, place in values.pop().uses():
            row = operator(reader)
            if row.moves == "type":
                values.append(reader.outputs[0])
            elif row.is_matmul and place == 0:
                found.append(reader)
    return found
