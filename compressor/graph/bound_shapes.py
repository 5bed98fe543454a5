"""Give every value of a graph the shape that it has for given inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from compressor.graph.channels.lengths import Lengths
from compressor.graph.clean import infer_shapes


def with_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a copy in which no axis is dynamic, as far as ONNX can infer that.

    Args:
        model: not changed; weights are shared. Subgraphs are not entered.
        shapes: of its inputs, by name.
    """
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    infer_shapes(copy)  # and types
    found = Lengths(copy).shapes
    for node in copy.graph:
        for value in node.outputs:
            if value.name and value.name in found:
                value.shape = ir.Shape(found[value.name])
    return copy
