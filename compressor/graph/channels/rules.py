"""Channels through operators that compute each element by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from compressor.graph.channels import normalizing, picking, products, views
from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import depends_on
from compressor.graph.operators import Family, operator
from compressor.graph.values import is_op


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
    if not operator(node).activation:
        return
    output = node.outputs[0]
    for family in flow.labels(output):
        axes = [axis for axis in range(family.ndim) if depends_on(family, axis)]
        if len(axes) == 1:
            flow.observe(output, axes[0])


Rule: TypeAlias = Callable[[Flow, ir.Node], None]

FAMILIES: Mapping[Family, Rule] = {
    "unary": unary,
    "cast-like": unary,
    "binary": binary,
    "quantization": quantized,
    "reduction": normalizing.reduction,
    "spatial": views.spatial,
    "channel-norm": normalizing.per_channel,
    "group-norm": normalizing.group_norm,
    "layer-norm": normalizing.layer_norm,
    "softmax": normalizing.softmax,
    "reshape": views.reshape,
    "concat": picking.concat,
    "shape": views.nothing,
    "source": views.nothing,
    "constant": views.constant,
}
RULES: Mapping[str, Rule] = {
    "Conv": products.convolution,
    "ConvTranspose": products.transposed_convolution,
    "Gemm": products.gemm,
    "MatMul": products.matmul,
    "CumSum": normalizing.cumulative,
    "Einsum": products.einsum,
    "Transpose": views.transpose,
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
"""By operator, where the family has no rule."""
_ALL: frozenset[Family] = frozenset(
    {
        *("binary", "product", "concat", "cast-like", "shape", "source"),
        *("channel-norm", "group-norm", "layer-norm"),
    }
)
"""Families whose rules look at all inputs."""


def rule_of(node: ir.Node) -> Rule | None:
    """Return the rule for a node; ``None`` where it is not understood."""
    row = operator(node)
    return FAMILIES.get(row.family) or RULES.get(row.name)


def settings_of(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs that a node's rule does not look at: bounds, indices, numbers."""
    row = operator(node)
    return () if row.family in _ALL else node.inputs[1:]
