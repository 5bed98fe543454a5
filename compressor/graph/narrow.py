"""Store codes in the narrowest element type there is, whatever the opset."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from compressor.graph.codebooks import codebook_of
from compressor.graph.codes import BITS
from compressor.graph.values import all_nodes, is_op

_PAIRS = {ir.DataType.INT4: ir.DataType.INT2, ir.DataType.UINT4: ir.DataType.UINT2}
_BITS = 2


def narrow(model: ir.Model) -> None:
    """Store 2-bit codes, which opset 21 has to hold in four bits, in two; in place.

    So those of one bit are, too. The result is for readers that do not mind the opset. No code is
    evaluated.
    """
    for codes in model.graph.initializers.values():
        book = codebook_of(codes) if codes.dtype in _PAIRS else None
        if book is not None and book.bits <= _BITS:
            _narrow(codes)
    for node in all_nodes(model.graph):
        if not is_op(node, "DequantizeLinear") or _bits(node) != _BITS:
            continue
        for value in (node.inputs[0], *node.inputs[2:]):
            if value is not None:
                _narrow(value)


def _narrow(value: ir.Value) -> None:
    if value.dtype in _PAIRS and value.const_value is not None:
        dtype, tensor = _PAIRS[value.dtype], value.const_value
        lazy = partial(_converted, tensor, dtype)
        value.const_value = ir.LazyTensor(lazy, dtype, _shape(tensor), name=value.name)
        value.type = ir.TensorType(dtype)  # copies of a graph share the type of a value


def _bits(node: ir.Node) -> int:
    return int(node.metadata_props.get(BITS, 0))


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    values = np.asarray(tensor.numpy()).astype(np.int8).astype(dtype.numpy())
    return ir.Tensor(values, dtype=dtype)


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape([int(d) for d in tensor.shape.numpy()])
