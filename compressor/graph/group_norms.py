"""Normalizations of groups of channels by operators for which ONNX Runtime has kernels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.graph.editing import Chain, Editor
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_array, static_shape

_SEVERAL = 2
_FEWEST_AXES = 3  # of what is normalized by channels


def as_instance_norms(model: ir.Model) -> bool:
    """Write group norms of floats as those of instances, in place; return whether there were any.

    ONNX Runtime (1.31) has no kernel for a group norm on the CPU, and computes it by some twenty
    operators, most of which read and write all values. Here each group is a channel while it is
    normalized; factors and terms of the channels are those of a batch norm of mean 0 and variance
    1, which takes one pass where ``Mul`` and ``Add`` take two. A norm took 0.09 to 0.4 of the time.
    """
    editor: Editor | None = None
    for node in list(all_nodes(model.graph)):
        if operator(node).family != "group-norm" or not _is_known(node):
            continue
        editor = editor or Editor(model)
        chain = Chain(editor, node.outputs[0].name or "")
        output = _normalized(editor, chain, node)
        output.shape = node.outputs[0].shape
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], chain.nodes, node.outputs, [output]
        )
    return editor is not None


def own_constants(model: ir.Model) -> None:
    """Give each norm factors and terms of its own where several read the same number, in place.

    Exporters store equal constants once. What several norms read ties the channels of all of them:
    pruning would remove the same ones everywhere.
    """
    editor = Editor(model)
    for value in list(model.graph.initializers.values()):
        uses = list(value.uses())
        norms = [operator(use.node).family == "channel-norm" for use in uses]
        if len(uses) < _SEVERAL or not all(norms) or len(static_shape(value) or ()) != 1:
            continue
        array = constant_array(value)
        if array is None or np.ptp(array) != 0:
            continue
        for node, index in uses[1:]:
            node.replace_input_with(index, editor.constant(value.name or "", array))


def _is_known(node: ir.Node) -> bool:
    """Whether a node normalizes float32, and the lengths are known that have to be written out."""
    source, scale, _ = node.inputs
    if source is None or source.shape is None or not isinstance(source.shape[1], int):
        return False
    if scale is None or scale.dtype != ir.DataType.FLOAT or not static_shape(scale):
        return False  # a file may give values between no type; they have that of their factors
    return node.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT


def _normalized(editor: Editor, chain: Chain, node: ir.Node) -> ir.Value:
    """Add the nodes that compute a group norm; return what they give."""
    source, scale, bias = node.inputs
    assert source is not None
    assert source.shape is not None
    assert scale is not None
    groups, channels = node.attributes.get_int("num_groups", 1), int(source.shape[1])  # type: ignore[arg-type]
    each = (static_shape(scale) or ())[0]
    epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    if groups == channels and len(source.shape) >= _FEWEST_AXES:
        inputs = [source, scale, bias]
        return chain.add("InstanceNormalization", inputs, "_normed", attributes=epsilon)
    by_group = each == groups  # of opset 18, where the groups have factors and terms
    factors = [scale, bias] if by_group else [_vector(editor, groups, n) for n in (1, 0)]
    lengths = editor.shared_constant(f"groups_{groups}", np.asarray([0, groups, -1], np.int64))
    value = chain.add("Reshape", [source, lengths], "_groups")
    value = chain.add("InstanceNormalization", [value, *factors], "_normed", attributes=epsilon)
    value = chain.add("Reshape", [value, _lengths(editor, chain, source)], "_channels")
    if by_group:
        return value
    statistics = [_vector(editor, channels, n) for n in (0, 1)]
    inputs = [value, scale, bias, *statistics]
    return chain.add("BatchNormalization", inputs, "_scaled", attributes={"epsilon": 0.0})


def _vector(editor: Editor, length: int, number: int) -> ir.Value:
    name = f"{'ones' if number else 'zeros'}_{length}"
    return editor.shared_constant(name, np.full(length, number, np.float32))


def _lengths(editor: Editor, chain: Chain, source: ir.Value) -> ir.Value:
    """Return what a ``Reshape`` takes to a value's shape, whose first axis is there already."""
    rest = [d if isinstance(d, int) else -1 for d in list(source.shape or ())[1:]]
    if rest.count(-1) > 1 or 0 in rest:
        return chain.add("Shape", [source], "_shape", ir.DataType.INT64)
    name = "_".join(["channels", *map(str, rest)])
    return editor.shared_constant(name, np.asarray([0, *rest], np.int64))
