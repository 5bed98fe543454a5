"""Channels through operators that select elements or concatenate values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import (
    Family,
    along,
    compressed,
    depends_on,
    joined,
    overlap,
    placed,
)
from compressor.graph.values import input_of
from compressor.types.tensors import Array

Places: TypeAlias = dict[int, Array | None]
"""The selected positions by axis; ``None`` where they depend on a dynamic length."""

_STEPPED = 4  # starts, ends, axes and steps of a Slice


def concat(flow: Flow, node: ir.Node) -> None:
    """``Concat``: joined along one axis; along the others, the channels are united."""
    inputs = [v for v in node.inputs if v is not None]
    shapes = [flow.shape(v) for v in inputs]
    shape = flow.shape(node.outputs[0])
    if not any(flow.labels(v) for v in inputs):
        flow.put(node.outputs[0], [])
        return
    if shape is None or any(s is None for s in shapes):
        flow.freeze_node(node, UNKNOWN)
        return
    axis = node.attributes.get_int("axis", 0) % len(shape)
    parts = [flow.on_axis(v, axis) for v in inputs]
    rest = [[f for f in flow.labels(v) if not depends_on(f, axis)] for v in inputs]
    for index, part in enumerate(parts):
        if part is None:  # what lies on the same other axes as a joint part belongs to it
            parts[index] = _beside(parts, rest[index])
    lengths = [(s or ())[axis] for s in shapes]
    beside = _side_by_side(flow, node, rest)
    line = joined(parts, lengths, axis)
    flow.put(node.outputs[0], beside if line is None else [*beside, line])


def _beside(parts: Sequence[Family | None], rest: list[Family]) -> Family | None:
    """Remove and return a family of ``rest`` that lies on an axis of another part."""
    for index, family in enumerate(rest):
        if any(part is not None and overlap(part, family) for part in parts):
            return rest.pop(index)
    return None


def _side_by_side(flow: Flow, node: ir.Node, rest: Sequence[Sequence[Family]]) -> list[Family]:
    merged_families: list[Family] = []
    for families in rest:
        for family in families:
            merged_families = flow.united(family, merged_families, node)
    for family in merged_families:
        for families in rest:
            if not any(overlap(family, f) for f in families):
                flow.freeze([family], node, "puts them beside values without channels")
    return merged_families


def split(flow: Flow, node: ir.Node) -> None:
    """``Split``: into pieces along an axis."""
    pieces = [flow.shape(v) for v in node.outputs]
    families = flow.labels(node.inputs[0])
    shape = flow.shape(node.inputs[0])
    if families and (shape is None or any(s is None for s in pieces)):
        flow.freeze_node(node, UNKNOWN)
        return
    start = 0
    for output, piece in zip(node.outputs, pieces, strict=True):
        if shape is None or piece is None:
            flow.put(output, [])
            continue
        axis = node.attributes.get_int("axis", 0) % len(shape)
        flow.put(output, _picked(flow, node, families, axis, np.arange(start, start + piece[axis])))
        start += piece[axis]


def cut(flow: Flow, node: ir.Node) -> None:
    """``Slice``: with constant bounds where it touches channels."""
    families = flow.labels(node.inputs[0])
    shape = flow.shape(node.inputs[0])
    if not families:
        flow.put(node.outputs[0], [])
        return
    places = None if shape is None else slice_places(flow, node)
    if places is None:
        flow.freeze_node(node, "has bounds that are not known")
        return
    for axis, where in places.items():
        if where is None:
            moved = [f for f in families if depends_on(f, axis)]
            flow.freeze(moved, node, "has bounds that follow from a dynamic length")
            families = [f for f in families if not depends_on(f, axis)]
        else:
            families = _picked(flow, node, families, axis, where)
    flow.put(node.outputs[0], families)


def slice_places(flow: Flow, node: ir.Node) -> Places | None:
    """Return which positions a ``Slice`` picks, by axis; ``None`` where its axes are unknown."""
    shape = flow.shape(node.inputs[0])
    bounds = [flow.lengths.integers(v) if v is not None else [] for v in node.inputs[1:]]
    if shape is None or any(g is None for g in bounds):
        return None
    starts, ends, axes, steps = [g or [] for g in [*bounds, [], [], []][:_STEPPED]]
    sliced_axes = [None if a is None else a % len(shape) for a in axes] or list(range(len(starts)))
    places: Places = {}
    for start, end, axis, step in zip(
        starts, ends, sliced_axes, steps or [1] * len(starts), strict=True
    ):
        if axis is None:
            return None
        if start is None or end is None or step is None:
            places[axis] = None
            continue
        length = shape[axis]
        # As ONNX says, for a negative step the end may lie before the first element.
        stop = None if step < 0 and end < -length else end
        places[axis] = np.arange(length)[slice(start, stop, step)]
    return places


def gather(flow: Flow, node: ir.Node) -> None:
    """``Gather``: constant indices select channels; computed ones look up rows of a table."""
    data, index = node.inputs[0], node.inputs[1]
    families = flow.labels(data)
    shape, picked = flow.shape(data), flow.shape(index)
    if not families:
        flow.put(node.outputs[0], [])
        return
    if shape is None or picked is None:
        flow.freeze_node(node, UNKNOWN)
        return
    axis = node.attributes.get_int("axis", 0) % len(shape)
    places = gather_places(flow, node)
    touched = [f for f in families if depends_on(f, axis)]
    rest = [f for f in families if not depends_on(f, axis)]
    left = []
    if places is None:
        flow.freeze(touched, node, "looks them up by a computed index")
    else:
        for family in touched:
            picked_family = np.take(_couple_others(flow, family, axis), places, axis)
            left.append(_compared(flow, node, picked_family, family))
    for family in rest:
        lengths = (*family.shape[:axis], *([1] * len(picked)), *family.shape[axis + 1 :])
        left.append(family.reshape(lengths))
    flow.put(node.outputs[0], [f for f in left if f.size > 1])
    if flow.is_constant(data) and not flow.is_constant(index) and data is not None:
        for family in rest:
            flow.source(node, data if data.is_initializer() else None, family)
            for own_axis in range(len(shape)):
                if depends_on(family, own_axis):
                    flow.role(data, own_axis, "output")


def gather_places(flow: Flow, node: ir.Node) -> Array | None:
    """Return the indices of a ``Gather``; ``None`` where they are computed."""
    places = flow.lengths.integers(node.inputs[1])
    index, shape = flow.shape(node.inputs[1]), flow.shape(node.inputs[0])
    if places is None or index is None or not shape or any(place is None for place in places):
        return None
    array = np.asarray(places, dtype=np.int64).reshape(index)
    length = shape[node.attributes.get_int("axis", 0) % len(shape)]
    return np.where(array < 0, array + length, array)


def gather_nd(flow: Flow, node: ir.Node) -> None:
    """``GatherND``: looks up along the first axes; channels on the others are kept."""
    data, index = node.inputs[0], node.inputs[1]
    families = flow.labels(data)
    picked = flow.shape(index)
    if not families:
        flow.put(node.outputs[0], [])
        return
    if picked is None or node.attributes.get_int("batch_dims", 0) != 0:
        flow.freeze_node(node, "looks them up by an index")
        return
    count = picked[-1]
    touched = [f for f in families if any(depends_on(f, axis) for axis in range(count))]
    flow.freeze(touched, node, "looks them up by an index")
    rest = [f for f in families if not any(depends_on(f, axis) for axis in range(count))]
    lead = (1,) * (len(picked) - 1)
    flow.put(node.outputs[0], [f.reshape((*lead, *f.shape[count:])) for f in rest])


def pad(flow: Flow, node: ir.Node) -> None:
    """``Pad``: the added constants are channels that can be removed, too."""
    families = flow.labels(node.inputs[0])
    shape = flow.shape(node.inputs[0])
    if not families:
        flow.put(node.outputs[0], [])
        return
    widths = None if shape is None else pad_widths(flow, node)
    if shape is None or widths is None:
        flow.freeze_node(node, "has widths that are not known")
        return
    constant = node.attributes.get_string("mode", "constant") == "constant"
    left = []
    for family in families:
        padded = family
        for axis, (before, after) in widths.items():
            if not depends_on(padded, axis) or before == after == 0:
                continue
            if before is None or after is None or not constant or min(before, after) < 0:
                flow.freeze([padded], node, "repeats or drops channels")
                padded = padded[:0]
                break
            padded = flow.couple_others(padded, axis)
            parts = [flow.unions.fresh((before,)), along(padded, axis), flow.unions.fresh((after,))]
            padded = placed(np.concatenate(parts), axis, len(shape))
        if padded.size:
            left.append(padded)
    flow.put(node.outputs[0], left)


def pad_widths(flow: Flow, node: ir.Node) -> dict[int, tuple[int | None, int | None]] | None:
    """Return how many elements a ``Pad`` adds before and after, by axis."""
    shape = flow.shape(node.inputs[0])
    widths = flow.lengths.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if shape is None or widths is None:
        return None
    padded_axes = list(range(len(shape)))
    if input_of(node, 3) is not None:
        axes = flow.lengths.integers(node.inputs[3])
        if axes is None or any(a is None for a in axes):
            return None
        padded_axes = [a % len(shape) for a in axes if a is not None]
    half = len(widths) // 2
    return dict(zip(padded_axes, zip(widths[:half], widths[half:], strict=True), strict=True))


def _picked(
    flow: Flow, node: ir.Node, families: Sequence[Family], axis: int, places: Array
) -> list[Family]:
    left = []
    for family in families:
        whole = len(places) == family.shape[axis] and bool((places == np.arange(len(places))).all())
        if not depends_on(family, axis) or whole:
            left.append(family)
            continue
        # Nothing is picked where a tensor is rolled by 0; its channels on other axes are there.
        along_others = _couple_others(flow, family, axis)
        taken = compressed(along_others.take(places if len(places) else [0], axis))
        left.append(_compared(flow, node, taken, family) if len(places) else taken)
    return [f for f in left if f.size > 1]


def _compared(flow: Flow, node: ir.Node, taken: Family, family: Family) -> Family:
    """Freeze a single picked channel, since its axis cannot become shorter."""
    if taken.size == 1 and family.size > 1:
        flow.freeze([taken], node, "picks a single one of them")
    return taken


def _couple_others(flow: Flow, family: Family, axis: int) -> Family:
    """Unite channels along a picked axis if they depend on other axes, too; return the family.

    For heads divided into queries, keys and values, for instance, one of the three is picked, and
    a head is removed from all three.
    """
    if family.size > family.shape[axis]:
        flow.couple(family, axis)
    return family
