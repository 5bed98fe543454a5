"""Operators that make, rearrange, cut, pick from or order tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.element_types import moved
from compressor.models.executor.node import (
    Host,
    Ints,
    Node,
    Operator,
    Read,
    Table,
    along,
    integers,
    one_of,
    positive,
    wanted,
)
from compressor.models.executor.ops.reference import BY_REFERENCE
from compressor.models.executor.program import Result

# Shapes.


def _reshape(x: Tensor, shape: Host, *, allowzero: bool = False) -> Tensor:
    """A 0 copies the axis of the input, unless zeros are allowed."""
    sizes = integers(shape)
    if not allowzero:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    first = axis + x.dim() if axis < 0 else axis
    return x.reshape(x.shape[:first].numel(), x.shape[first:].numel())


def _transpose(x: Tensor, *, perm: Ints = None) -> Tensor:
    return x.permute(perm if perm is not None else tuple(reversed(range(x.dim()))))


def _squeeze(x: Tensor, axes: Host | None = None) -> Tensor:
    if axes is None:
        return x.squeeze()
    dropped = positive(integers(axes), x.dim())
    for axis in dropped:
        if x.shape[axis] != 1:
            raise ValueError(f"axis {axis} has {x.shape[axis]} elements, not one")
    return x.squeeze(dropped)


def _unsqueeze(x: Tensor, axes: Host) -> Tensor:
    added = integers(axes)
    for axis in sorted(positive(added, x.dim() + len(added))):
        x = x.unsqueeze(axis)
    return x


def _expand(x: Tensor, shape: Host) -> Tensor:
    """Broadcast with a shape; an axis of one takes the other's length."""
    sizes = [-1 if size == 1 else size for size in integers(shape)]  # -1 leaves an axis as it is
    x = x[(None,) * (len(sizes) - x.dim())]
    return x.expand([-1] * (x.dim() - len(sizes)) + sizes)


def _tile(x: Tensor, repeats: Host) -> Tensor:
    return x.repeat(integers(repeats))


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


_FORM = one_of("DCR", "CRD")


def _swapped(x: Tensor, outer: int) -> Tensor:
    """Swap two factors of the channels: the outer one, of this length, becomes the inner one."""
    return x.reshape(x.shape[0], outer, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = _FORM) -> Tensor:
    x = _swapped(x, blocksize**2) if mode == "DCR" else x
    return functional.pixel_shuffle(x, blocksize)


def _space_to_depth(x: Tensor, *, blocksize: int, mode: str = _FORM) -> Tensor:
    blocks = functional.pixel_unshuffle(x, blocksize)
    return _swapped(blocks, x.shape[1]) if mode == "DCR" else blocks


def _concat(*inputs: Tensor, axis: int) -> Tensor:
    return torch.cat(inputs, axis)


# Tensors from next to nothing.


def _constant_of_shape(shape: Host, *, value: Tensor | None = None) -> Tensor:
    fill = torch.zeros(1) if value is None else value
    sizes = integers(shape)
    return moved(fill.reshape(()), lambda element: element.expand(sizes).contiguous())


def _range(start: Host, limit: Host, delta: Host) -> Tensor:
    first, last, step = start.item(), limit.item(), delta.item()
    count = max(math.ceil((last - first) / step), 0)
    narrow = start.dtype in (torch.float16, torch.bfloat16)
    steps = torch.arange(count, dtype=torch.float32 if narrow else start.dtype)
    return (first + steps * step).to(start.dtype)


def _check_not_training(node: Node) -> None:
    value = node.input(2)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is not None and tensor.numpy().item():
        raise node.refuse("its input 'training_mode' is true")


_MASK = wanted(1)


def _dropout(
    x: Tensor, _: Host | None = None, training: Host | None = None, *, mask: bool = _MASK
) -> Result:
    if training is not None and bool(training.item()):
        raise ValueError("training_mode is true; export the model for inference")
    return (x, torch.ones_like(x, dtype=torch.bool)) if mask else x


# Rows cut out or put around.


def _slice(
    x: Tensor, starts: Host, ends: Host, axes: Host | None = None, steps: Host | None = None
) -> Tensor:
    begins = integers(starts)
    over = positive(range(len(begins)) if axes is None else integers(axes), x.dim())
    strides = [1] * len(begins) if steps is None else integers(steps)
    bounds = [slice(None)] * x.dim()
    for start, end, axis, step in zip(begins, integers(ends), over, strides, strict=True):
        # Python's own rules for bounds outside the axis are ONNX's.
        rows = range(*slice(start, end, step).indices(x.shape[axis]))
        if step > 0:
            bounds[axis] = slice(rows.start, rows.stop, step)
        else:
            x = rows_of(x, axis, torch.tensor(list(rows), dtype=torch.int64))
    return x[tuple(bounds)]


def rows_of(x: Tensor, axis: int, rows: Tensor) -> Tensor:
    """Return rows of an axis, which may have any element type and lie on any device."""
    return moved(x, lambda value: value.index_select(axis, rows.to(x.device)))


_PARTS: Any = Read(lambda node, _: node.output_count)


def _split(x: Tensor, split: Host | None = None, *, axis: int = 0, parts: int = _PARTS) -> Result:
    if split is not None:
        return torch.split(x, integers(split), axis)
    width = -(-x.shape[axis] // parts)
    return torch.split(x, [width] * (parts - 1) + [x.shape[axis] - width * (parts - 1)], axis)


def _pad(
    x: Tensor,
    pads: Host,
    value: Host | None = None,
    axes: Host | None = None,
    *,
    mode: str = one_of("constant", "reflect", "edge", "wrap"),
) -> Tensor:
    amounts = integers(pads)
    over = positive(range(x.dim()) if axes is None else integers(axes), x.dim())
    before, after = amounts[: len(over)], amounts[len(over) :]
    if mode == "constant":
        pairs = [0] * (2 * x.dim())
        for axis, first, last in zip(over, before, after, strict=True):
            pairs[2 * (x.dim() - 1 - axis)] = first
            pairs[2 * (x.dim() - 1 - axis) + 1] = last
        return functional.pad(x, pairs, value=0.0 if value is None else value.item())
    for axis, first, last in zip(over, before, after, strict=True):
        if first or last:
            length = x.shape[axis]
            places = torch.arange(-first, length + last)
            x = rows_of(x, axis, _SOURCES[mode](places, length))
    return x


def _reflected(places: Tensor, length: int) -> Tensor:
    period = max(2 * (length - 1), 1)
    rows = places % period
    return torch.where(rows < length, rows, period - rows)


_SOURCES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "edge": lambda places, length: places.clamp(0, length - 1),
    "reflect": _reflected,
    "wrap": lambda places, length: places % length,
}
"""Which row of the input lies at each place, by mode; the input has places 0 to length - 1."""


def _triangle(x: Tensor, k: Host | None = None, *, upper: bool = True) -> Tensor:
    diagonal = 0 if k is None else int(k.item())
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


# Places given by a tensor.


def _wrapped(indices: Tensor, length: int) -> Tensor:
    """Count indices from the front, as torch wants them."""
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + length, indices)


def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    over = axis % x.dim()
    rows = _wrapped(indices.reshape(-1), x.shape[over])
    picked = moved(x, lambda value: value.index_select(over, rows))
    return picked.reshape((*x.shape[:over], *indices.shape, *x.shape[over + 1 :]))


def _gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    places = _wrapped(indices, x.shape[axis])
    return moved(x, lambda value: torch.gather(value, axis, places))


def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    batches = (
        along(torch.arange(length, device=indices.device), axis, indices.dim() - 1)
        for axis, length in enumerate(x.shape[:batch_dims])
    )
    places = (*batches, *indices.unbind(-1))
    return moved(x, lambda value: value[places])


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(
    x: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    reduction: str = one_of("none", *_REDUCTIONS),
) -> Tensor:
    places = _wrapped(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[reduction], include_self=True)


def _scatter_nd(
    x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = one_of("none", "add")
) -> Tensor:
    return x.index_put(indices.unbind(-1), updates, accumulate=reduction == "add")


def _compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    source = x.reshape(-1) if axis is None else x
    return source.index_select(axis or 0, torch.nonzero(condition).reshape(-1))


# Order.


_ORDERED = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


def _top_k(x: Tensor, k: Host, *, axis: int = -1, largest: bool = True) -> Result:
    """The first of equal elements wins, which only a stable sort promises."""
    keys = x.to(_ORDERED.get(x.dtype, x.dtype))
    _, order = torch.sort(keys, dim=axis, descending=largest, stable=True)
    places = order.narrow(axis, 0, int(k.item()))
    return moved(x, lambda value: torch.gather(value, axis, places)), places


def _unique(x: Tensor, *, axis: int | None = None, sorted: bool = True) -> Result:
    over = axis or 0
    values, inverse, counts = torch.unique(
        x.reshape(-1) if axis is None else x,
        sorted=True,
        return_inverse=True,
        return_counts=True,
        dim=over,
    )
    inverse = inverse.reshape(-1)
    places = torch.arange(inverse.numel(), device=x.device)
    first = torch.full_like(counts, inverse.numel())
    first = first.scatter_reduce(0, inverse, places, "amin")
    if sorted:
        return values, first, inverse, counts
    order = torch.argsort(first)
    rank = torch.argsort(order)
    return values.index_select(over, order), first[order], rank[inverse], counts[order]


SHAPES: Table = {
    "Compress": Operator(_compress),
    "Concat": Operator(_concat),
    "ConstantOfShape": Operator(_constant_of_shape),
    "DepthToSpace": Operator(_depth_to_space),
    "Dropout": Operator(_dropout, ignored=("seed",), check=_check_not_training),
    "Expand": Operator(_expand),
    "Flatten": Operator(_flatten),
    "Gather": Operator(_gather),
    "GatherElements": Operator(_gather_elements),
    "GatherND": Operator(_gather_nd),
    "NonZero": Operator(lambda x: torch.nonzero(x).t()),
    "Pad": Operator(_pad),
    "Range": Operator(_range),
    "Reshape": Operator(_reshape),
    "ScatterElements": Operator(_scatter_elements),
    "ScatterND": Operator(_scatter_nd, otherwise=BY_REFERENCE),
    "Shape": Operator(_shape),
    "Size": Operator(lambda x: torch.tensor(x.numel(), dtype=torch.int64)),
    "Slice": Operator(_slice),
    "SpaceToDepth": Operator(_space_to_depth),
    "Split": Operator(_split, outputs=None, ignored=("num_outputs",)),
    "Squeeze": Operator(_squeeze),
    "Tile": Operator(_tile),
    "TopK": Operator(_top_k, outputs=2, ignored=("sorted",)),
    "Transpose": Operator(_transpose),
    "Trilu": Operator(_triangle),
    "Unique": Operator(_unique, outputs=4),
    "Unsqueeze": Operator(_unsqueeze),
}
