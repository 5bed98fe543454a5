"""Check graphs against what ONNX Runtime knows, before anything is run."""

from __future__ import annotations

from functools import cache

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.inference import infer_shapes
from compressor.graph.operators import operator
from compressor.graph.values import (
    DEFAULT_DOMAINS,
    all_nodes,
    constant_array,
    given_shape,
    static_shape,
)
from compressor.models.onnx.ort_runner import graph_runner, without_weights
from compressor.models.onnx.ort_session import OrtRunner


def check_operators(model: ir.Model, subject: str) -> None:
    """Check that the standard operators of a graph exist in its opset.

    Raises:
        ModelError: names the first that neither onnx nor ONNX Runtime knows.
    """
    from onnx import defs

    opset = model.opset_imports.get("", 1)
    for node in all_nodes(model.graph):
        if node.domain not in DEFAULT_DOMAINS or defs.has(node.op_type, opset, ""):
            continue
        later = defs.has(node.op_type, defs.onnx_opset_version(), "")
        if not later and ("", node.op_type) in _runtime_operators():  # one its optimizer writes
            continue
        name = node.name or next((v.name for v in node.outputs if v.name), "")
        raise ModelError(
            subject,
            f"node {name!r} has the operator {node.op_type!r}, which opset {opset} does not have",
            "give the file the opset it was made with"
            if later
            else "it is misspelt, of another domain, or newer than the installed onnx",
        )


def foreign_operators(model: ir.Model) -> tuple[str, ...]:
    """Return the operators of other domains that ONNX Runtime does not know, sorted.

    Args:
        model: a graph whose functions have been inlined.
    """
    named = {
        (node.domain, node.op_type)
        for node in all_nodes(model.graph)
        if node.domain not in DEFAULT_DOMAINS
    }
    if not named:
        return ()
    return tuple(sorted(f"{domain}.{name}" for domain, name in named - _runtime_operators()))


def check_repeats(model: ir.Model, subject: str) -> None:
    """Check that a graph is a function of its inputs: that no node draws random numbers.

    Two runs of such a model differ as much as an artifact differs from it, and more.

    Raises:
        ModelError: names the first node that does.
    """
    for node in all_nodes(model.graph):
        row, remedy = operator(node), "export it with the noise as an input, or without"
        draws = row.random
        if draws and row.passes_factor:  # dropout, unless for inference
            given = constant_array(node.inputs[2]) if len(node.inputs) > 2 else None
            draws, remedy = given is not None and bool(given.any()), "export it for inference"
        if draws:
            name = node.name or next((v.name for v in node.outputs if v.name), "")
            raise ModelError(
                subject,
                f"node {name!r} ({node.op_type}) draws random numbers, so that the model's own "
                "outputs differ between two runs and no artifact can be judged by them",
                remedy,
            )


def check_loads(model: ir.Model, subject: str) -> None:
    """Check that ONNX Runtime loads a graph: types, shapes, and a kernel for every operator.

    Weights become inputs without a value. Only if that is refused is the model loaded as it is,
    since a few kernels need constants.

    Raises:
        ModelError: the runtime refuses the model.
    """
    try:
        OrtRunner(without_weights(model), subject, optimize=False)
    except ModelError:
        graph_runner(model, subject=subject)


@cache
def _runtime_operators() -> frozenset[tuple[str, str]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


def free_wrong_ranks(model: ir.Model) -> None:
    """Give outputs the number of axes that is computed where a file states another, in place.

    ONNX Runtime runs such files, but what is inferred from the statement changes what they give.
    """
    probe = model.clone()
    for value in probe.graph.outputs:
        value.shape = None
    infer_shapes(probe)
    for value, computed in zip(model.graph.outputs, probe.graph.outputs, strict=True):
        rank = _rank(computed)
        if value.shape is not None and rank not in (None, len(value.shape)):
            value.shape = computed.shape or ir.Shape([None] * (rank or 0))


def _rank(value: ir.Value) -> int | None:
    """Return how many axes an inferred value has; that of a shape to come is known before it is."""
    if value.shape is not None:
        return len(value.shape)
    node = value.producer()
    lengths = None if node is None else given_shape(node)
    count = None if lengths is None else static_shape(lengths)
    return count[0] if count else None
