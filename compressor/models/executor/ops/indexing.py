"""Operators that read from or write to places given by a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.models.executor.dtypes import moved
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _wrapped(indices: Tensor, length: int) -> Tensor:
    """Count indices from the front, as torch wants them."""
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + length, indices)


def _gather(node: NodeView) -> Op:
    axis = node.integer("axis", 0)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        over = axis % x.dim()
        rows = _wrapped(indices.reshape(-1), x.shape[over])
        found = moved(x, lambda value: value.index_select(over, rows))
        return found.reshape((*x.shape[:over], *indices.shape, *x.shape[over + 1 :]))

    return run


def _gather_elements(node: NodeView) -> Op:
    axis = node.integer("axis", 0)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        places = _wrapped(indices, x.shape[axis])
        return moved(x, lambda value: torch.gather(value, axis, places))

    return run


def _flat_places(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """Turn index tuples (last axis) into places in the flattened axes of these sizes."""
    places = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    for position, length in enumerate(sizes):
        places = places * length + _wrapped(indices[..., position], length)
    return places


def _gather_nd(node: NodeView) -> Op:
    shared = node.integer("batch_dims", 0)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        depth = indices.shape[-1]
        batch, sizes = x.shape[:shared], x.shape[shared : shared + depth]
        rest = x.shape[shared + depth :]
        places = _flat_places(indices, sizes).reshape(batch.numel(), -1)
        offsets = torch.arange(batch.numel(), device=x.device)[:, None] * sizes.numel()
        flat = x.reshape(batch.numel() * sizes.numel(), *rest)
        rows = (places + offsets).reshape(-1)
        found = moved(flat, lambda value: value.index_select(0, rows))
        return found.reshape((*indices.shape[:-1], *rest))

    return run


def _scatter_elements(node: NodeView) -> Op:
    axis = node.integer("axis", 0)
    reduction = node.choice("reduction", ("none", *_REDUCTIONS), "none")

    def run(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        places = _wrapped(indices, x.shape[axis])
        return _scattered(x, axis, places, updates, reduction)

    return run


def _scattered(x: Tensor, axis: int, places: Tensor, updates: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[reduction], include_self=True)


def _scatter_nd(node: NodeView) -> Op:
    reduction = node.choice("reduction", ("none", *_REDUCTIONS), "none")

    def run(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        depth = indices.shape[-1]
        sizes, rest = x.shape[:depth], x.shape[depth:]
        rows = _flat_places(indices, sizes).reshape(-1, 1)
        width = rest.numel()
        flat = x.reshape(sizes.numel(), width)
        values = updates.reshape(rows.shape[0], width)
        return _scattered(flat, 0, rows.expand(-1, width), values, reduction).reshape(x.shape)

    return run


def _tensor_scatter(node: NodeView) -> Op:
    """Write rows into a cache, at another place for each sample."""
    axis = node.integer("axis", -2)
    circular = node.choice("mode", ("linear", "circular"), "linear") == "circular"

    def run(cache: Tensor, update: Tensor, starts: Tensor | None = None) -> Tensor:
        over = axis % cache.dim()
        rows = torch.arange(update.shape[over], device=cache.device)[None, :]
        if starts is not None:
            rows = rows + starts[:, None]
        if circular:
            rows = rows % cache.shape[over]
        shape = [1] * cache.dim()
        shape[0], shape[over] = rows.shape
        return cache.scatter(over, rows.reshape(shape).expand(update.shape), update)

    return run


def _compress(node: NodeView) -> Op:
    axis = node.integer("axis") if node.has("axis") else None

    def run(x: Tensor, condition: Tensor) -> Tensor:
        source = x.reshape(-1) if axis is None else x
        return source.index_select(axis or 0, torch.nonzero(condition).reshape(-1))

    return run


def _one_hot(node: NodeView) -> Op:
    axis = node.integer("axis", -1)
    node.on_host(1)

    def run(indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
        classes = int(depth.item())
        places = _wrapped(indices, classes).unsqueeze(axis)
        shape = [1] * places.dim()
        shape[axis] = classes
        hit = places == torch.arange(classes, device=indices.device).reshape(shape)
        return torch.where(hit, values[1], values[0])

    return run


INDEXING: Table = {
    "Compress": _compress,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
}
