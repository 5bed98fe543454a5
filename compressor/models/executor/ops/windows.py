"""Operators whose kernel slides over spatial axes: convolutions, pools, sums of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import (
    Ints,
    Node,
    Operator,
    Read,
    Table,
    along,
    one_of,
    settings,
    wanted,
)
from compressor.models.executor.program import Result

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
    """How a kernel slides over the spatial axes, and what is put around the tensor."""

    pads: Ints = None
    strides: Ints = None
    dilations: Ints = None
    auto_pad: str = _AUTO_PAD

    def moves(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return strides and dilations of so many spatial axes."""
        return self.strides or (1,) * rank, self.dilations or (1,) * rank

    def around(self, size: Sequence[int], kernel: Sequence[int]) -> Pads:
        """Return the pads for an input of this spatial size.

        ``SAME`` means ceil(size / stride) outputs, the odd row going to the end (upper) or to
        the beginning (lower).
        """
        rank = len(size)
        if not self.auto_pad.startswith("SAME"):
            pads = self.pads if self.pads and self.auto_pad == "NOTSET" else (0,) * 2 * rank
            return Pads(pads[:rank], pads[rank:])
        totals = []
        for length, width, stride, dilation in zip(size, kernel, *self.moves(rank), strict=True):
            outputs = -(-length // stride)
            totals.append(max((outputs - 1) * stride + (width - 1) * dilation + 1 - length, 0))
        return self.halved(totals)

    def halved(self, totals: Sequence[int]) -> Pads:
        """Halve the padding of each axis; an odd row goes to the end (upper) or the beginning."""
        smaller = tuple(total // 2 for total in totals)
        larger = tuple(total - total // 2 for total in totals)
        return Pads(smaller, larger) if self.auto_pad == "SAME_UPPER" else Pads(larger, smaller)


_PICTURES = 4  # axes: samples, channels, height and width

WINDOW: Any = settings(Window)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    window: Window = WINDOW,
    group: int = 1,
) -> Tensor:
    """Convolution of ``[batch, channels, ...]`` with ``[rows, channels / group, ...]``."""
    zeros = (0,) * (x.dim() - 2)
    pads = window.around(x.shape[2:], weight.shape[2:])
    strides, dilations = window.moves(len(zeros))
    padding: Sequence[int] = pads.before
    if not pads.symmetric:
        x, padding = pads.apply(x), zeros
    if x.dim() == _PICTURES and x.is_cpu and not torch.compiler.is_exporting():
        # As oneDNN computes; else it would turn values each time.
        x = x.contiguous(memory_format=torch.channels_last)
    return torch.convolution(x, weight, bias, strides, padding, dilations, False, zeros, group)


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    window: Window = WINDOW,
    group: int = 1,
    output_padding: Ints = None,
    output_shape: Ints = None,
) -> Tensor:
    """Transposed convolution; what torch's padding cannot express is cut from the full result."""
    size, zeros = x.shape[2:], (0,) * (x.dim() - 2)
    strides, dilations = window.moves(len(size))
    extra: Sequence[int] = output_padding or zeros
    if output_shape is None and not window.auto_pad.startswith("SAME"):
        pads = window.around(size, size)
    else:
        # What is cut off the full result follows from the lengths that are asked for.
        if output_shape is None:
            lengths = [length * stride for length, stride in zip(size, strides, strict=True)]
        else:
            lengths = list(output_shape[-len(size) :])
        axes = zip(size, strides, weight.shape[2:], dilations, extra, lengths, strict=True)
        totals = [
            (rows - 1) * stride + (width - 1) * dilation + 1 + more - length
            for rows, stride, width, dilation, more, length in axes
        ]
        pads = window.halved([max(total, 0) for total in totals])
        if output_shape is not None:  # what is longer than the full result gets rows behind it
            extra = [more + max(-total, 0) for more, total in zip(extra, totals, strict=True)]
    native = pads.symmetric and all(
        rows < max(stride, dilation)
        for rows, stride, dilation in zip(extra, strides, dilations, strict=True)
    )
    if native:
        return torch.convolution(
            x, weight, bias, strides, pads.before, dilations, True, extra, group
        )
    result = torch.convolution(x, weight, None, strides, zeros, dilations, True, zeros, group)
    cut = Pads(tuple(-rows for rows in pads.before), tuple(-rows for rows in pads.after))
    result = (cut + extra).apply(result)
    return result if bias is None else result + along(bias, 1, x.dim())


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


def _kernel(node: Node, name: str) -> Ints:
    kernel: Ints = node.read(name, "Ints", None)
    if kernel is None or not 1 <= len(kernel) <= 3:
        raise node.refuse(f"attribute '{name}' does not have one to three axes")
    return kernel


_KERNEL: Any = Read(_kernel)


@dataclass(frozen=True)
class _Pool(Window):
    """The window of a pool, with the rows that ``ceil_mode`` adds."""

    kernel_shape: tuple[int, ...] = _KERNEL
    ceil_mode: bool = False

    def placed(self, x: Tensor) -> tuple[tuple[int, ...], Pads, list[int]]:
        """Return the kernel, the pads, and how many rows beyond them the last windows take.

        A window that would start in the padding after the tensor is left out. Where only one is
        left, the kernel is cut to what it covers: some networks average whole planes with a
        kernel that is a hundred times as large.
        """
        rows, kernel = [0] * len(self.kernel_shape), list(self.kernel_shape)
        pads = self.around(x.shape[2:], kernel)
        strides, dilations = self.moves(len(kernel))
        for i, length in enumerate(x.shape[2:] if self.ceil_mode else ()):
            padded = length + pads.before[i] + pads.after[i]
            width = (kernel[i] - 1) * dilations[i] + 1
            windows = -(-(padded - width) // strides[i]) + 1
            if (windows - 1) * strides[i] >= length + pads.before[i]:
                windows -= 1
            rows[i] = max((windows - 1) * strides[i] + width - padded, 0)
            if windows <= 1 and rows[i]:
                kernel[i] = -(-(padded - 1) // dilations[i]) + 1
                rows[i] = (kernel[i] - 1) * dilations[i] + 1 - padded
        return tuple(kernel), pads, rows

    def sums(self, padded: Tensor, kernel: Sequence[int]) -> Tensor:
        """Return the sum of each window."""
        strides, dilations = self.moves(len(kernel))
        if all(dilation == 1 for dilation in dilations):
            return _AVERAGE_POOLS[len(kernel)](padded, kernel, strides) * math.prod(kernel)
        batch, channels = padded.shape[:2]
        ones = torch.ones((1, 1, *kernel), dtype=padded.dtype, device=padded.device)
        planes = padded.reshape(batch * channels, 1, *padded.shape[2:])
        zeros = (0,) * len(kernel)
        result = torch.convolution(planes, ones, None, strides, zeros, dilations, False, zeros, 1)
        return result.reshape(batch, channels, *result.shape[2:])


_POOL: Any = settings(_Pool)
_INDICES = wanted(1)


def _pads_itself(pads: Pads, kernel: Sequence[int], extra: Sequence[int]) -> bool:
    """Whether PyTorch's pools take these pads."""
    halves = all(2 * rows <= width for rows, width in zip(pads.before, kernel, strict=True))
    return pads.symmetric and halves and not any(extra)


def _max_pool(
    x: Tensor, *, pool: _Pool = _POOL, storage_order: bool = False, indices: bool = _INDICES
) -> Result:
    kernel, pads, extra = pool.placed(x)
    strides, dilations = pool.moves(len(kernel))
    if x.is_floating_point() and not indices and _pads_itself(pads, kernel, extra):
        return _MAX_POOLS[len(kernel)](x, kernel, strides, pads.before, dilations)[0]
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = (pads + extra if any(extra) else pads).apply(x, lowest)
    if x.dtype.itemsize == 1:
        # With channels last, PyTorch counts the places in the same type; GPUs have no kernel.
        padded = padded.contiguous() if x.is_cpu else padded.half()
    result, places = _MAX_POOLS[len(kernel)](padded, kernel, strides, 0, dilations)
    result = result.to(x.dtype)
    if not indices:
        return result
    return result, _indices(places, x, padded.shape[2:], pads.before, storage_order)


def _indices(
    places: Tensor, x: Tensor, padded: Sequence[int], before: Sequence[int], column_major: bool
) -> Tensor:
    """Turn places in a padded plane into places in the whole tensor without padding."""
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    flat = planes.reshape(x.shape[0], x.shape[1], *(1,) * len(padded))
    axes = list(enumerate(torch.unravel_index(places, padded)))
    for axis, place in reversed(axes) if column_major else axes:
        flat = flat * x.shape[2 + axis] + place - before[axis]
    return flat


def _average_pool(x: Tensor, *, pool: _Pool = _POOL, count_include_pad: bool = False) -> Tensor:
    kernel, pads, extra = pool.placed(x)
    strides, dilations = pool.moves(len(kernel))
    around = pads + extra
    if _pads_itself(pads, kernel, extra) and all(dilation == 1 for dilation in dilations):
        pool_of = _AVERAGE_POOLS[len(kernel)]
        return pool_of(x, kernel, strides, pads.before, False, count_include_pad)
    total = pool.sums(around.apply(x), kernel)
    counted = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if count_include_pad:
        zeros = (0,) * len(kernel)
        counted = (Pads(zeros, zeros) + extra).apply(pads.apply(counted, 1.0))
    else:
        counted = around.apply(counted)
    return total / pool.sums(counted, kernel)


def _over_plane(function: Callable[..., Tensor]) -> Operator:
    return Operator(lambda x: function(x, list(range(2, x.dim())), keepdim=True))


WINDOWS: Table = {
    "AveragePool": Operator(_average_pool),
    "Conv": Operator(convolution, ignored=("kernel_shape",)),
    "ConvTranspose": Operator(_conv_transpose, ignored=("kernel_shape",)),
    "GlobalAveragePool": _over_plane(torch.mean),
    "GlobalMaxPool": _over_plane(torch.amax),
    "MaxPool": Operator(_max_pool),
}
