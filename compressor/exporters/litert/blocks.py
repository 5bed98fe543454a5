"""Channels as blocks of pixels, and blocks of pixels as channels.

LiteRT's DEPTH_TO_SPACE has the pixels of a block in the slower order of ONNX's two: channels lie
together for each pixel (DCR). Pixel shuffles have all pixels of a channel together (CRD), and are
the same once the channels before them are in the other order. A convolution there is written with
its output channels in that order, which costs nothing; elsewhere the channels are gathered.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from ai_edge_litert import schema_py_generated as schema

from compressor.exporters.litert.lowering import Call
from compressor.exporters.litert.store import Store
from compressor.graph.operators import operator
from compressor.graph.values import sole_reader
from compressor.types.tensors import Array


def channel_orders(store: Store) -> dict[ir.Node, Array]:
    """Return the orders in which convolutions before pixel shuffles store their output channels.

    Both the convolution and the shuffle have an entry.
    """
    orders: dict[ir.Node, Array] = {}
    for node in store.model.graph:
        if node.op_type == "DepthToSpace" and _by_channel(node):
            layer = _layer_behind(store, node)
            if layer is not None:
                weight = store.weight(layer.inputs[1])  # type: ignore[arg-type]
                assert weight is not None
                orders[node] = orders[layer] = _order(node, len(weight.array))
    return orders


def depth_to_space(call: Call) -> None:
    """Write a DepthToSpace of either mode."""
    source = call.operand(0, last=True)
    if _by_channel(call.node) and call.node not in call.graph.orders:
        gathers = schema.GatherOptionsT(axis=len(source.shape) - 1)
        order = call.graph.numbers(_order(call.node, source.shape[-1]).tolist())
        source = call.graph.emit(
            "GATHER", [source, order], source.shape, source.dtype, gathers, True, None,
            source.quantization,
        )  # fmt: skip
    options = schema.DepthToSpaceOptionsT(blockSize=_size(call.node))
    call.give("DEPTH_TO_SPACE", [source], options, last=True)


def space_to_depth(call: Call) -> None:
    """Write a SpaceToDepth, whose order of channels is LiteRT's."""
    options = schema.SpaceToDepthOptionsT(blockSize=_size(call.node))
    call.give("SPACE_TO_DEPTH", [call.operand(0, last=True)], options, last=True)


def _by_channel(node: ir.Node) -> bool:
    return node.attributes.get_string("mode", "DCR") == "CRD"


def _size(node: ir.Node) -> int:
    return node.attributes.get_int("blocksize", 1)


def _order(node: ir.Node, channels: int) -> Array:
    """Return the place of each channel of DCR among those of CRD."""
    places: Array = np.arange(channels).reshape(-1, _size(node) ** 2).T.reshape(-1)
    return places


def _layer_behind(store: Store, node: ir.Node) -> ir.Node | None:
    """Return the convolution whose output alone is shuffled, with single elements between."""
    value = node.inputs[0]
    while value is not None and sole_reader(value) is not None:
        maker = value.producer()
        row = operator(maker)
        if maker is None:
            return None
        if row.is_convolution and not row.transposed_weight:
            weight = maker.inputs[1]
            whole = maker.attributes.get_int("group", 1) == 1
            constant = weight is not None and store.weight(weight) is not None
            return maker if whole and constant else None
        if row.family not in ("unary", "quantization"):
            return None
        value = maker.inputs[0]
    return None
