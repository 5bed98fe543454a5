"""Scale channels in front of products in the blocks of a checkpoint that stays in its files.

Each block has a graph without weights, on which it is found what takes factors over; statistics
come from runs of the blocks, and weights are scaled when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from compressor.models.transformers.block_checkpoint import BLOCK, BlockCheckpoint
from compressor.passes.prepare.balance import (
    Rounding,
    ScaledGroup,
    balance,
    picked,
    span_requests,
)
from compressor.passes.prepare.products import with_product_groups
from compressor.passes.prepare.scales import ScaleMap
from compressor.types.carrier import Carrier, WeightChange
from compressor.types.layers import Layer, StoredTensor
from compressor.types.statistics import Request
from compressor.types.tensors import below


@dataclass(frozen=True, eq=False)
class BlockScales:
    """What can be scaled in a block.

    Attributes:
        path: where the block is in the network.
        scales: in the names of the block's own graph.
        rounding: what is going to be quantized, in the same names.
        requests: what calibration has to find, by the key that it has in the block's own names.
    """

    path: str
    scales: ScaleMap
    rounding: Rounding
    requests: Mapping[str, Request]

    def outside(self, name: str) -> str:
        """Return the network's name for a parameter or layer of the block."""
        return f"{self.path}.{name.removeprefix(BLOCK)}"


def block_scales(
    carrier: BlockCheckpoint,
    parameters: Collection[str],
    rounding: Callable[[ScaleMap], Rounding],
) -> tuple[BlockScales, ...]:
    """Return what can be scaled in each block without another operator.

    Args:
        parameters: names of those that may be changed.
        rounding: returns what is going to be quantized.
    """
    found = []
    for index, block in enumerate(carrier.decoder.blocks):
        path = f"{block.path}."
        lowered = carrier.graph_of_block(index)
        free = {BLOCK + name.removeprefix(path) for name in parameters if name.startswith(path)}
        names = [layer.name for layer in lowered.layers() if layer.is_linear]
        scales = with_product_groups(ScaleMap((), (), {}, ""), lowered.graph(), names, free)
        seen = {
            read.value: value
            for group in scales.groups
            for read in group.reads
            if (value := carrier.observed.get(path + read.layer.name.removeprefix(BLOCK)))
        }
        groups = tuple(g for g in scales.groups if not g.inserted and g.reads[0].value in seen)
        scales = replace(scales, groups=groups)
        chosen = rounding(scales)
        requests = {
            request.key: replace(request, tensor=seen[request.tensor])
            for request in span_requests(scales, chosen)
            if request.tensor in seen
        }
        found.append(BlockScales(block.path, scales, chosen, requests))
    return tuple(found)


def scale_block(
    carrier: BlockCheckpoint, block: BlockScales, statistics: Mapping[str, Any]
) -> tuple[ScaledGroup, ...]:
    """Return the groups of a block whose predicted error falls, with their factors.

    Args:
        statistics: results of the block's requests, by ``Request.key``.
    """
    tensors = below(f"{block.path}.", carrier.tensors())
    inside = {BLOCK + name: tensor for name, tensor in tensors.items()}
    found = {
        key: statistics[request.key]
        for key, request in block.requests.items()
        if request.key in statistics
    }
    weights = cast("Carrier", _Weights(inside))
    return balance(weights, block.scales, block.rounding, found).groups


def with_scaled_blocks(
    carrier: BlockCheckpoint, scaled: Mapping[str, tuple[BlockScales, tuple[ScaledGroup, ...]]]
) -> BlockCheckpoint:
    """Return a checkpoint with the channels of its blocks scaled.

    Weights are scaled when they are read; norms and biases are at once.
    """
    tensors, layers = carrier.tensors(), {layer.name: layer for layer in carrier.layers()}
    columns: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    for block, groups in scaled.values():
        for one in groups:
            for read in one.group.reads:
                name = block.outside(read.layer.name)
                factors = picked(one.factors, read.index)[0].to(torch.float64)
                columns[name] = columns.get(name, torch.ones(())) * factors
            for written in one.group.writes:
                name = block.outside(written.layer.name)
                divisors = picked(one.factors, written.index).to(torch.float64)
                rows[name] = rows.get(name, torch.ones(())) / divisors
            for vector in one.group.vectors:
                name = block.outside(vector.name)
                before = vectors.get(name, tensors[name].read())
                each = picked(one.factors, vector.index).to(torch.float64).reshape(before.shape)
                vectors[name] = (before.to(torch.float64) / each).to(before.dtype)
    changes = {
        layers[name].weight: WeightChange(
            layers[name], partial(_scaled, columns.get(name), rows.get(name))
        )
        for name in sorted({*columns, *rows})
    }
    after = carrier.with_weights(vectors).with_changes(changes)
    assert isinstance(after, BlockCheckpoint)
    return after


def scaled_layers(block: BlockScales, groups: tuple[ScaledGroup, ...]) -> dict[str, float | None]:
    """Return the layers that change, and by how many dB the predicted error of those falls."""
    written = {block.outside(w.layer.name): None for s in groups for w in s.group.writes}
    read = {block.outside(r.layer.name): s.gain_db for s in groups for r in s.group.reads}
    return {**written, **read}


class _Weights:
    """The parameters of a block under the names of its own graph."""

    def __init__(self, tensors: Mapping[str, StoredTensor]):
        self._tensors = tensors

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the parameters."""
        return self._tensors


def _scaled(columns: Tensor | None, rows: Tensor | None, matrix: Tensor, start: int) -> Tensor:
    """Return rows of a weight with its columns and rows scaled, in their own dtype."""
    wide = matrix.to(torch.float64)
    if columns is not None:
        wide = wide * columns
    if rows is not None:
        wide = wide * rows[start : start + len(matrix), None]
    return wide.to(matrix.dtype)


def outside_layers(carrier: BlockCheckpoint, blocks: Collection[BlockScales]) -> dict[str, Layer]:
    """Return the layers that can be scaled, by name, in the order of storage."""
    names = {
        block.outside(layer.name)
        for block in blocks
        for group in block.scales.groups
        for layer in (*(r.layer for r in group.reads), *(w.layer for w in group.writes))
    }
    return {layer.name: layer for layer in carrier.layers() if layer.name in names}
