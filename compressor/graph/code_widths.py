"""Codes that have fewer bits than the element type that holds them."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.codebooks import codebook_of
from compressor.graph.codes import BITS
from compressor.graph.values import INTEGER_CODES, all_nodes, is_op


def code_widths(model: ir.Model) -> dict[ir.Value, int]:
    """Return the bits of the codes, and of their zero points, that are stored in a wider type.

    The nodes that read them say so: ``DequantizeLinear`` by a note of the pass that made it, and
    places in a codebook by the length of that. No code is read.
    """
    widths: dict[ir.Value, int] = {}
    for node in all_nodes(model.graph):
        if is_op(node, "DequantizeLinear") and BITS in node.metadata_props:
            for value in (node.inputs[0], *node.inputs[2:]):
                if value is not None and value.is_initializer():
                    widths[value] = int(node.metadata_props[BITS])
    for value in model.graph.initializers.values():
        book = codebook_of(value) if value.dtype in INTEGER_CODES else None
        if book is not None:
            widths[value] = book.bits
    return {
        value: bits
        for value, bits in widths.items()
        if value.dtype in INTEGER_CODES and bits < value.dtype.bitwidth
    }
