"""The plain form of a graph that passes expect: folded, and with every shape that can be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.editing import detach_dropped
from compressor.graph.folding import fold_constants
from compressor.graph.inference import infer_shapes
from compressor.graph.lengths import Lengths
from compressor.graph.operators import operator_named
from compressor.graph.pools import count_no_padding
from compressor.graph.values import (
    INTEGER_CODES,
    all_nodes,
    constant_array,
    is_op,
)
from compressor.progress import quiet_libraries

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass

_SMALL = 1024  # elements: shapes, axes and scalars; never a table that someone computed


def make_plain(model: ir.Model) -> None:
    """Clean a graph, and note every shape that can be known, in place."""
    clean(model)
    infer_shapes(model)
    note_static_lengths(model)


def clean(model: ir.Model) -> None:
    """Fold shape arithmetic, drop unused nodes, and strip exporter metadata, in place.

    Weights keep their names: a node that reads a parameter is folded only if it merely asks for
    the parameter's shape.
    """
    lifted: list[InPlacePass] = [
        common.InlinePass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    ]
    parameters = frozenset(
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None
        and (value.dtype.is_floating_point() or value.dtype in INTEGER_CODES)
    )
    for step in lifted:
        step(model)
    with quiet_libraries():  # onnx cannot compute all that it defines, and the library logs that
        fold_constants(model, _SMALL, lambda node: not _folds(node, parameters))
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    # Constants of branches and loops are initializers there now, and belong to the main graph too.
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    detach_dropped(model)
    _drop_zero_biases(model, parameters)
    _drop_identities(model)
    count_no_padding(model)
    common.RemoveUnusedNodesPass()(model)
    detach_dropped(model)  # an unused branch goes as it is, too
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    common.NameFixPass()(model)


def _folds(node: ir.Node, parameters: frozenset[str]) -> bool:
    family = operator_named(node.op_type).family
    if family == "shape":
        return True
    if family == "cast-like":
        return node.inputs[0] is not None and node.inputs[0].name not in parameters
    return not any(v is not None and v.name in parameters for v in node.inputs)


def _drop_zero_biases(model: ir.Model, parameters: frozenset[str]) -> None:
    for node in all_nodes(model.graph):
        if not operator_named(node.op_type).is_convolution or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        if bias is None or bias.name in parameters:
            continue
        values = constant_array(bias)
        if values is not None and not np.any(values):
            node.resize_inputs(2)


def _drop_identities(model: ir.Model) -> None:
    """Remove ``Identity`` nodes, except where one value is two outputs of a graph.

    The library's pass removes those too. Two outputs then share a name, which makes the graph
    invalid, and ONNX Runtime computes something else for it.
    """
    for node in list(all_nodes(model.graph)):
        if not is_op(node, "Identity") or node.graph is None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None:
            continue
        if result.is_graph_output():
            maker = source.producer()
            if maker is None or maker.graph is not node.graph or source.is_graph_output():
                continue
            source.name = result.name
        if source.shape is None or (result.shape is not None and result.is_graph_output()):
            source.shape = result.shape
        source.type = source.type or result.type
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)


_NEAR, _FAR = 1, 50
"""Offsets of the example lengths: about twice the usual ones, and hundreds more."""


def note_static_lengths(model: ir.Model) -> None:
    """Note which axes of values have a fixed length and which are dynamic, in place.

    Symbolic inference gives up on quotients of lengths, such as the heads of an attention after
    ``Reshape`` to ``[batch, length, -1, 8]``, and at operators that it does not know. So numbers
    are put in place of the dynamic lengths, three times: an axis with the same length each time
    is fixed, and any other is dynamic, whatever was noted before (an exporter may leave the length
    of its example there). Very long inputs may exceed what the graph takes; they are then ignored.
    A length of 1 each time proves nothing, since it may be a rounded quotient of short lengths.

    Args:
        model: of opset 18 or newer; subgraphs are not entered.
    """
    outputs = [value for node in model.graph for value in node.outputs]
    if all(value.shape is not None and value.shape.is_static() for value in outputs):
        return
    usual, near, far = (Lengths(model, offset) for offset in (0, _NEAR, _FAR))
    for value in outputs:
        first, second, third = (lengths.shape(value) for lengths in (usual, near, far))
        if first is None or second is None or len(first) != len(second):
            continue
        if third is None or len(third) != len(first):
            third = first
        value.shape = _merged_shape(value.shape, list(zip(first, second, third, strict=True)))


def _merged_shape(noted: ir.Shape | None, tries: Sequence[tuple[int, ...]]) -> ir.Shape:
    """Combine a noted shape with the lengths that each axis had in several tries."""
    dims: list[int | ir.SymbolicDim] = []
    old = list(noted) if noted is not None and len(noted) == len(tries) else [None] * len(tries)
    for before, lengths in zip(old, tries, strict=True):
        if len(set(lengths)) == 1:
            length = lengths[0] if lengths[0] > 1 else before
        else:
            length = None if isinstance(before, int) else before
        dims.append(ir.SymbolicDim(None) if length is None else length)
    return ir.Shape(dims)


def with_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a copy with given input shapes, and the shapes of all values that follow from them.

    Args:
        model: not changed; weights are shared. Subgraphs are not entered.
        shapes: shapes of its inputs, by name.
    """
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    infer_shapes(copy)  # and types
    inferred = Lengths(copy).shapes
    for node in copy.graph:
        for value in node.outputs:
            if value.name and value.name in inferred:
                value.shape = ir.Shape(inferred[value.name])
    return copy
