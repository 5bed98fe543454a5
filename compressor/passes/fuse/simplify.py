"""The libraries' simplifications, and tidying up after all rules."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules

from compressor.graph.values import all_nodes, is_op
from compressor.passes.fuse.draft import Draft


def tidy(draft: Draft, known_names: frozenset[str]) -> None:
    """Make constants initializers, remove dead code and metadata, name what has no name.

    Args:
        draft: changed in place.
        known_names: names of nodes that the original graph had.
    """
    model = draft.model
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _share_constants(draft)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    _clear_metadata(model)
    for node in all_nodes(model.graph):
        if node.name not in known_names:
            node.name = f"node_{node.outputs[0].name}" if node.outputs else None
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _share_constants(draft: Draft) -> None:
    """Keep one of several equal constants; parameters that happen to be equal stay apart."""
    kept: dict[tuple[object, ...], ir.Value] = {}
    initializers = draft.model.graph.initializers
    for value in list(initializers.values()):
        tensor = value.const_value
        outside = value.is_graph_input() or value.is_graph_output()
        if tensor is None or outside or value in draft.parameters or tensor.dtype.is_string():
            continue
        key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        first = kept.setdefault(key, value)
        if first is not value:
            value.replace_all_uses_with(first)
            initializers.pop(value.name or "")


def _clear_metadata(model: ir.Model) -> None:
    common.ClearMetadataAndDocStringPass()(model)
    for part in (model.graph, *model.graph.subgraphs()):
        part.metadata_props.clear()
        part.doc_string = None
        written = (value for node in part for value in node.outputs)
        for value in (*part.inputs, *part.initializers.values(), *written):
            value.metadata_props.clear()
            value.doc_string = None


_FOLD_LIMIT = 1 << 16
"""Elements of a constant that may be computed ahead; larger ones would bloat the file."""

_RANDOM = ("Bernoulli", "Dropout", "Multinomial")


def inline_functions(model: ir.Model) -> None:
    """Put the bodies of model-local functions in place of their calls, where opsets agree."""

    def fits(function: ir.Function) -> bool:
        imports = function.opset_imports
        return all(model.opset_imports.get(d, v) == v for d, v in imports.items())

    if model.functions:
        common.InlinePass(criteria=fits)(model)


def fold(model: ir.Model) -> tuple[bool, Mapping[ir.Value, Any]]:
    """Fold constants, drop identities, infer shapes.

    Returns:
        Whether anything changed, and the shapes that values hold, where they are known.
    """

    result = fold_constants(
        model,
        onnx_shape_inference=True,
        input_size_limit=_FOLD_LIMIT,
        output_size_limit=_FOLD_LIMIT,
        should_fold=lambda node: False if is_op(node, *_RANDOM) else None,
    )
    return bool(result), result.symbolic_value_map


def rewrite(model: ir.Model, opset: int, patterns: bool) -> bool:
    """Apply the library's rewrite rules; return whether one fitted."""
    applied = [
        rules.cast_cast_rule,
        rules.cast_constant_of_shape_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.no_op_transpose_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.reshape_reshape_rule,
        rules.squeeze_reshape_1d_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.fuse_pad_into_conv_rule,
        rules.remove_optional_bias_from_conv_rule,
        rules.remove_optional_bias_from_conv_transpose_rule,
        rules.remove_optional_bias_from_gemm_rule,
    ]
    if opset >= 14:
        applied.append(rules.materialize_reshape_shape_rule)
    if opset >= 14 and patterns:
        applied += list(rules.fuse_hardswish_rules())
    return bool(RewritePass(applied)(model).modified)


def remove_unused(model: ir.Model) -> bool:
    """Remove nodes and initializers that nothing reads; return whether there were any."""
    return common.RemoveUnusedNodesPass()(model).modified


def share_expressions(model: ir.Model) -> bool:
    """Compute equal expressions once; return whether there were any."""
    if any(is_op(node, *_RANDOM) for node in all_nodes(model.graph)):
        return False
    return common.CommonSubexpressionEliminationPass()(model).modified


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' logging and numpy's floating-point warnings from the user."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
