"""Bring attention into the form that runtimes recognise.

``MatMul(scale Q, K') -> mask -> Softmax -> MatMul(V)``, of standard operators: the operator
``Attention`` exists from opset 23 on only, and no private domain is used. TensorRT wants the
scale on Q or K before the first product, or its root on both (NVIDIA, TensorRT documentation,
Fused Attention). ONNX Runtime fuses it into the product from either side (its MatMulScaleFusion).
PyTorch lowers it as ``sqrt(s) Q`` and ``sqrt(s) K'``; one multiplication does the same. A scale
behind the product is left there: ONNX Runtime's fusion of BERT's attention looks for it.
"""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import is_op
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import private_maker, put, replace, same_dim, scalar, sole_reader

_BETWEEN = ("Add", "Sub", "Mul", "Div", "Where", "Cast")


def scale_queries(node: ir.Node, draft: Draft) -> bool:
    """Replace ``MatMul(a Q, b K')`` before a Softmax by ``MatMul((a b) Q, K')``."""
    if not is_op(node, "MatMul") or not _feeds_softmax(node):
        return False
    queries, keys = node.inputs
    (left, first), (right, second) = _unscaled(queries, node), _unscaled(keys, node)
    if left is queries or right is keys or queries is None or queries.dtype is None:
        return False
    factor = draft.constant(first * second, queries.dtype, f"{node.outputs[0].name}/scale")
    scaled = put(node, "Mul", [left, factor])
    scaled.outputs[0].type, scaled.outputs[0].shape = queries.type, queries.shape
    scaled.outputs[0].name = f"{queries.name}_scaled"
    replace(node, "MatMul", [scaled.outputs[0], right])
    return True


def separate_heads(node: ir.Node, draft: Draft) -> bool:
    """Split the heads before, not after, the transposition.

    ``[T, B, H D] -> [T, B H, D] -> [B H, T, D] -> [B, H, T, D]``, as ``nn.MultiheadAttention``
    does it, becomes ``[T, B, H D] -> [T, B, H, D] -> [B, H, T, D]``.
    """
    if not is_op(node, "Reshape"):
        return False
    transpose = private_maker(node.inputs[0], node, "Transpose")
    if transpose is None or list(transpose.attributes.get_ints("perm", [])) != [1, 0, 2]:
        return False
    inner = private_maker(transpose.inputs[0], transpose, "Reshape")
    source = None if inner is None else inner.inputs[0]
    if inner is None or source is None or source.shape is None:
        return False
    middle, end = inner.outputs[0].shape, node.outputs[0].shape
    if middle is None or end is None or (len(source.shape), len(middle), len(end)) != (3, 3, 4):
        return False
    (length, batch, width), heads, depth = source.shape, end[1], end[3]
    same = [(middle[0], length), (middle[2], depth), (end[0], batch), (end[2], length)]
    if not all(same_dim(a, b) for a, b in same):
        return False
    if not (isinstance(heads, int) and isinstance(depth, int) and width == heads * depth):
        return False
    name = f"{node.outputs[0].name}_heads"
    shape = draft.constant([0, 0, heads, depth], ir.DataType.INT64, f"{name}/shape")
    split = put(node, "Reshape", [source, shape])
    split.outputs[0].name, split.outputs[0].shape = name, ir.Shape([length, batch, heads, depth])
    replace(node, "Transpose", [split.outputs[0]], {"perm": [1, 2, 0, 3]})
    return True


def _unscaled(value: ir.Value | None, reader: ir.Node) -> tuple[ir.Value | None, float]:
    """Return a value before its multiplication by a constant, and the constant."""
    node = private_maker(value, reader, "Mul", "Div")
    if node is None:
        return value, 1.0
    factor = scalar(node.inputs[1])
    if factor is not None:
        if is_op(node, "Div"):
            return (node.inputs[0], 1.0 / factor) if factor else (value, 1.0)
        return node.inputs[0], factor
    factor = scalar(node.inputs[0]) if is_op(node, "Mul") else None
    return (value, 1.0) if factor is None else (node.inputs[1], factor)


def _feeds_softmax(node: ir.Node) -> bool:
    reader: ir.Node | None = node
    for _ in range(4):
        reader = None if reader is None else sole_reader(reader.outputs[0])
        if is_op(reader, "Softmax"):
            return True
        if not is_op(reader, *_BETWEEN):
            return False
    return False
