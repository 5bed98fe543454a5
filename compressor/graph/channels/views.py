"""Channels through operators that only move or repeat elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow
from compressor.graph.channels.labels import (
    Family,
    along,
    depends_on,
    overlap,
    placed,
    reshaped,
    spread,
)
from compressor.graph.values import is_op


def reshape(flow: Flow, node: ir.Node) -> None:
    """``Reshape``, ``Flatten``, ``Squeeze`` and ``Unsqueeze``."""
    before, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    families = flow.labels(node.inputs[0])
    if families and (before is None or after is None or min(before, default=1) < 1):
        flow.freeze_node(node, UNKNOWN)  # an axis without elements does not show how it is merged
        return
    if families and before is not None and after is not None and prod(before) != prod(after):
        flow.freeze_node(node, UNKNOWN)  # it fits one length of an open axis, which is not told
        return
    if before is not None and after is not None:
        families = sorted(families, key=lambda family: _precedence(flow, family))
        families = _apart(flow, node, [reshaped(f, before, after) for f in families])
    flow.put(node.outputs[0], families)


def _precedence(flow: Flow, family: Family) -> tuple[bool, int]:
    """Rank families that may come to share an axis: heads before their features.

    Repeated values come last, since they may have any length.
    """
    first = next((axis for axis in range(family.ndim) if depends_on(family, axis)), 0)
    return int(family.flat[0]) in flow.repeats, first


def _apart(flow: Flow, node: ir.Node, families: Sequence[Family]) -> list[Family]:
    """Keep the first of the families that share an axis now; the others cannot be removed."""
    left: list[Family] = []
    for family in families:
        if any(overlap(family, other) for other in left):
            flow.freeze([family], node, "merges their axis with that of other channels")
        else:
            left.append(family)
    return left


def transpose(flow: Flow, node: ir.Node) -> None:
    """``Transpose``: the axes in another order."""
    families = flow.labels(node.inputs[0])
    shape = flow.shape(node.inputs[0]) or ()
    order = node.attributes.get_ints("perm", None) or list(reversed(range(len(shape))))
    flow.put(node.outputs[0], [np.transpose(f, order) for f in families])


def expand(flow: Flow, node: ir.Node) -> None:
    """``Expand``: repeats axes of length 1 as often as there are channels in the result."""
    source, output = node.inputs[0], node.outputs[0]
    before, after = flow.shape(source), flow.shape(output)
    families = flow.labels(source)
    if before is None or after is None:
        flow.freeze_node(node, UNKNOWN)
        return
    rank = len(after)
    families = [spread(f, rank) for f in families]
    lengths = (1,) * (rank - len(before)) + before
    families += _anything(flow, after, [i for i in range(rank) if lengths[i] == 1])
    flow.put(output, families)


def constant_of_shape(flow: Flow, node: ir.Node) -> None:
    """``ConstantOfShape``: one constant for each channel of the result."""
    after = flow.shape(node.outputs[0])
    axes = range(len(after or ()))
    flow.put(node.outputs[0], [] if after is None else _anything(flow, after, list(axes)))


def _anything(flow: Flow, shape: tuple[int, ...], axes: Sequence[int]) -> list[Family]:
    """Return new channels along axes on which a value is constant."""
    families = []
    for axis in axes:
        if shape[axis] > 1:
            repeated = flow.unions.fresh((shape[axis],))
            flow.repeats.update(repeated.tolist())
            families.append(placed(repeated, axis, len(shape)))
    return families


def tile(flow: Flow, node: ir.Node) -> None:
    """``Tile``: repeats whole axes; an axis of length 1 as often as there are channels."""
    families = flow.labels(node.inputs[0])
    before, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    repeats = flow.lengths.integers(node.inputs[1])
    if before is None or after is None or repeats is None:
        flow.freeze_node(node, "repeats them, it is not known how often")
        return
    moved = [axis for axis, count in enumerate(repeats) if count is None]
    unknown = [f for f in families if any(depends_on(f, axis) for axis in moved)]
    flow.freeze(unknown, node, "repeats them, it is not known how often")
    left = []
    for family in families:
        counts = [n // m if depends_on(family, i) else 1 for i, (n, m) in _pairs(after, before)]
        left.append(np.tile(family, counts))
    left += _anything(flow, after, [i for i, (_, n) in _pairs(after, before) if n == 1])
    flow.put(node.outputs[0], left)


def _pairs(first: Sequence[int], second: Sequence[int]) -> Iterable[tuple[int, tuple[int, int]]]:
    return enumerate(zip(first, second, strict=True))


def depth_to_space(flow: Flow, node: ir.Node) -> None:
    """``DepthToSpace``: the channels that become one block of pixels are united."""
    size = node.attributes.get_int("blocksize", 1)
    crd = node.attributes.get_string("mode", "DCR") == "CRD"
    left: list[Family] = []
    for family in flow.labels(node.inputs[0]):
        if not _across(flow, node, family, left):
            continue
        blocks = along(family, 1).reshape((-1, size * size) if crd else (size * size, -1))
        channels = flow.couple(blocks, 1 if crd else 0).reshape(-1)
        left.append(placed(channels, 1, family.ndim))
    flow.put(node.outputs[0], [f for f in left if f.size > 1])


def _across(flow: Flow, node: ir.Node, family: Family, left: list[Family]) -> bool:
    """Whether a family lies on the second axis only; one on the first axis only is kept."""
    axes = [axis for axis in range(family.ndim) if depends_on(family, axis)]
    if axes == [0]:
        left.append(family)
    elif axes != [1]:
        flow.freeze([family], node, "moves them")
    return axes == [1]


def space_to_depth(flow: Flow, node: ir.Node) -> None:
    """``SpaceToDepth``: each channel becomes several, one for each pixel of a block."""
    size = node.attributes.get_int("blocksize", 1)
    left: list[Family] = []
    for family in flow.labels(node.inputs[0]):
        if not _across(flow, node, family, left):
            continue
        left.append(placed(np.tile(along(family, 1), size * size), 1, family.ndim))
    flow.put(node.outputs[0], left)


def spatial(flow: Flow, node: ir.Node) -> None:
    """Pooling, resizing and sampling: channels stay separate; channels on other axes are frozen.

    Of heads on the axis of samples, each with places of its own, features are removed from all.
    """
    before, after = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    left = []
    for family in flow.labels(node.inputs[0]):
        moved = [i for i in range(2, family.ndim) if depends_on(family, i)]
        same = before is not None and after is not None and before[:2] == after[:2]
        if moved or not same:
            flow.freeze([family], node, "moves them")
            continue
        if is_op(node, "GridSample") and depends_on(family, 0):
            flow.fix(family, [0], node, "has places for each")
        left.append(family)
    flow.put(node.outputs[0], left)
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        flow.freeze(left, node, "numbers their elements")


def constant(flow: Flow, node: ir.Node) -> None:
    """``Constant``: a parameter inside a node."""
    flow.labels(node.outputs[0])


def nothing(flow: Flow, node: ir.Node) -> None:
    """Operators whose results hold no channels and do not depend on their number."""
    for output in node.outputs:
        flow.put(output, [])
