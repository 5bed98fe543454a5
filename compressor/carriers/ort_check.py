"""Ask ONNX Runtime whether it takes a model, without reading the model's weights."""

from __future__ import annotations

from functools import cache

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.carriers.ort_runner import OrtRunner, graph_runner
from compressor.errors import ModelError
from compressor.graph.values import all_nodes

_DEFAULT_DOMAINS = ("", "ai.onnx")
_KEPT = 1 << 14  # bytes: shapes, axes, zero points: constants that a runtime reads as it starts
OLDEST_RUN = 7  # opset from which on ONNX Runtime has kernels


def check_operators(model: ir.Model, subject: str) -> None:
    """Check that the standard operators of a graph exist.

    Raises:
        ModelError: naming the first that neither onnx nor ONNX Runtime knows.
    """
    from onnx import defs

    opset = model.opset_imports.get("", 1)
    for node in all_nodes(model.graph):
        if node.domain not in _DEFAULT_DOMAINS or defs.has(node.op_type, opset, ""):
            continue
        later = defs.has(node.op_type, defs.onnx_opset_version(), "")
        if not later and ("", node.op_type) in _known():  # a private one, as its optimizer writes
            continue
        raise ModelError(
            subject,
            f"node {_label(node)} has the operator {node.op_type!r}, which opset {opset} does not "
            "have",
            "give the file the opset it was made with"
            if later
            else "it is misspelt, of another domain, or newer than the installed onnx",
        )


def foreign_operators(model: ir.Model) -> tuple[str, ...]:
    """Return the operators of other domains that ONNX Runtime does not know, sorted.

    Args:
        model: a graph whose functions have been written out.
    """
    named = {
        (node.domain, node.op_type)
        for node in all_nodes(model.graph)
        if node.domain not in _DEFAULT_DOMAINS
    }
    if not named:
        return ()
    return tuple(sorted(f"{domain}.{name}" for domain, name in named - _known()))


def check_loads(model: ir.Model, subject: str) -> None:
    """Let ONNX Runtime look at a graph: types, shapes, and a kernel for every operator.

    Weights are given as inputs without a value. Only where that is refused, the model is loaded
    as it is: a few kernels want constants.

    Raises:
        ModelError: the runtime refuses the model.
    """
    try:
        OrtRunner(_without_weights(model), subject, optimize=False)
    except ModelError:
        graph_runner(model, subject=subject)


def _without_weights(model: ir.Model) -> bytes:
    plain = model.clone()
    common.RemoveInitializersFromInputsPass()(plain)
    common.LiftSubgraphInitializersToMainGraphPass()(plain)
    graph = plain.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _KEPT:
            continue
        del graph.initializers[name]
        value.const_value = None
        value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        if not value.is_graph_input():
            graph.inputs.append(value)
    return ir.to_proto(plain).SerializeToString()


@cache
def _known() -> frozenset[tuple[str, str]]:
    """Domain and name of every operator that ONNX Runtime knows."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


def _label(node: ir.Node) -> str:
    return repr(node.name or next((v.name for v in node.outputs if v.name), ""))
