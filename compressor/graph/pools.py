"""Averages over windows that may reach beyond the padded image, as ``ceil_mode`` allows.

By ONNX, what lies beyond the padding does not count. ONNX Runtime's integer kernel counts it where
``count_include_pad`` is set, as PyTorch sets it unless told otherwise: a window of 1,280 x 1,280
over the 8 x 8 pixels that an EfficientNet leaves gives a 25,600th of their mean.
"""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import all_nodes, is_op

_COUNTS = "count_include_pad"


def counts_beyond(node: ir.Node | None) -> bool:
    """Whether a node is an average whose integer kernel counts what lies beyond the padding."""
    if node is None or not is_op(node, "AveragePool"):
        return False
    attributes = node.attributes
    return attributes.get_int(_COUNTS, 0) == 1 and attributes.get_int("ceil_mode", 0) == 1


def count_no_padding(model: ir.Model) -> None:
    """Clear ``count_include_pad`` where nothing is padded, in place; no result changes."""
    for node in all_nodes(model.graph):
        if not counts_beyond(node):
            continue
        padded = node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        if not padded and not any(node.attributes.get_ints("pads", ())):
            del node.attributes[_COUNTS]
