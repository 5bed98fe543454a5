"""Shapes and types of values, as far as they can be inferred without weights."""

from __future__ import annotations

from typing import cast

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx.defs import OpSchema, SchemaError, get_schema

from compressor.graph.operators import operator
from compressor.graph.values import DEFAULT_DOMAINS, all_nodes, is_op

_CLASSICAL = "ai.onnx.ml"
_FLOATS = ("Scaler", "Normalizer")
_ALIKE = ("Imputer", "Binarizer")  # give the type that they take


def infer_shapes(model: ir.Model) -> None:
    """Run ONNX shape inference in place; weights are not read.

    What onnx leaves out is added: the operators of ai.onnx.ml that work element by element, and
    what a ``Loop`` carries from turn to turn, where each turn gives the shape that it takes.
    """
    _infer(model)
    seen: set[ir.Value] = set()
    while _carry_shapes(model, seen):
        _infer(model)
    for node in all_nodes(model.graph):
        if node.domain in DEFAULT_DOMAINS:
            _hold(node, model.opset_imports.get("", 1))
            _hold_states(node)


def _infer(model: ir.Model) -> None:
    while True:
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
        found = [node for node in all_nodes(model.graph) if _elementwise(node)]
        if not found:  # nothing behind can be known any more
            break


def _carry_shapes(model: ir.Model, seen: set[ir.Value]) -> bool:
    """Give values that loops carry the shapes of the first ones; return whether any has one.

    A shape that holds for the first turn, and for the next one if it holds for one, holds for all.
    Where a turn gives another one, all that was inferred of it is forgotten.

    Args:
        seen: values of bodies that were tried before; more are added.
    """
    tried = []
    for loop in all_nodes(model.graph):
        if not is_op(loop, "Loop"):
            continue
        body = loop.attributes["body"].as_graph()
        # Inputs: count, condition, carried; of the body a turn's number in place of the count.
        # Outputs: carried, and what each turn adds; of the body the condition before them.
        carried = zip(
            loop.inputs[2:], body.inputs[2:], body.outputs[1:], loop.outputs, strict=False
        )
        for first, taken, given, last in carried:
            known = first is not None and first.shape is not None
            if known and taken.shape is None and taken not in seen:
                tried.append((cast("ir.Value", first), taken, given, last))
    seen.update(taken for _, taken, _, _ in tried)
    unknown = _without_shape(model) if tried else []
    while tried:
        for first, taken, _, _ in tried:
            taken.shape = first.shape
        _infer(model)
        held = [each for each in tried if each[2].shape == each[1].shape]
        if len(held) == len(tried):
            break
        for value in unknown:
            value.shape = None
        tried = held
    for first, _, _, last in tried:
        last.shape = last.shape or first.shape
    return bool(tried)


def _without_shape(model: ir.Model) -> list[ir.Value]:
    graphs = (model.graph, *model.graph.subgraphs())
    values = (v for g in graphs for v in (*g.inputs, *(o for n in g for o in n.outputs)))
    return [value for value in values if value.shape is None]


def keeps_shape(node: ir.Node) -> bool:
    """Return whether a node is of ai.onnx.ml and gives the shape of its input."""
    return node.domain == _CLASSICAL and node.op_type in (*_FLOATS, *_ALIKE)


def _elementwise(node: ir.Node) -> bool:
    """Give the output of an operator the shape of its input; return whether it had none."""
    if not keeps_shape(node):
        return False
    source, output = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or output.shape is not None:
        return False
    output.shape = source.shape
    dtype = ir.DataType.FLOAT if node.op_type in _FLOATS else source.dtype
    if output.type is None and dtype is not None:
        output.type = ir.TensorType(dtype)
    return True


def _hold(node: ir.Node, opset: int) -> None:
    """Put inferred types of elements into the sequences and optional values that hold them.

    onnx_ir notes the inferred type of an element alone, as if each value were a tensor.
    """
    for place, output in enumerate(node.outputs):
        if isinstance(output.type, ir.TensorType):
            held = _held(node, place, opset)
            if held is not None and not isinstance(held, ir.TensorType):
                output.type = held


def _hold_states(node: ir.Node) -> None:
    """Give what a loop carries the type of the first one, if that holds tensors."""
    if not is_op(node, "Loop"):
        return
    body = node.attributes["body"].as_graph()
    carried = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
    for first, *later in carried:
        if first is not None and not isinstance(first.type, ir.TensorType | None):
            for value in later:
                value.type = first.type


def _held(node: ir.Node, place: int, opset: int) -> ir.TypeProtocol | None:
    """Return the type of a node's output if it holds tensors; ``None`` if it is one."""
    first = node.inputs[0].type if node.inputs and node.inputs[0] is not None else None
    if is_op(node, "If"):
        return node.attributes["then_branch"].as_graph().outputs[place].type
    if is_op(node, "Optional"):
        return None if first is None else ir.OptionalType(first)
    if is_op(node, "OptionalGetElement"):
        return first.elem_type if isinstance(first, ir.OptionalType) else first
    if operator(node).moves == "same":
        return first
    schema = _schema(node, opset)
    if schema is None or place >= len(schema.outputs):
        return None
    dtype = node.outputs[place].dtype
    if dtype and all(kind.startswith("seq(") for kind in schema.outputs[place].types):
        return ir.SequenceType(ir.TensorType(dtype))
    return None


def _schema(node: ir.Node, opset: int) -> OpSchema | None:
    try:
        return get_schema(node.op_type, opset, "")
    except SchemaError:
        return None
