"""Which rule says what an operator does to channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from compressor.graph.channels import einsum, elementwise, normalizing, picking, products, views
from compressor.graph.channels.flow import Flow

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
    **dict.fromkeys(elementwise.UNARY, elementwise.unary),
    **dict.fromkeys(elementwise.BINARY, elementwise.binary),
    "QuantizeLinear": elementwise.quantized,
    "DequantizeLinear": elementwise.quantized,
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
    "Einsum": einsum.einsum,
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
    *(*elementwise.BINARY, "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Concat"),
    *("BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization"),
    *("RMSNormalization", "SimplifiedLayerNormalization", "CastLike", *_INDIFFERENT),
)


def rule_of(node: ir.Node) -> Rule | None:
    """Return the rule for a node; ``None`` where it is not understood."""
    return RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None


def settings_of(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs that a node's rule does not look at: bounds, indices, numbers."""
    return () if node.op_type in _ALL else node.inputs[1:]
