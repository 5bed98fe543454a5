"""Operators whose kernel slides over spatial axes: convolutions, pools, sums of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import (
    Builder,
    Host,
    Ints,
    NodeView,
    Table,
    integers,
    one_of,
    operator,
)
from compressor.models.executor.program import Op, Result

_AUTO_PAD = one_of("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Pads:
    """Rows added before and after each spatial axis; negative ones are cut off."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether torch's own padding can express these."""
        return self.before == self.after and min(self.before, default=0) >= 0

    def apply(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Pad the last axes of a tensor with a value."""
        if not any(self.before) and not any(self.after):
            return x
        pairs = zip(reversed(self.before), reversed(self.after), strict=True)
        return functional.pad(x, [amount for pair in pairs for amount in pair], value=value)

    def __add__(self, extra: Sequence[int]) -> Pads:
        """Return these pads with more rows after each axis."""
        return Pads(self.before, tuple(a + b for a, b in zip(self.after, extra, strict=True)))


@dataclass(frozen=True)
class Window:
    """How a kernel slides over the spatial axes, as far as the attributes say."""

    auto_pad: str
    explicit_pads: tuple[int, ...] | None
    explicit_strides: tuple[int, ...] | None
    explicit_dilations: tuple[int, ...] | None

    @staticmethod
    def of(node: NodeView) -> Window:
        """Read the attributes of a convolution or a pool."""
        return Window(
            _AUTO_PAD.how(node, "auto_pad"),
            node.integers("pads"),
            node.integers("strides"),
            node.integers("dilations"),
        )

    def strides(self, rank: int) -> tuple[int, ...]:
        """Return one stride a spatial axis."""
        return self.explicit_strides or (1,) * rank

    def dilations(self, rank: int) -> tuple[int, ...]:
        """Return one dilation a spatial axis."""
        return self.explicit_dilations or (1,) * rank

    def pads(self, size: Sequence[int], kernel: Sequence[int]) -> Pads:
        """Return the padding for an input of this spatial size.

        ``SAME`` means ceil(size / stride) outputs, the odd row going to the end (upper) or to
        the beginning (lower).
        """
        rank = len(size)
        if self.auto_pad == "NOTSET":
            pads = self.explicit_pads or (0,) * (2 * rank)
            return Pads(pads[:rank], pads[rank:])
        if self.auto_pad == "VALID":
            return Pads((0,) * rank, (0,) * rank)
        totals = []
        windows = zip(size, kernel, self.strides(rank), self.dilations(rank), strict=True)
        for length, width, stride, dilation in windows:
            outputs = -(-length // stride)
            totals.append(max((outputs - 1) * stride + (width - 1) * dilation + 1 - length, 0))
        return split_pads(totals, upper=self.auto_pad == "SAME_UPPER")


def split_pads(totals: Sequence[int], *, upper: bool) -> Pads:
    """Halve the padding of each axis; an odd row goes to the end (upper) or to the beginning."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - total // 2 for total in totals)
    return Pads(smaller, larger) if upper else Pads(larger, smaller)


def convolution(node: NodeView) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Prepare a convolution of input, weight and bias from the attributes of all its variants."""
    window = Window.of(node)
    groups = node.integer("group", 1)
    node.ignore("kernel_shape")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        pads = window.pads(x.shape[2:], weight.shape[2:])
        strides, dilations, zeros = window.strides(rank), window.dilations(rank), (0,) * rank
        padding: Sequence[int] = pads.before
        if not pads.symmetric:
            x, padding = pads.apply(x), zeros
        return torch.convolution(x, weight, bias, strides, padding, dilations, False, zeros, groups)

    return run


def _conv_transpose(node: NodeView) -> Op:
    """Transposed convolution; what torch's padding cannot express is cut from the full result."""
    window = Window.of(node)
    groups = node.integer("group", 1)
    extra_rows = node.integers("output_padding")
    output_shape = node.integers("output_shape")
    node.ignore("kernel_shape")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        strides, dilations = window.strides(rank), window.dilations(rank)
        extra = extra_rows or (0,) * rank
        full = [
            (length - 1) * stride + (width - 1) * dilation + 1
            for length, stride, width, dilation in zip(
                x.shape[2:], strides, weight.shape[2:], dilations, strict=True
            )
        ]
        pads = _transposed_pads(window, output_shape, x.shape[2:], full, extra)
        native = pads.symmetric and all(
            rows < max(stride, dilation)
            for rows, stride, dilation in zip(extra, strides, dilations, strict=True)
        )
        padding = pads.before if native else (0,) * rank
        added = extra if native else (0,) * rank
        result = torch.convolution(
            x, weight, bias if native else None, strides, padding, dilations, True, added, groups
        )
        if native:
            return result
        cut = Pads(
            tuple(-rows for rows in pads.before),
            tuple(more - rows for more, rows in zip(extra, pads.after, strict=True)),
        )
        result = cut.apply(result)
        return result if bias is None else result + bias.reshape(-1, *(1,) * rank)

    return run


def _transposed_pads(
    window: Window,
    output_shape: tuple[int, ...] | None,
    size: Sequence[int],
    full: Sequence[int],
    extra: Sequence[int],
) -> Pads:
    """Return what is cut off the full result, which an output shape decides where it is given."""
    rank = len(size)
    if output_shape is not None:
        lengths = list(output_shape[-rank:])
    elif window.auto_pad in ("NOTSET", "VALID"):
        return window.pads(size, size)
    else:
        lengths = [a * b for a, b in zip(size, window.strides(rank), strict=True)]
    totals = [all_rows + more - n for all_rows, more, n in zip(full, extra, lengths, strict=True)]
    return split_pads(totals, upper=window.auto_pad == "SAME_UPPER")


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
    places: Tensor, x: Tensor, padded: Sequence[int], before: Sequence[int], column_major: bool
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


def _over_plane(function: Callable[..., Tensor]) -> Builder:
    def run(x: Tensor) -> Tensor:
        axes = list(range(2, x.dim()))
        return function(x, axes, keepdim=True) if axes else x

    return operator(run)


def _col2im(
    x: Tensor,
    image_shape: Host,
    block_shape: Host,
    *,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Tensor:
    """Sum the blocks of an image where they overlap."""
    image, block = integers(image_shape), integers(block_shape)
    rank = len(image)
    before, after = (pads or (0,) * 2 * rank)[:rank], (pads or (0,) * 2 * rank)[rank:]
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    padded = [n + a + b for n, a, b in zip(image, before, after, strict=True)]
    place = torch.zeros((1,) * 2 * rank, dtype=torch.int64, device=x.device)
    for axis in range(rank):
        width = (block[axis] - 1) * spread[axis] + 1
        blocks = (padded[axis] - width) // steps[axis] + 1
        rows = torch.arange(block[axis], device=x.device) * spread[axis]
        starts = torch.arange(blocks, device=x.device) * steps[axis]
        shape = [1] * 2 * rank
        shape[axis], shape[rank + axis] = block[axis], blocks
        place = place * padded[axis] + (rows[:, None] + starts[None, :]).reshape(shape)
    batch, channels = x.shape[0], x.shape[1] // max(math.prod(block), 1)
    flat = x.new_zeros(batch, channels, math.prod(padded))
    result = flat.index_add(2, place.reshape(-1), x.reshape(batch, channels, -1))
    result = result.reshape(batch, channels, *padded)
    for axis in range(rank):
        result = result.narrow(axis + 2, before[axis], image[axis])
    return result


WINDOWS: Table = {
    "AveragePool": _average_pool,
    "Col2Im": operator(_col2im),
    "Conv": convolution,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": _over_plane(torch.mean),
    "GlobalMaxPool": _over_plane(torch.amax),
    "MaxPool": _max_pool,
}
