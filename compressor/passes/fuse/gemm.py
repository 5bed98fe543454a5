"""Write a matrix product of rank 2 and its bias as one Gemm."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import constant_of, is_op, static_shape
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import node_graph, private_maker, rank, replace


def matmul_to_gemm(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``MatMul(x, W) + b`` with ``x`` of rank 2 and a constant vector ``b`` by Gemm."""
    if not is_op(node, "Add"):
        return False
    for value, bias in (node.inputs, reversed(node.inputs)):
        product = private_maker(value, node, "MatMul")
        if product is None or bias is None or constant_of(bias) is None:
            continue
        source, weight = product.inputs
        if weight is None or not weight.is_initializer() or rank(source) != 2:
            continue
        shape = static_shape(weight)
        if shape is None or len(shape) != 2 or static_shape(bias) != (shape[1],):
            continue
        replace(node, "Gemm", [source, weight, bias])
        node_graph(product).remove(product, safe=True)
        return True
    return False
