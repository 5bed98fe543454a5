"""Remove channels from a graph, and find out which channels may be reordered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.channels.adjusting import Adjuster
from compressor.graph.channels.analysis import Analysis, analyse
from compressor.graph.inference import infer_shapes
from compressor.graph.operators import operator
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Units, kept

Kept: TypeAlias = Mapping[str, Mapping[int, Units]]
"""Which positions remain, by parameter and axis; of axes that lose any."""


def remove_channels(
    model: ir.Model, channels: ChannelMap | Analysis, removed: Flags
) -> tuple[ir.Model, Kept]:
    """Return a copy of a graph without some units; parameters are read only when the copy's are.

    Args:
        model: the graph; it is not changed, and weights that stay whole are shared.
        channels: the result of ``analyse``, or of
            :func:`compressor.graph.channels.analysis.map_channels`, which takes another analysis.

    Returns:
        The smaller graph, and the positions that remain on its parameters' axes.

    Raises:
        ValueError: a unit that cannot be removed is, or the map is of another graph.
        ModelError: nothing would be left of a value.
    """
    channel_map = channels if isinstance(channels, ChannelMap) else channels.channels
    if len(removed) != channel_map.count or bool((removed & ~channel_map.removable).any()):
        raise ValueError("units are removed that cannot be, or the map is of another graph")
    analysis = analyse(model) if isinstance(channels, ChannelMap) else channels
    if analysis.channels.count != channel_map.count or analysis.flow.model is not model:
        raise ValueError("the map is of another graph")
    smaller = model.clone()
    positions = kept_positions(channel_map.parameters, removed)
    for name, axes in positions.items():
        _shrink(smaller.graph.initializers[name], axes)
    masks = _masks(analysis, removed)
    adjuster = Adjuster(smaller, analysis.flow, masks)
    unread = {v.name for v in smaller.graph.initializers.values() if not v.uses()}
    for node in list(smaller.graph):
        adjuster.adjust(node)
    for value in list(smaller.graph.initializers.values()):
        if not (value.uses() or value.name in unread or value.is_graph_output()):
            del smaller.graph.initializers[value.name or ""]  # replaced by one that fits
    _forget_shapes(smaller, masks)
    infer_shapes(smaller)
    return smaller, positions


def kept_positions(
    parameters: Mapping[str, tuple[Units | None, ...]], removed: Flags
) -> dict[str, dict[int, Units]]:
    """Return the positions that remain of every axis that loses some."""
    positions: dict[str, dict[int, Units]] = {}
    for name, axis, stays in _shorter(parameters, removed):
        positions.setdefault(name, {})[axis] = np.flatnonzero(stays)
    return positions


def _masks(analysis: Analysis, removed: Flags) -> dict[str, dict[int, Flags]]:
    """Return a mask of the remaining positions for each value's axes that lose some."""
    masks: dict[str, dict[int, Flags]] = {}
    for name, axis, stays in _shorter(analysis.axes, removed):
        if not stays.any():
            raise ModelError(
                f"value {name!r}", "would lose all its channels", "keep at least one of them"
            )
        masks.setdefault(name, {})[axis] = stays
    return masks


def _shorter(
    values: Mapping[str, tuple[Units | None, ...]], removed: Flags
) -> Iterator[tuple[str, int, Flags]]:
    for name, axes in values.items():
        for axis, units in enumerate(axes):
            if units is not None and not (stays := kept(units, removed)).all():
                yield name, axis, stays


def _shrink(value: ir.Value, axes: Mapping[int, Units]) -> None:
    tensor = value.const_value
    assert tensor is not None
    lengths = [int(d) for d in tensor.shape.numpy()]
    for axis, positions in axes.items():
        lengths[axis] = len(positions)
    # Clones share their type and shape objects, so new ones are set.
    value.shape = ir.Shape(lengths)
    value.type = ir.TensorType(tensor.dtype)
    value.const_value = ir.LazyTensor(
        partial(_selected, tensor, axes), tensor.dtype, ir.Shape(lengths), name=value.name
    )


def _selected(tensor: ir.TensorProtocol, axes: Mapping[int, Units]) -> ir.TensorProtocol:
    array = tensor.numpy()
    for axis, positions in axes.items():
        array = np.take(array, positions, axis)
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _forget_shapes(model: ir.Model, masks: Mapping[str, Mapping[int, Flags]]) -> None:
    for node in model.graph:
        for value in node.outputs:
            value_masks = masks.get(value.name or "")
            if value_masks is None or value.shape is None:
                continue
            dims = list(value.shape)
            for axis, stays in value_masks.items():
                whole = isinstance(dims[axis], int)
                dims[axis] = int(stays.sum()) if whole else ir.SymbolicDim(None)
            value.shape = ir.Shape(dims)


@dataclass(frozen=True, eq=False)
class Ordering:
    """The orders in which a graph's channels lie.

    Attributes:
        lines: by unit, every axis of every value on which it lies.
        placed: by unit, an operator to which its position matters.
        inline: units on constants inside nodes, which are no parameters.
    """

    lines: Mapping[int, list[Units]]
    placed: Mapping[int, str]
    inline: frozenset[int]

    def obstacle(self, group: ChannelGroup) -> str:
        """Return why the channels of a group cannot be reordered; empty if they can."""
        if group.frozen:
            return group.frozen
        units = group.units.tolist()
        looked = next((self.placed[unit] for unit in units if unit in self.placed), "")
        if looked:
            return f"{looked} looks at their places"
        if not self.inline.isdisjoint(units):
            return "a constant inside a node holds values for them"
        line = self.lines[units[0]][0]
        if len(line) != len(units) or set(line.tolist()) != set(units):
            return "they lie on an axis with others, or at several places of it"
        if any(not np.array_equal(axis, line) for unit in units for axis in self.lines[unit]):
            return "they are divided, joined with others, or turned round on their way"
        return ""


def ordering(analysis: Analysis) -> Ordering:
    """Return the orders in which channels lie on all axes."""
    lines: dict[int, list[Units]] = {}
    for axes in analysis.axes.values():
        for axis in axes:
            if axis is not None:
                for unit in _on(axis):
                    lines.setdefault(unit, []).append(axis)
    inline = {
        unit
        for node in analysis.flow.model.graph
        if operator(node).family == "constant"
        for axis in analysis.axes.get(node.outputs[0].name or "", ())
        if axis is not None
        for unit in _on(axis)
    }
    return Ordering(lines, analysis.placed, frozenset(inline))


def _on(axis: Units) -> list[int]:
    units: list[int] = np.unique(axis[axis >= 0]).tolist()
    return units
