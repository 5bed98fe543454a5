"""Small simplifications: products, pooling, slices, and what is left over."""

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

from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_of, is_op, static_shape
from compressor.passes.fuse.draft import (
    Draft,
    axes_of,
    input_of,
    integers,
    node_graph,
    positive,
    private_maker,
    put,
    rank,
    replace,
)


def matmul_to_gemm(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``MatMul(x, W) + b`` with ``x`` of rank 2 and a constant vector ``b`` by Gemm."""
    if not is_op(node, "Add"):
        return False
    for value, bias in (node.inputs, reversed(node.inputs)):
        product = private_maker(value, node, "MatMul")
        if product is None or bias is None or constant_of(bias) is None:
            continue
        source, weight = product.inputs
        if weight is None or not weight.is_initializer() or rank(source) != 2:
            continue
        shape = static_shape(weight)
        if shape is None or len(shape) != 2 or static_shape(bias) != (shape[1],):
            continue
        replace(node, "Gemm", [source, weight, bias])
        node_graph(product).remove(product, safe=True)
        return True
    return False


_IMAGE_RANKS = (4, 5)


def mean_to_pool(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace a mean over all spatial axes of ``[N, C, H, W]`` (or 3-D) by GlobalAveragePool.

    A mean that drops the axes gets a Flatten behind it. Means of ``[N, T, C]`` are left alone:
    there they are usually part of a normalization.
    """
    if not is_op(node, "ReduceMean"):
        return False
    source = node.inputs[0]
    count = rank(source)
    if source is None or count not in _IMAGE_RANKS:
        return False
    axes = axes_of(node, count)
    if axes is None or sorted(axes) != list(range(2, count)):
        return False
    if source.dtype is None or not source.dtype.is_floating_point():
        return False
    if node.attributes.get_int("keepdims", 1):
        replace(node, "GlobalAveragePool", [source])
        return True
    pool = put(node, "GlobalAveragePool", [source])
    if source.shape is not None:
        pool.outputs[0].shape = ir.Shape([*source.shape[:2], *[1] * (count - 2)])
    pool.outputs[0].name = f"{node.outputs[0].name}_pool"
    replace(node, "Flatten", [pool.outputs[0]], {"axis": 1})
    return True


_Cut = tuple[int, int, int]


def merge_slices(node: ir.Node, draft: Draft) -> bool:
    """Replace ``Slice(Slice(x))`` on different axes, with constant bounds, by one Slice."""
    if not is_op(node, "Slice"):
        return False
    inner = private_maker(node.inputs[0], node, "Slice")
    if inner is None:
        return False
    first, second = _cuts(inner), _cuts(node)
    if first is None or second is None or first.keys() & second.keys():
        return False
    cuts = sorted((first | second).items())
    name = node.outputs[0].name or "slice"
    columns = {
        "starts": [cut[0] for _, cut in cuts],
        "ends": [cut[1] for _, cut in cuts],
        "axes": [axis for axis, _ in cuts],
        "steps": [cut[2] for _, cut in cuts],
    }
    inputs = [draft.constant(v, ir.DataType.INT64, f"{name}/{k}") for k, v in columns.items()]
    data = inner.inputs[0]
    replace(node, "Slice", [data, *inputs])
    inner_graph = inner.graph
    if inner_graph is not None:
        inner_graph.remove(inner, safe=True)
    return True


def _cuts(node: ir.Node) -> dict[int, _Cut] | None:
    """Return start, end and step by axis, or ``None`` if they are not constants."""
    starts, ends = integers(input_of(node, 1)), integers(input_of(node, 2))
    if starts is None or ends is None:
        return None
    axes: list[int] | None = list(range(len(starts)))
    steps: list[int] | None = [1] * len(starts)
    if input_of(node, 3) is not None:
        given = integers(input_of(node, 3))
        axes = None if given is None else positive(given, rank(node.inputs[0]))
    if input_of(node, 4) is not None:
        steps = integers(input_of(node, 4))
    if axes is None or steps is None:
        return None
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))


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
    for value in _values(model.graph):
        value.metadata_props.clear()
        value.doc_string = None


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    for part in (graph, *graph.subgraphs()):
        part.metadata_props.clear()
        part.doc_string = None
        yield from part.inputs
        yield from part.initializers.values()
        for node in part:
            yield from node.outputs


_FOLD_LIMIT = 1 << 16
"""Elements of a constant that may be computed ahead; larger ones would bloat the file."""


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
        return False if operator(node).random else None

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
    if any(operator(node).random for node in all_nodes(model.graph)):
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
