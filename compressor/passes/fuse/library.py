"""The passes and rewrite rules of onnx-ir and onnxscript that this pass uses.

Not used, and why (onnxscript 0.7, onnx-ir 1.1):

- batch-norm into Conv and Gemm: computes in float32 and names biases ``..._bias``.
- ``x + 0``, ``x * 1``: compare with an absolute tolerance of 1e-8 and so remove ``+ 1e-12``.
- merging of Clip, Min and Max: names new constants after the input, so two branches of one value
  replace each other's bounds and the model is invalid.
- Expand before broadcasting: takes unknown lengths for equal ones.
- MatMul and Add into Gemm: takes any second operand for a bias.
- Identity elimination: gives two outputs one name where one is an alias of the other, and lets
  branches return outer values, which ONNX Runtime refuses. Constant folding does it well.
- deduplication of initializers: merges parameters that happen to be equal.
- layer normalization: sees one order of operands, only with a scale.
- GELU, attention: write operators of private domains.
- MatMul without Reshapes: static shapes only; Slices into Split, ``auto_pad`` into pads: no need.
"""

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
        Whether anything changed, and what is known of values that carry a shape.
    """

    def wanted(node: ir.Node) -> bool | None:
        return False if is_op(node, *_RANDOM) else None

    result = fold_constants(
        model,
        onnx_shape_inference=True,
        input_size_limit=_FOLD_LIMIT,
        output_size_limit=_FOLD_LIMIT,
        should_fold=wanted,
    )
    return bool(result), result.symbolic_value_map


def rewrite(model: ir.Model, opset: int, patterns: bool) -> bool:
    """Apply the library's rewrite rules; say whether one fitted."""
    chosen = [
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
        chosen.append(rules.materialize_reshape_shape_rule)
    if opset >= 14 and patterns:
        chosen += list(rules.fuse_hardswish_rules())
    return bool(RewritePass(chosen)(model).modified)


def remove_unused(model: ir.Model) -> bool:
    """Remove nodes and initializers that nothing reads."""
    return common.RemoveUnusedNodesPass()(model).modified


def share_expressions(model: ir.Model) -> bool:
    """Compute equal expressions once."""
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
