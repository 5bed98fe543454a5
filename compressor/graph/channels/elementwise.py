"""Channels through operators that compute each element by itself."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import depends_on
from compressor.graph.values import is_op

ACTIVATIONS = (
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Elu",
    "Selu",
    "Celu",
    "Gelu",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Swish",
    "Softplus",
    "Softsign",
    "ThresholdedRelu",
    "Tanh",
    "Clip",
    "Erf",
)
UNARY = (
    *(name for name in ACTIVATIONS if name != "PRelu"),
    *("Abs", "Neg", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Tan", "Asin", "Acos"),
    *("Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Ceil", "Floor", "Round", "Sign"),
    *("Not", "IsNaN", "IsInf", "Cast", "CastLike", "Identity", "Dropout", "Shrink", "BitwiseNot"),
)
BINARY = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Mean", "Sum", "Where", "PRelu"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"),
    *("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
)


def unary(flow: Flow, node: ir.Node) -> None:
    """Keep the channels of the first input; all others are single numbers."""
    found = flow.labels(node.inputs[0])
    for output in node.outputs:
        flow.put(output, found)
    _observe(flow, node)


def quantized(flow: Flow, node: ir.Node) -> None:
    """``QuantizeLinear`` and its like: what they hold stays whole."""
    flow.put(node.outputs[0], flow.labels(node.inputs[0]))
    flow.freeze_values(node.inputs, node, "holds quantized numbers")


def binary(flow: Flow, node: ir.Node) -> None:
    """Unify the channels of all inputs where they meet."""
    output = node.outputs[0]
    shape = flow.shape(output)
    inputs = [v for v in node.inputs if v is not None]
    if shape is None or any(flow.shape(v) is None for v in inputs):
        flow.freeze_node(node, UNKNOWN)
        return
    if is_op(node, "PRelu"):  # the slope is not broadcast from behind, but made to fit the input
        shape = flow.shape(node.inputs[0]) or shape
    flow.put(output, flow.broadcast(node, inputs, shape))
    _observe(flow, node)


def _observe(flow: Flow, node: ir.Node) -> None:
    if not is_op(node, *ACTIVATIONS):
        return
    output = node.outputs[0]
    for family in flow.labels(output):
        axes = [axis for axis in range(family.ndim) if depends_on(family, axis)]
        if len(axes) == 1:
            flow.observe(output, axes[0])
