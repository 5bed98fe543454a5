"""Inspect files of ONNX Runtime's own format, as the ONNX graph that they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compressor.exporters.ort.reading import ort_model
from compressor.graph.values import all_nodes
from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.graph import inspect_graph
from compressor.lab.inspect.stored import mapped
from compressor.models.onnx.file import checked_model
from compressor.progress import Progress

_KIND = "ONNX Runtime model"


def inspect_ort(path: Path, progress: Progress) -> ModelContents:
    """Describe a file of ONNX Runtime's format; its nodes are those of the optimized graph.

    Raises:
        ModelError: it is none, cut or damaged, or breaks ONNX's rules.
    """
    import onnx_ir.passes.common as common

    with mapped(path, f"an {_KIND}") as data:
        proto, _ = ort_model(data)
        size = len(data)
    model = checked_model(proto, path.parent, f"model {str(path)!r}")
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    used = {node.domain for node in all_nodes(model.graph)}
    for domain in set(model.opset_imports) - used - {""}:  # the runtime lists all that it knows
        del model.opset_imports[domain]
    contents = inspect_graph(model, _KIND, str(path), {path.name: size}, progress)
    if used <= {""} or contents.graph is None:
        return contents
    # Of the runtime's own operators no costs are known, and a part of the sum says nothing.
    rows = tuple(replace(row, macs=None) for row in contents.tensors)
    return replace(contents, tensors=rows, graph=replace(contents.graph, macs=None))
