"""Convolution and transposed convolution over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.windows import Pads, Window, split_pads
from compressor.models.executor.program import Op

Convolve: TypeAlias = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def convolution(node: NodeView) -> Convolve:
    """Prepare a convolution from the attributes that all its variants share.

    Returns:
        A function of input, weight and bias.
    """
    window = Window.of(node)
    groups = node.integer("group", 1)
    node.ignore("kernel_shape")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rank = x.dim() - 2
        pads = window.pads(x.shape[2:], weight.shape[2:])
        padding: Sequence[int] = pads.before
        if not pads.symmetric:
            x, padding = pads.apply(x), (0,) * rank
        return torch.convolution(
            x,
            weight,
            bias,
            window.strides(rank),
            padding,
            window.dilations(rank),
            False,
            (0,) * rank,
            groups,
        )

    return run


def _conv(node: NodeView) -> Op:
    convolve = convolution(node)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(x, weight, bias)

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
        wanted = list(output_shape[-rank:])
    elif window.auto_pad in ("NOTSET", "VALID"):
        return window.pads(size, size)
    else:
        wanted = [a * b for a, b in zip(size, window.strides(rank), strict=True)]
    totals = [length + rows - want for length, rows, want in zip(full, extra, wanted, strict=True)]
    return split_pads(totals, upper=window.auto_pad == "SAME_UPPER")


CONVOLUTION: Table = {"Conv": _conv, "ConvTranspose": _conv_transpose}
