"""Channels through operators that compute each element by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from compressor.graph.channels import normalizing, picking, products, views
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
    """Keep the channels of the first input; the other inputs are single numbers."""
    families = flow.labels(node.inputs[0])
    for output in node.outputs:
        flow.put(output, families)
    _observe(flow, node)


def quantized(flow: Flow, node: ir.Node) -> None:
    """``QuantizeLinear`` and the like: their channels cannot be removed."""
    flow.put(node.outputs[0], flow.labels(node.inputs[0]))
    flow.freeze_values(node.inputs, node, "holds quantized numbers")


def binary(flow: Flow, node: ir.Node) -> None:
    """Unite the channels of all inputs where they meet."""
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


Rule: TypeAlias = Callable[[Flow, ir.Node], None]

_REDUCTIONS = (
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "ArgMax", "ArgMin"),
)
_SPATIAL = (
    *("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"),
    *("Resize", "Upsample", "GridSample"),
)
_INDIFFERENT = (*("Shape", "Size", "Range", "RandomNormal", "RandomUniform"),)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BINARY, binary),
    "QuantizeLinear": quantized,
    "DequantizeLinear": quantized,
    "Conv": products.convolution,
    "ConvTranspose": products.transposed_convolution,
    "Gemm": products.gemm,
    "MatMul": products.matmul,
    "BatchNormalization": normalizing.per_channel,
    "InstanceNormalization": normalizing.per_channel,
    "GroupNormalization": normalizing.group_norm,
    "LayerNormalization": normalizing.layer_norm,
    "RMSNormalization": normalizing.layer_norm,
    "SimplifiedLayerNormalization": normalizing.layer_norm,
    "Softmax": normalizing.softmax,
    "LogSoftmax": normalizing.softmax,
    "Hardmax": normalizing.softmax,
    "LpNormalization": normalizing.softmax,
    "CumSum": normalizing.cumulative,
    **dict.fromkeys(_REDUCTIONS, normalizing.reduction),
    **dict.fromkeys(_SPATIAL, views.spatial),
    **dict.fromkeys(_INDIFFERENT, views.nothing),
    "Constant": views.constant,
    "Einsum": products.einsum,
    "Reshape": views.reshape,
    "Flatten": views.reshape,
    "Squeeze": views.reshape,
    "Unsqueeze": views.reshape,
    "Transpose": views.transpose,
    "Concat": picking.concat,
    "Split": picking.split,
    "Slice": picking.cut,
    "Gather": picking.gather,
    "GatherND": picking.gather_nd,
    "Pad": picking.pad,
    "Expand": views.expand,
    "ConstantOfShape": views.constant_of_shape,
    "Tile": views.tile,
    "DepthToSpace": views.depth_to_space,
    "SpaceToDepth": views.space_to_depth,
}
"""By operator of ONNX's own domain."""


_ALL = (
    *(*BINARY, "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Concat"),
    *("BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization"),
    *("RMSNormalization", "SimplifiedLayerNormalization", "CastLike", *_INDIFFERENT),
)


def rule_of(node: ir.Node) -> Rule | None:
    """Return the rule for a node, or ``None`` if there is none."""
    return RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def settings_of(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs that a node's rule ignores: bounds, indices, numbers."""
    return () if node.op_type in _ALL else node.inputs[1:]
