"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.models.executor.dtypes import widened
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op


def _matmul(_: NodeView) -> Op:
    multiply = widened(torch.matmul)

    def run(a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b)

    return run


def _gemm(node: NodeView) -> Op:
    """Y = alpha * A' * B' + beta * C, where A' and B' may be transposed."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    a_across, b_across = node.flag("transA"), node.flag("transB")

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        product = torch.mm(a.t() if a_across else a, b.t() if b_across else b)
        if alpha != 1.0:
            product = (product * alpha).to(a.dtype)
        if c is None:
            return product
        return product + (c if beta == 1.0 else (c * beta).to(c.dtype))

    return run


def _einsum(node: NodeView) -> Op:
    equation = node.text("equation").replace(" ", "")

    def run(*operands: Tensor) -> Tensor:
        return torch.einsum(equation, *operands)

    return run


LINEAR: Table = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": _matmul}
