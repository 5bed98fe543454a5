"""Shapes and types of values, as far as they can be inferred without weights."""

from __future__ import annotations

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

    What onnx leaves out is added: the operators of ai.onnx.ml that work element by element.
    """
    while True:
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
        found = [node for node in all_nodes(model.graph) if _elementwise(node)]
        if not found:  # nothing behind can be known any more
            break
    for node in all_nodes(model.graph):
        if node.domain in DEFAULT_DOMAINS:
            _hold(node, model.opset_imports.get("", 1))


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
