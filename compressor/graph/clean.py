"""Bring a fresh graph into the plain form that passes expect, without changing what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.values import all_nodes, constant_array

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
    _drop_zero_biases(model, parameters)
    dropped: list[InPlacePass] = [
        common.IdentityEliminationPass(),
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
    return frozenset(
        name
        for name, value in model.graph.initializers.items()
        if value.dtype is not None and value.dtype.is_floating_point()
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
