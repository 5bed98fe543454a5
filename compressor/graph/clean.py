"""Bring a fresh graph into the plain form that passes expect, without changing what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.values import INTEGER_CODES, all_nodes, constant_array, is_op

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass

_SMALL = 1024  # elements: shapes, axes and scalars; never a table that someone computed


def clean(model: ir.Model) -> None:
    """Fold shape arithmetic, drop what nothing reads, and strip exporter notes, in place.

    Weights keep their names: a node that reads a parameter is never folded, except one that only
    asks for its shape.
    """
    from onnxscript.optimizer import fold_constants

    lifted: list[InPlacePass] = [
        common.InlinePass(),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    ]
    parameters = _parameters(model)
    for step in lifted:
        step(model)
    fold_constants(
        model,
        onnx_shape_inference=False,
        input_size_limit=_SMALL,
        output_size_limit=_SMALL,
        should_fold=lambda node: None if _folds(node, parameters) else False,
    )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    # Constants of branches and loops are initializers there now, and belong to the main graph too.
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _drop_zero_biases(model, parameters)
    _drop_identities(model)
    dropped: list[InPlacePass] = [
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    ]
    for step in dropped:
        step(model)


def infer_shapes(model: ir.Model) -> None:
    """Note the shapes of all values that ONNX can infer, in place; weights are not read."""
    common.ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _parameters(model: ir.Model) -> frozenset[str]:
    """Return the names of floats, and of integers narrow enough to be codes of some."""
    return frozenset(
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None
        and (value.dtype.is_floating_point() or value.dtype in INTEGER_CODES)
    )


def _folds(node: ir.Node, parameters: frozenset[str]) -> bool:
    if node.op_type in ("Shape", "Size"):
        return True
    if node.op_type == "CastLike":
        return node.inputs[0] is not None and node.inputs[0].name not in parameters
    return not any(v is not None and v.name in parameters for v in node.inputs)


def _drop_zero_biases(model: ir.Model, parameters: frozenset[str]) -> None:
    """Remove the zero bias that lowering gives to a convolution without one."""
    for node in all_nodes(model.graph):
        if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        if bias is None or bias.name in parameters:
            continue
        values = constant_array(bias)
        if values is not None and not np.any(values):
            node.resize_inputs(2)


def _drop_identities(model: ir.Model) -> None:
    """Remove ``Identity`` nodes, except those that let a graph give one value as two outputs.

    The library's pass removes these as well. Two outputs are then of one name, which is no valid
    graph, and ONNX Runtime computes something else for it.
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
