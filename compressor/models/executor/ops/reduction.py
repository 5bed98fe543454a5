"""Reductions over axes, running sums, and places of extremes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.models.executor.dtypes import widened
from compressor.models.executor.node import Builder, NodeView, Table
from compressor.models.executor.ops.host import integers, positive, scalar
from compressor.models.executor.program import Op

Reduce = Callable[[Tensor, "list[int]", bool], Tensor]


def _reduction(function: Reduce) -> Builder:
    """Axes are an attribute in older opsets and an input in newer ones."""

    def build(node: NodeView) -> Op:
        keep = node.flag("keepdims", default=True)
        fixed = node.integers("axes")
        nothing = node.flag("noop_with_empty_axes")
        node.on_host(1)

        def run(x: Tensor, axes: Tensor | None = None) -> Tensor:
            chosen = list(fixed or ()) if axes is None else integers(axes)
            if not chosen and not nothing:
                chosen = list(range(x.dim()))
            over = positive(chosen, x.dim())
            return widened(lambda value: function(value, over, keep))(x)

        return run

    return build


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    # An empty list of axes means every axis to torch.
    return x.sum(axes, keepdim=keep, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return x
    if x.is_floating_point() or x.is_complex():
        return x.mean(axes, keepdim=keep)
    total = x.sum(axes, keepdim=keep)
    count = x.numel() // max(total.numel(), 1)
    return torch.div(total, count, rounding_mode="trunc").to(x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _extreme(function: Callable[..., Tensor], sign: int) -> Reduce:
    def reduce(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return x
        if all(x.shape[axis] for axis in axes):
            return function(x, axes, keepdim=keep)
        shape = x.sum(axes, keepdim=keep).shape
        return torch.full(shape, _worst(x.dtype, sign), dtype=x.dtype, device=x.device)

    return reduce


def _worst(dtype: torch.dtype, sign: int) -> float:
    """Return the extreme of no values at all: the opposite end of the type's range."""
    if dtype.is_floating_point:
        return -sign * float("inf")
    if dtype == torch.bool:
        return float(sign < 0)
    limits = torch.iinfo(dtype)
    return limits.min if sign > 0 else limits.max


def _l1(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _sum(x.abs(), axes, keep)


def _l2(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sqrt(_sum(x * x, axes, keep)).to(x.dtype)


def _sum_of_squares(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return _sum(x * x, axes, keep)


def _log_of_sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.log(_sum(x, axes, keep)).to(x.dtype)


def _log_of_sum_of_powers(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return torch.log(torch.exp(x)).to(x.dtype)
    wide = x if x.is_floating_point() else x.to(torch.float64)
    return torch.logsumexp(wide, axes, keepdim=keep).to(x.dtype)


def _place(function: Callable[..., Tensor]) -> Builder:
    """The first place of the extreme along an axis, or the last one."""

    def build(node: NodeView) -> Op:
        axis, keep = node.integer("axis", 0), node.flag("keepdims", default=True)
        last = node.flag("select_last_index")

        def run(x: Tensor) -> Tensor:
            if not last:
                return function(x, axis, keepdim=keep)
            return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)

        return run

    return build


def _running(function: Callable[..., Tensor], neutral: int) -> Builder:
    def build(node: NodeView) -> Op:
        exclusive, reverse = node.flag("exclusive"), node.flag("reverse")
        node.on_host(1)

        def run(x: Tensor, axis: Tensor) -> Tensor:
            over = scalar(axis)
            values = x.flip(over) if reverse else x
            if exclusive:
                start = torch.full_like(values.narrow(over, 0, 1), neutral)
                values = torch.cat([start, values.narrow(over, 0, x.shape[over] - 1)], over)
            result = function(values, over, dtype=x.dtype)
            return result.flip(over) if reverse else result

        return run

    return build


REDUCTION: Table = {
    "ArgMax": _place(torch.argmax),
    "ArgMin": _place(torch.argmin),
    "CumProd": _running(torch.cumprod, 1),
    "CumSum": _running(torch.cumsum, 0),
    "ReduceL1": _reduction(_l1),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(_log_of_sum),
    "ReduceLogSumExp": _reduction(_log_of_sum_of_powers),
    "ReduceMax": _reduction(_extreme(torch.amax, 1)),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(_extreme(torch.amin, -1)),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(_sum_of_squares),
}
