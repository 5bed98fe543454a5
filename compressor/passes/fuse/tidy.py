"""Bring a finished graph into a clean and deterministic form."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from compressor.graph.values import all_nodes
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
