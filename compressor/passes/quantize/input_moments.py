"""Ask for the second moment of what a layer multiplies its weights with."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from compressor.passes.quantize.placement import activation_input
from compressor.types.layers import Layer
from compressor.types.statistics import Request


def moment_request(
    layer: Layer, node: ir.Node, rows_per_column: int | None = None
) -> Request | None:
    """Return the request, or ``None`` where there is no such statistic.

    Args:
        layer: a layer of the main graph.
        node: the node that reads its weight.
        rows_per_column: vectors for each of their elements after which observation stops;
            ``None`` leaves it to the observer.
    """
    value = activation_input(node)
    if value is None or not value.name or node.attributes.get_int("transA", 0) != 0:
        return None
    options: dict[str, Any] | None = {}
    if layer.kind not in ("Gemm", "MatMul"):
        options = _window(layer, node)
    if options is None:
        return None
    if rows_per_column is not None:
        options["rows_per_column"] = rows_per_column
    return Request(value.name, "second-moment", options)


def _window(layer: Layer, node: ir.Node) -> dict[str, Any] | None:
    """Describe a 2-D convolution's patches; ``None`` for others."""
    if layer.kind != "Conv" or len(layer.shape) != 4:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    return {
        "kernel": tuple(layer.shape[2:]),
        "strides": tuple(node.attributes.get_ints("strides", (1, 1))),
        "pads": tuple(node.attributes.get_ints("pads", (0, 0, 0, 0))),
        "dilations": tuple(node.attributes.get_ints("dilations", (1, 1))),
        "groups": layer.groups,
    }
