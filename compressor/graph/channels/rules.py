"""The rule of each operator, and those of elementwise operators, normalizations and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from compressor.graph.channels import picking, products, recurrences, views
from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import Family as Labels
from compressor.graph.channels.labels import along, depends_on, reshaped
from compressor.graph.operators import Family, operator
from compressor.graph.values import input_of, is_op, origin
from compressor.types.channels import Role, Units
from compressor.types.layers import RECURRENT

_STATISTICS: tuple[Role, ...] = ("norm-scale", "norm-shift", "norm-mean", "norm-variance")

_ADDING = ("+", "-")


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
    if operator(node).arithmetic in _ADDING:
        for value in inputs:
            stored = origin(value, lambda n: bool(operator(n).moves))
            for axis in range(len(flow.shape(stored) or ())):
                flow.role(stored, axis, "bias")
    _observe(flow, node)


def _observe(flow: Flow, node: ir.Node) -> None:
    if not operator(node).activation:
        return
    output = node.outputs[0]
    for family in flow.labels(output):
        axes = [axis for axis in range(family.ndim) if depends_on(family, axis)]
        if len(axes) == 1:
            flow.observe(output, axes[0])


def per_channel(flow: Flow, node: ir.Node) -> None:
    """``BatchNormalization`` and ``InstanceNormalization``: parameters for each channel."""
    if is_op(node, "InstanceNormalization"):
        families = flow.labels(node.inputs[0])
        rank = len(flow.shape(node.inputs[0]) or ())
        flow.mix_over(families, range(2, rank), node)
    channels = _channels(flow, node)
    for value, role in zip(node.inputs[1:], _STATISTICS, strict=False):
        parameter = flow.on_axis(value, 0)
        if channels is not None and parameter is not None:
            flow.unify(channels, along(parameter, 0), node)
            flow.role(value, 0, role)
        elif parameter is not None:
            flow.freeze([parameter], node, "scales values that no layer computes")
        elif channels is not None:
            flow.freeze([channels], node, f"meets {value.name if value else ''!r}")
    _keep(flow, node)


def group_norm(flow: Flow, node: ir.Node) -> None:
    """``GroupNormalization``: whole groups are removed, or any channels of a single group."""
    channels = _channels(flow, node)
    groups = node.attributes.get_int("num_groups", 1)
    if channels is not None and len(channels) % (flow.shape(node.inputs[1]) or (1,))[0]:
        flow.freeze([channels], node, UNKNOWN)  # it fits one length of an open axis
        channels = None
    if channels is not None and groups == 1:
        flow.mix([channels], node)
    elif channels is not None:
        flow.couple(channels.reshape(groups, -1), 1)
    for value, role in zip(node.inputs[1:3], _STATISTICS, strict=False):
        parameter = flow.on_axis(value, 0)
        if parameter is None:
            # Of one group, opset 18 has a single number: it stays.
            if channels is not None and flow.shape(value) != (1,):
                flow.freeze([channels], node, f"meets {value.name if value else ''!r}")
        elif channels is None:
            flow.freeze([parameter], node, "scales values that no layer computes")
        else:
            held = along(parameter, 0)
            flow.unify(channels.reshape(len(held), -1), held[:, None], node)
            flow.role(value, 0, role)
    _keep(flow, node)


def layer_norm(flow: Flow, node: ir.Node) -> None:
    """``LayerNormalization`` and its relatives: combine all channels of the last axes."""
    source = node.inputs[0]
    shape = flow.shape(source)
    if source is None or shape is None:
        flow.freeze_node(node, UNKNOWN)
        return
    parameters = [v for v in node.inputs[1:3] if v is not None]
    families = flow.broadcast(node, [source, *parameters], shape)
    first = node.attributes.get_int("axis", -1) % len(shape)
    flow.mix_over(families, range(first, len(shape)), node)
    for value, role in zip(parameters, _STATISTICS, strict=False):
        rank = len(flow.shape(value) or ())
        for axis in range(rank):
            flow.role(value, axis, role)
    flow.put(node.outputs[0], families)
    for output in node.outputs[1:]:  # the means and deviations
        flow.put(output, [f for f in families if not _over([f], range(first, len(shape)))])


def softmax(flow: Flow, node: ir.Node) -> None:
    """Normalize along one axis."""
    families = flow.labels(node.inputs[0])
    shape = flow.shape(node.inputs[0])
    if families and shape is None:
        flow.freeze_node(node, UNKNOWN)
        return
    if families and shape is not None:
        axis = node.attributes.get_int("axis", -1) % len(shape)
        flow.mix_over(families, [axis], node)
        if is_op(node, "Hardmax"):  # of equal values the first is the largest
            flow.place(_over(families, [axis]), node)
    flow.put(node.outputs[0], families)


def reduction(flow: Flow, node: ir.Node) -> None:
    """Reduce along axes; channels of those axes alone disappear."""
    source = node.inputs[0]
    families = flow.labels(source)
    before, after = flow.shape(source), flow.shape(node.outputs[0])
    axes = _axes(flow, node)
    if not families:
        flow.put(node.outputs[0], [])
        return
    if before is None or after is None or axes is None:
        flow.freeze_node(node, "reduces axes that are not known")
        return
    if not axes and node.attributes.get_int("noop_with_empty_axes", 0) != 0:
        flow.put(node.outputs[0], families)
        return
    reduced = [axis % len(before) for axis in axes] or list(range(len(before)))
    if node.op_type in ("ArgMax", "ArgMin"):
        flow.freeze(_over(families, reduced), node, "counts channels")
    elif operator(node).adds:
        flow.sum_over(families, reduced)
    else:
        flow.mix_over(families, reduced, node)
    left = []
    for family in families:
        rest = family
        others = [i for i in range(family.ndim) if i not in reduced and depends_on(family, i)]
        for axis in reduced:
            if depends_on(rest, axis):
                rest = flow.couple(rest, axis) if others else rest.take([0], axis)
        if others:
            kept = tuple(1 if i in reduced else n for i, n in enumerate(before))
            left.append(rest if len(after) == len(before) else reshaped(rest, kept, after))
    flow.put(node.outputs[0], left)


def cumulative(flow: Flow, node: ir.Node) -> None:
    """``CumSum``: the order of channels along its axis matters."""
    families = flow.labels(node.inputs[0])
    axes = _constant_integers(flow, node.inputs[1])
    shape = flow.shape(node.inputs[0])
    if families and (axes is None or shape is None):
        flow.freeze_node(node, "adds up along an axis that is not known")
        return
    if families and axes is not None and shape is not None:
        flow.freeze(_over(families, [a % len(shape) for a in axes]), node, "adds up channels")
    flow.put(node.outputs[0], families)


def _axes(flow: Flow, node: ir.Node) -> Sequence[int] | None:
    if node.op_type in ("ArgMax", "ArgMin"):
        return [node.attributes.get_int("axis", 0)]
    axes = node.attributes.get_ints("axes", None)
    if axes is not None:
        return list(axes)
    if input_of(node, 1) is not None:
        return _constant_integers(flow, node.inputs[1])
    return []


def _constant_integers(flow: Flow, value: ir.Value | None) -> list[int] | None:
    integers = flow.lengths.integers(value)
    constants = [n for n in integers or [] if n is not None]
    return constants if integers is not None and len(constants) == len(integers) else None


def _over(families: Sequence[Labels], axes: Sequence[int] | range) -> list[Labels]:
    return [f for f in families if any(depends_on(f, axis) for axis in axes)]


def _channels(flow: Flow, node: ir.Node) -> Units | None:
    """Return the channels along the first input's second axis.

    Channels that depend on other axes, too, are united along those.
    """
    family = flow.on_axis(node.inputs[0], 1)
    return None if family is None else along(flow.couple_others(family, 1), 1)


def _keep(flow: Flow, node: ir.Node) -> None:
    families = flow.labels(node.inputs[0])
    flow.put(node.outputs[0], families)
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        flow.freeze(families, node, "is in training mode")


Rule: TypeAlias = Callable[[Flow, ir.Node], None]

FAMILIES: Mapping[Family, Rule] = {
    "unary": unary,
    "cast-like": unary,
    "binary": binary,
    "quantization": quantized,
    "reduction": reduction,
    "spatial": views.spatial,
    "channel-norm": per_channel,
    "group-norm": group_norm,
    "layer-norm": layer_norm,
    "softmax": softmax,
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
    "CumSum": cumulative,
    "Einsum": products.einsum,
    **dict.fromkeys(RECURRENT, recurrences.recurrent),
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
    if row.recurrent:
        return node.inputs[recurrences.LENGTHS : recurrences.LENGTHS + 1]
    return () if row.family in _ALL else node.inputs[1:]
