"""Operators that order elements or look for some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.models.executor.dtypes import moved
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import scalar
from compressor.models.executor.program import Op, Result

_UNORDERED = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def _top_k(node: NodeView) -> Op:
    """The first of equal elements wins, which only a stable sort promises."""
    axis, largest = node.integer("axis", -1), node.flag("largest", default=True)
    node.ignore("sorted")
    node.wants(1)
    fixed = node.integer("k") if node.opset < 10 else None
    node.on_host(1)

    def run(x: Tensor, k: Tensor | None = None) -> Result:
        count = fixed if k is None else scalar(k)
        assert count is not None
        keys = x.to(_UNORDERED.get(x.dtype, x.dtype))
        _, order = torch.sort(keys, dim=axis, descending=largest, stable=True)
        places = order.narrow(axis, 0, count)
        return moved(x, lambda value: torch.gather(value, axis, places)), places

    return run


def _non_zero(_: NodeView) -> Op:
    def run(x: Tensor) -> Tensor:
        return torch.nonzero(x).t()

    return run


def _unique(node: NodeView) -> Op:
    axis = node.integer("axis") if node.has("axis") else None
    ordered = node.flag("sorted", default=True)
    for output in (1, 2, 3):
        node.wants(output)

    def run(x: Tensor) -> Result:
        source = x.reshape(-1) if axis is None else x
        over = axis or 0
        values, inverse, counts = torch.unique(
            source, sorted=True, return_inverse=True, return_counts=True, dim=over
        )
        inverse = inverse.reshape(-1)
        places = torch.arange(inverse.numel(), device=x.device)
        first = torch.full_like(counts, inverse.numel())
        first = first.scatter_reduce(0, inverse, places, "amin")
        if ordered:
            return values, first, inverse, counts
        order = torch.argsort(first)
        rank = torch.argsort(order)
        return values.index_select(over, order), first[order], rank[inverse], counts[order]

    return run


SEARCHING: Table = {"NonZero": _non_zero, "TopK": _top_k, "Unique": _unique}
