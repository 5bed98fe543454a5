"""Helpers that read ONNX IR values and nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from compressor.graph.operators import Operator, operator
from compressor.types.tensors import Array, TensorSpec

DEFAULT_DOMAINS = ("", "ai.onnx")
INTEGER_CODES = frozenset(
    {
        ir.DataType.INT8,
        ir.DataType.UINT8,
        ir.DataType.INT4,
        ir.DataType.UINT4,
        ir.DataType.INT2,
        ir.DataType.UINT2,
    }
)
"""Element types that hold the codes of quantized weights, floats excluded."""
_OF_CODE = "of the code"  # in a value's ``meta``, which copies of a graph keep


def all_nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Yield every node in the order of execution, those of subgraphs included."""
    yield from ir.traversal.RecursiveGraphIterator(graph)


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of the default domain."""
    return node is not None and node.domain in DEFAULT_DOMAINS and node.op_type in op_types


def computes_scale(node: ir.Node | None) -> bool:
    """Return whether a node quantizes values by a scale that it computes from them."""
    return is_op(node, "DynamicQuantizeLinear")


def moved(node: ir.Node) -> ir.Value | None:
    """Return the input whose elements a node's output holds and no others, if there is one."""
    moves = operator(node).moves
    return node.inputs[0] if moves in ("same", "shape", "order", "some") else None


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or ``None`` where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def given_shape(node: ir.Node) -> ir.Value | None:
    """Return the input that gives the lengths of all axes of a node's output, if there is one."""
    if is_op(node, "Reshape"):
        return node.inputs[1]
    return node.inputs[0] if is_op(node, "ConstantOfShape") else None


def sole_reader(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads a value, if there is no other and it is no graph output."""
    uses = tuple(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node


def maker_behind(
    value: ir.Value | None,
    wanted: Callable[[Operator], bool],
    through: Callable[[ir.Node], ir.Value | None] = moved,
) -> ir.Node | None:
    """Follow a value back to the node that makes it.

    Args:
        wanted: whether a node with this row of the table is the one.
        through: returns the input to continue with at any other node, or ``None`` to stop.

    Returns:
        The node, or ``None`` if something else produces the value.
    """
    while value is not None:
        node = value.producer()
        if node is None or not node.inputs:
            return None
        if wanted(operator(node)):
            return node
        value = through(node)
    return None


def as_function(node: ir.Node, opset: int) -> onnx.FunctionProto:
    """Return a node as a function, which ONNX's reference implementation runs by itself.

    Its inputs are ``x0``, ``x1`` and so on, its outputs ``y0``, ``y1`` and so on.
    """
    proto = ir.to_proto(node)
    names = [f"x{i}" if value else "" for i, value in enumerate(node.inputs)]
    outputs = [f"y{i}" for i in range(len(node.outputs))]
    proto.input[:], proto.output[:] = names, outputs
    imported = [onnx.helper.make_opsetid(node.domain, opset)]
    inputs = [name for name in names if name]
    return onnx.helper.make_function(node.domain, "alone", inputs, outputs, [proto], imported)


def mark_of_code(value: ir.Value) -> None:
    """Note that an initializer is a constant of a module's code, which no training changes."""
    value.meta[_OF_CODE] = True


def is_of_code(value: ir.Value) -> bool:
    """Whether an initializer is known to be a constant of a module's code."""
    return _OF_CODE in value.meta


def is_stored(value: ir.Value) -> bool:
    """Whether a value is an initializer or a ``Constant`` node's output."""
    return value.is_initializer() or operator(value.producer()).family == "constant"


def origin(value: ir.Value, through: Callable[[ir.Node], bool]) -> ir.Value:
    """Follow a value back along the first inputs of nodes for which something holds."""
    while (node := value.producer()) is not None and through(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or ``Constant`` node's output."""
    if value is None:
        return None
    if value.const_value is not None and not value.is_graph_input():
        return value.const_value
    node = value.producer()
    if node is not None and operator(node).family == "constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    return None


def constant_array(value: ir.Value | None) -> Array | None:
    """Return a constant value as a numpy array."""
    tensor = constant_of(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """Return the shape if every axis has a known length."""
    if value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(d) for d in value.shape.numpy())


def dims(value: ir.Value, symbolic: int = 1) -> tuple[int, ...] | None:
    """Return the shape with dynamic axes set to ``symbolic``, or ``None`` for unknown rank."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else symbolic for d in value.shape)


def tensor_spec(value: ir.Value) -> TensorSpec:
    """Describe a graph input or output."""
    shape = () if value.shape is None else value.shape
    return TensorSpec(
        value.name or "",
        tuple(d if isinstance(d, int) else d.value for d in shape),
        "unknown" if value.dtype is None else value.dtype.numpy().name,
    )


def value_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Return all named values: inputs, initializers, and what nodes write."""
    values: dict[str, ir.Value] = {v.name: v for v in model.graph.inputs if v.name}
    values.update(model.graph.initializers)
    for node in all_nodes(model.graph):
        values.update({v.name: v for v in node.outputs if v.name})
    return values


def main_values(model: ir.Model) -> dict[str, ir.Value]:
    """Return the main graph's inputs and computed values by name, without those of branches."""
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    return {v.name: v for v in values if v.name and not v.is_initializer()}


def constant_attribute(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the numbers that a ``Constant`` node holds, or ``None`` if it holds something else."""
    (attribute,) = node.attributes.values()
    match attribute.type:
        case ir.AttributeType.TENSOR:
            return attribute.as_tensor()
        case ir.AttributeType.INT | ir.AttributeType.INTS:
            return ir.tensor(np.asarray(attribute.value, dtype=np.int64))
        case ir.AttributeType.FLOAT | ir.AttributeType.FLOATS:
            return ir.tensor(np.asarray(attribute.value, dtype=np.float32))
    return None
