"""Operators that rearrange a tensor or tell its shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import integers, positive
from compressor.models.executor.program import Op


def _reshape(node: NodeView) -> Op:
    """A 0 copies the axis of the input, unless zeros are allowed."""
    keep_zero = node.flag("allowzero")
    node.on_host(1)

    def run(x: Tensor, shape: Tensor) -> Tensor:
        sizes = integers(shape)
        if not keep_zero:
            sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
        return x.reshape(sizes)

    return run


def _flatten(node: NodeView) -> Op:
    axis = node.integer("axis", 1)

    def run(x: Tensor) -> Tensor:
        first = axis + x.dim() if axis < 0 else axis
        return x.reshape(x.shape[:first].numel(), x.shape[first:].numel())

    return run


def _transpose(node: NodeView) -> Op:
    order = node.integers("perm")

    def run(x: Tensor) -> Tensor:
        return x.permute(order if order is not None else tuple(reversed(range(x.dim()))))

    return run


def _squeeze(node: NodeView) -> Op:
    fixed = node.integers("axes")
    node.on_host(1)

    def run(x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = fixed if axes is None else integers(axes)
        if chosen is None:
            return x.squeeze()
        dropped = positive(chosen, x.dim())
        for axis in dropped:
            if x.shape[axis] != 1:
                raise ValueError(f"axis {axis} has {x.shape[axis]} elements, not one")
        return x.squeeze(dropped)

    return run


def _unsqueeze(node: NodeView) -> Op:
    fixed = node.integers("axes")
    node.on_host(1)

    def run(x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = list(fixed or ()) if axes is None else integers(axes)
        for axis in sorted(positive(chosen, x.dim() + len(chosen))):
            x = x.unsqueeze(axis)
        return x

    return run


def _expand(node: NodeView) -> Op:
    node.on_host(1)

    def run(x: Tensor, shape: Tensor) -> Tensor:
        return x.expand(_broadcast(x.shape, integers(shape)))

    return run


def _broadcast(have: Sequence[int], want: Sequence[int]) -> list[int]:
    """Return the shape that both broadcast to; an axis of one takes the other's length."""
    rank = max(len(have), len(want))
    pairs = zip(
        [1] * (rank - len(have)) + list(have), [1] * (rank - len(want)) + list(want), strict=True
    )
    return [b if a == 1 else a for a, b in pairs]


def _tile(node: NodeView) -> Op:
    node.on_host(1)

    def run(x: Tensor, repeats: Tensor) -> Tensor:
        return x.repeat(integers(repeats))

    return run


def _shape(node: NodeView) -> Op:
    start = node.integer("start", 0)
    end = node.integer("end") if node.has("end") else None

    def run(x: Tensor) -> Tensor:
        return torch.tensor(x.shape[start:end], dtype=torch.int64)

    return run


def _size(_: NodeView) -> Op:
    def run(x: Tensor) -> Tensor:
        return torch.tensor(x.numel(), dtype=torch.int64)

    return run


def _concat(node: NodeView) -> Op:
    axis = node.integer("axis")

    def run(*inputs: Tensor) -> Tensor:
        return torch.cat(inputs, axis)

    return run


def _depth_to_space(node: NodeView) -> Op:
    size = node.integer("blocksize")
    columns_first = node.choice("mode", ("DCR", "CRD"), "DCR") == "CRD"

    def run(x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        depth = channels // (size * size)
        if columns_first:
            blocks = x.reshape(batch, depth, size, size, height, width)
            blocks = blocks.permute(0, 1, 4, 2, 5, 3)
        else:
            blocks = x.reshape(batch, size, size, depth, height, width)
            blocks = blocks.permute(0, 3, 4, 1, 5, 2)
        return blocks.reshape(batch, depth, height * size, width * size)

    return run


def _space_to_depth(node: NodeView) -> Op:
    size = node.integer("blocksize")
    columns_first = node.choice("mode", ("DCR", "CRD"), "DCR") == "CRD"

    def run(x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        blocks = x.reshape(batch, channels, height // size, size, width // size, size)
        order = (0, 1, 3, 5, 2, 4) if columns_first else (0, 3, 5, 1, 2, 4)
        return blocks.permute(order).reshape(batch, -1, height // size, width // size)

    return run


def _col2im(node: NodeView) -> Op:
    """Sum the blocks of an image where they overlap."""
    dilations, pads = node.integers("dilations"), node.integers("pads")
    strides = node.integers("strides")
    node.on_host(1, 2)

    def run(x: Tensor, image_shape: Tensor, block_shape: Tensor) -> Tensor:
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
        places = place.reshape(-1)
        batch, channels = x.shape[0], x.shape[1] // max(torch.Size(block).numel(), 1)
        flat = torch.zeros(
            batch, channels, torch.Size(padded).numel(), dtype=x.dtype, device=x.device
        )
        result = flat.index_add(2, places, x.reshape(batch, channels, -1))
        result = result.reshape(batch, channels, *padded)
        for axis in range(rank):
            result = result.narrow(axis + 2, before[axis], image[axis])
        return result

    return run


SHAPE: Table = {
    "Col2Im": _col2im,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "SpaceToDepth": _space_to_depth,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
