"""Weights that are only stored as codes, as the floats that products multiply."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import constant_array, input_of, maker_behind, static_shape
from compressor.types.tensors import Array

_MOST = 1 << 24  # bytes of floats, together
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)  # narrower codes have kernels of their own


def read_as_floats(model: ir.Model) -> None:
    """Replace weights stored as codes by what they stand for, where floats are multiplied.

    ONNX Runtime would compute them in every run, and its fastest kernels of convolutions are for
    constant weights alone. Exported files have them computed as they are opened, and so give the
    same outputs to the last bit.

    Codes in groups and those of fewer than 8 bits stay, and so do all that are left once the floats
    take 16 MB.

    Args:
        model: changed in place.
    """
    left = _MOST
    for node in tuple(model.graph):
        floats = _floats(node) if 4 * _numbers(node) <= left else None
        if floats is None:
            continue
        left -= floats.nbytes
        weight = ir.val(floats.name, floats.dtype, floats.shape, const_value=floats)
        ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        parts = [part for part in node.inputs if part is not None and part.is_initializer()]
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(weight)
        for part in parts:
            if not part.uses():
                model.graph.initializers.pop(str(part.name), None)


def _numbers(node: ir.Node) -> float:
    """Return how many codes a node makes a weight of that multiplies floats; else infinity."""
    weight, codes = node.outputs[0], input_of(node, 0)
    if not operator(node).dequantizes or codes is None or codes.dtype not in _BYTES:
        return math.inf
    shape = static_shape(codes)
    multiplied = all(
        operator(use.node).is_product
        and use.idx == 1
        and maker_behind(use.node.inputs[0], lambda row: row.dequantizes) is None
        for use in weight.uses()
    )
    if shape is None or len(shape) < 2 or weight.is_graph_output() or not multiplied:
        return math.inf
    return math.prod(shape)


def _floats(node: ir.Node) -> ir.Tensor[Array] | None:
    """Return what codes stand for, if they are constant and have one scale or one for each row."""
    if node.attributes.get_int("block_size", 0):
        return None
    parts = [constant_array(value) for value in node.inputs if value is not None]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or known[1].dtype != np.float32:
        return None
    codes, *sides = (part.astype(np.float32) for part in known)
    spread = [1] * codes.ndim
    spread[node.attributes.get_int("axis", 1)] = -1
    scale, *zero = (side.reshape(spread if side.ndim else ()) for side in sides)
    shifted = codes - zero[0] if zero else codes
    return ir.Tensor(shifted * scale, name=str(node.outputs[0].name))
