"""Pools over sliding windows and over whole planes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import Builder, NodeView, Table
from compressor.models.executor.ops.windows import Pads, Window
from compressor.models.executor.program import Op, Result

_MAX_POOLS: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: functional.max_pool1d_with_indices,
    2: functional.max_pool2d_with_indices,
    3: functional.max_pool3d_with_indices,
}
_AVERAGE_POOLS: dict[int, Callable[..., Tensor]] = {
    1: functional.avg_pool1d,
    2: functional.avg_pool2d,
    3: functional.avg_pool3d,
}


class _Pool:
    """The window of a pool, with the rows that ``ceil_mode`` adds."""

    def __init__(self, node: NodeView):
        kernel = node.integers("kernel_shape")
        if kernel is None or not 1 <= len(kernel) <= 3:
            raise node.refuse("attribute 'kernel_shape' does not have one to three axes")
        self.kernel = kernel
        self.rank = len(kernel)
        window = Window.of(node)
        self.window = window
        self.strides = window.strides(self.rank)
        self.dilations = window.dilations(self.rank)
        self.ceil = node.flag("ceil_mode")

    def pads(self, x: Tensor) -> Pads:
        """Return the padding that the attributes ask for."""
        return self.window.pads(x.shape[2:], self.kernel)

    def reach(self, x: Tensor, pads: Pads) -> tuple[tuple[int, ...], list[int]]:
        """Return the kernel, and how many rows beyond the padding each axis' last window takes.

        A window that would start in the padding after the tensor is left out. Where only one is
        left, the kernel is cut to what it covers: some networks average whole planes with a
        kernel that is a hundred times as large.
        """
        rows, kernel = [0] * self.rank, list(self.kernel)
        for i, length in enumerate(x.shape[2:] if self.ceil else ()):
            padded = length + pads.before[i] + pads.after[i]
            width = (self.kernel[i] - 1) * self.dilations[i] + 1
            windows = -(-(padded - width) // self.strides[i]) + 1
            if (windows - 1) * self.strides[i] >= length + pads.before[i]:
                windows -= 1
            rows[i] = max((windows - 1) * self.strides[i] + width - padded, 0)
            if windows <= 1 and rows[i]:
                kernel[i] = -(-(padded - 1) // self.dilations[i]) + 1
                rows[i] = (kernel[i] - 1) * self.dilations[i] + 1 - padded
        return tuple(kernel), rows

    def sums(self, padded: Tensor, kernel: Sequence[int]) -> Tensor:
        """Return the sum of each window."""
        if all(dilation == 1 for dilation in self.dilations):
            mean = _AVERAGE_POOLS[self.rank](padded, kernel, self.strides)
            return mean * math.prod(kernel)
        batch, channels = padded.shape[:2]
        ones = torch.ones((1, 1, *kernel), dtype=padded.dtype, device=padded.device)
        planes = padded.reshape(batch * channels, 1, *padded.shape[2:])
        zeros = (0,) * self.rank
        result = torch.convolution(
            planes, ones, None, self.strides, zeros, self.dilations, False, zeros, 1
        )
        return result.reshape(batch, channels, *result.shape[2:])


def _max_pool(node: NodeView) -> Op:
    pool = _Pool(node)
    column_major = node.flag("storage_order")
    wants_indices = node.wants(1)
    highest = _MAX_POOLS[pool.rank]

    def run(x: Tensor) -> Result:
        pads = pool.pads(x)
        lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        kernel, extra = pool.reach(x, pads)
        padded = (pads + extra).apply(x, lowest)
        result, places = highest(padded, kernel, pool.strides, 0, pool.dilations)
        if not wants_indices:
            return result
        return result, _indices(places, x, padded.shape[2:], pads.before, column_major)

    return run


def _indices(
    places: Tensor,
    x: Tensor,
    padded: Sequence[int],
    before: Sequence[int],
    column_major: bool,
) -> Tensor:
    """Turn places in a padded plane into places in the whole tensor without padding."""
    size = x.shape[2:]
    coordinates: list[Tensor] = []
    for axis in reversed(range(len(padded))):
        coordinates.insert(0, places % padded[axis] - before[axis])
        places = places // padded[axis]
    order = range(len(size))
    flat = torch.zeros_like(places)
    for axis in reversed(order) if column_major else order:
        flat = flat * size[axis] + coordinates[axis]
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * math.prod(size)
    return flat + planes.reshape(x.shape[0], x.shape[1], *(1,) * len(size))


def _average_pool(node: NodeView) -> Op:
    pool = _Pool(node)
    whole = node.flag("count_include_pad")
    average = _AVERAGE_POOLS[pool.rank]

    def run(x: Tensor) -> Tensor:
        pads = pool.pads(x)
        kernel, extra = pool.reach(x, pads)
        if not any(pads.before + pads.after) and not any(extra) and _undilated(pool):
            return average(x, kernel, pool.strides)
        total = pool.sums((pads + extra).apply(x), kernel)
        counted = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
        if whole:
            counted = (Pads((0,) * pool.rank, (0,) * pool.rank) + extra).apply(
                pads.apply(counted, 1.0)
            )
        else:
            counted = (pads + extra).apply(counted)
        return total / pool.sums(counted, kernel)

    return run


def _undilated(pool: _Pool) -> bool:
    return all(dilation == 1 for dilation in pool.dilations)


def _lp_pool(node: NodeView) -> Op:
    """(sum of |x|**p)**(1/p) over each window."""
    pool = _Pool(node)
    p = node.integer("p", 2)

    def run(x: Tensor) -> Tensor:
        pads = pool.pads(x)
        kernel, extra = pool.reach(x, pads)
        return pool.sums((pads + extra).apply(x.abs() ** p), kernel) ** (1 / p)

    return run


def _global(function: Callable[[Tensor, list[int]], Tensor]) -> Builder:
    def build(_: NodeView) -> Op:
        def run(x: Tensor) -> Tensor:
            return function(x, list(range(2, x.dim())))

        return run

    return build


def _average_plane(x: Tensor, axes: list[int]) -> Tensor:
    return x.mean(axes, keepdim=True) if axes else x


def _highest_of_plane(x: Tensor, axes: list[int]) -> Tensor:
    return x.amax(axes, keepdim=True) if axes else x


def _global_lp_pool(node: NodeView) -> Op:
    p = node.integer("p", 2)

    def run(x: Tensor) -> Tensor:
        axes = list(range(2, x.dim()))
        return (x.abs() ** p).sum(axes, keepdim=True) ** (1 / p)

    return run


def _max_unpool(node: NodeView) -> Op:
    pool = _Pool(node)
    node.on_host(2)

    def run(x: Tensor, places: Tensor, output_shape: Tensor | None = None) -> Tensor:
        pads = pool.pads(x)
        size = [
            (length - 1) * stride - before - after + width
            for length, stride, before, after, width in zip(
                x.shape[2:], pool.strides, pads.before, pads.after, pool.kernel, strict=True
            )
        ]
        natural = [*x.shape[:2], *size]
        shape = natural if output_shape is None else [int(n) for n in output_shape.tolist()]
        flat = torch.zeros(math.prod(natural), dtype=x.dtype, device=x.device)
        result = flat.scatter(0, places.reshape(-1), x.reshape(-1)).reshape(natural)
        more = [want - have for want, have in zip(shape[2:], size, strict=True)]
        return (Pads((0,) * pool.rank, (0,) * pool.rank) + more).apply(result)

    return run


POOLING: Table = {
    "AveragePool": _average_pool,
    "GlobalAveragePool": _global(_average_plane),
    "GlobalLpPool": _global_lp_pool,
    "GlobalMaxPool": _global(_highest_of_plane),
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
}
