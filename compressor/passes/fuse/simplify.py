"""Compute constants ahead, with the libraries' passes and for parameters; and tidy up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count, islice, takewhile
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common
from onnxscript.rewriter import RewritePass, RewriteRule
from onnxscript.rewriter.rules import common as rules

from compressor.graph.editing import detach_dropped
from compressor.graph.folding import Folded, fold_constants
from compressor.graph.layers import layer_name
from compressor.graph.operators import operator
from compressor.graph.stored_weights import lookups_of
from compressor.graph.values import all_nodes, as_function, constant_of, sole_reader, static_shape
from compressor.passes.fuse.draft import Draft, has_kernels, node_graph, rank
from compressor.types.tensors import Array

_FOLD_LIMIT = 1 << 16
"""Elements of a constant that may be computed ahead; larger ones would bloat the file."""


def inline_functions(model: ir.Model) -> None:
    """Put the bodies of model-local functions in place of their calls, where opsets agree."""

    def fits(function: ir.Function) -> bool:
        imports = function.opset_imports
        return all(model.opset_imports.get(d, v) == v for d, v in imports.items())

    if model.functions:
        common.InlinePass(criteria=fits)(model)


def fold(model: ir.Model) -> Folded:
    """Fold constants but random numbers, drop identities, infer shapes."""
    folded = fold_constants(model, _FOLD_LIMIT, lambda node: operator(node).random, infer=True)
    if folded.changed:
        detach_dropped(model)
    return folded


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
    own = [_own_rule(rule) for rule in applied]
    if opset >= 14 and patterns:
        own += [_own_rule(rule, _fits) for rule in rules.fuse_hardswish_rules()]
    return bool(RewritePass(own)(model).modified)


def _fits(source: ir.Value, output: ir.Value) -> bool:
    """Whether one operator may take the place of what was written out, constants included."""
    return has_kernels(source) and rank(source) == rank(output)


def _own_rule(
    rule: RewriteRule, wanted: Callable[[ir.Value, ir.Value], bool] | None = None
) -> RewriteRule:
    """Copy a rule of the library without the last graph that it was tried on.

    The library's rules live as long as the process, and all of that graph would with them. The copy
    is tried only on nodes of the operator that its pattern ends in, and where ``wanted`` is true of
    the ``x`` of its pattern and the output.
    """
    fresh = copy(rule)
    fresh._matcher = copy(rule._matcher)
    (last,) = rule._target_pattern.output_nodes
    identifier = last.op_identifier()

    def tried(model: ir.Model, graph: Any, node: ir.Node, **_: object) -> Any:
        fits = identifier is None or node.op_identifier() == identifier
        if fits and wanted is not None:
            match = fresh.match(model, graph, node)
            bound = match.bindings if match else {}
            fits = bool(match) and wanted(bound["x"], node.outputs[0])
        return rule.__class__.try_rewrite(fresh, model, graph, node) if fits else None

    fresh.try_rewrite = tried  # type: ignore[assignment,method-assign]
    return fresh


def remove_unused(model: ir.Model) -> bool:
    """Remove nodes and initializers that nothing reads; return whether there were any."""
    return common.RemoveUnusedNodesPass()(model).modified


def share_expressions(model: ir.Model) -> bool:
    """Compute equal expressions once; return whether there were any."""
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


_SMALL = 4096
"""Bytes that a result may be larger than what it makes superfluous."""


def fold_parameters(draft: Draft) -> None:
    """Replace expressions of parameters by their values.

    A parameter that is only viewed differently keeps its name. Nothing is folded that would make
    the model larger: the transposed weight of an embedding that is also read as it is stays a
    Transpose, which runtimes fold when they load it.
    """
    for node in list(all_nodes(draft.model.graph)):
        if _foldable(node, draft) and _affordable(node, draft):
            _fold(node, draft)
            draft.counts["fold_parameters"] += 1


def _is_view(node: ir.Node) -> bool:
    """Whether a node only gives a parameter another type, shape or order."""
    return operator(node).moves in ("same", "type", "shape", "order")


def _foldable(node: ir.Node, draft: Draft) -> bool:
    """Whether a node depends on constants only, one of them a parameter."""
    if not (_is_view(node) or operator(node).folds) or node.graph is None:
        return False
    inputs = [value for value in node.inputs if value is not None]
    if any(constant_of(value) is None or value.is_graph_input() for value in inputs):
        return False
    if not any(value in draft.parameters for value in inputs):
        return False
    # Codes are as small as it gets.
    if operator(node).moves == "type" and any(lookups_of(inputs[0])):
        return False
    return all(
        value.dtype is not None and static_shape(value) is not None and not value.is_graph_output()
        for value in node.outputs
    )


def _affordable(node: ir.Node, draft: Draft) -> bool:
    """Whether the results are no larger than the parameters that become superfluous."""
    size = sum(_bytes(value) for value in node.outputs)
    for value in dict.fromkeys(node.inputs):
        if value is None or value not in draft.parameters:
            continue
        readers = {use.node: None for use in value.uses()}
        made = sum(_bytes(output) for reader in readers for output in reader.outputs)
        alone = all(_foldable(reader, draft) for reader in readers)
        if alone and not value.is_graph_output() and made <= _bytes(value):
            return True
        if len(readers) == 1 and not value.is_graph_output():
            size -= _bytes(value)
    return size <= _SMALL


def _bytes(value: ir.Value) -> int:
    shape = static_shape(value)
    if shape is None or value.dtype is None:
        return 0
    return (prod(shape) * value.dtype.bitwidth + 7) // 8


def _fold(node: ir.Node, draft: Draft) -> None:
    tensors = [constant_of(value) for value in node.inputs]
    parameters = [v for v in node.inputs if v is not None and v in draft.parameters]
    names = _names(node, parameters, draft)
    for value in parameters:
        if sole_reader(value) is node and isinstance(value.graph, ir.Graph):
            value.graph.initializers.pop(value.name or "")
    results = draft.results(_evaluation(node, tensors, draft.opset))
    for index, (output, name) in enumerate(zip(node.outputs, names, strict=True)):
        shape, dtype = static_shape(output), output.dtype
        if shape is None or dtype is None:
            continue
        tensor = draft.promise(
            lambda index=index: results()[index],  # type: ignore[misc]
            dtype,
            shape,
            name,
        )
        source = parameters[0]
        made = draft.initializer(tensor, name)
        if operator(node).moves == "order" and name == source.name and len(shape) == 2:
            draft.did(layer_name(name), "store the weight transposed")
        draft.parameters.add(made)
        output.replace_all_uses_with(made)
    node_graph(node).remove(node, safe=True)


def _names(node: ir.Node, parameters: list[ir.Value], draft: Draft) -> list[str]:
    """Name the results after the parameters they come from."""
    names = [value.name or "" for value in parameters]
    if len(names) == 1:
        if _is_view(node) and sole_reader(parameters[0]) is node:
            return names
        taken = draft.model.graph.initializers
        free = (f"{names[0]}.{i}" for i in count() if f"{names[0]}.{i}" not in taken)
        return list(islice(free, len(node.outputs)))
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    prefix = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    if not prefix:
        return [value.name or names[0] for value in node.outputs]
    # torch keeps the parts of a parametrized weight at layer.parametrizations.weight.original0
    if len(prefix) > 2 and prefix[-2] == "parametrizations":
        return [".".join([*prefix[:-2], prefix[-1]])]
    return [".".join([*prefix, "weight"])]


def _evaluation(
    node: ir.Node, tensors: list[ir.TensorProtocol | None], opset: int
) -> Callable[[], list[Array]]:
    """Return a function that computes one node's results.

    ``opset`` is the model's: branches and bodies have none, and the library's rewriter notes
    version 1 for those that it changes.
    """
    function = as_function(node, opset)

    def results() -> list[Array]:
        feeds = {f"x{i}": np.asarray(t.numpy()) for i, t in enumerate(tensors) if t is not None}
        computed: Any = ReferenceEvaluator(function).run(None, feeds, attributes={})
        return [np.asarray(result) for result in computed]

    return results


def tidy(draft: Draft, known_names: frozenset[str]) -> None:
    """Lift constants, drop dead code and metadata, and name nodes not in ``known_names``."""
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
    _tell_outputs_apart(model)
    common.NameFixPass()(model)


def _tell_outputs_apart(model: ir.Model) -> None:
    """Write a value that is several outputs once for each; an input that is one keeps its name."""
    outputs = model.graph.outputs
    inputs = {index: value for index, value in enumerate(outputs) if value.is_graph_input()}
    outputs[:] = [value for value in outputs if not value.is_graph_input()]
    common.OutputFixPass()(model)
    for index, value in inputs.items():
        outputs.insert(index, value)


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
