"""Find the parts that an output is concatenated from, such as boxes and scores of a detector.

Parts have scales of their own: coordinates of hundreds beside probabilities. What is measured on
all of such an output says nothing about the smaller part.

Parts are followed by example: an array of the output's shape holds, at each place, the number of
the value that a ``Concat`` took it from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.types.tensors import Array, Batch

Part: TypeAlias = tuple[slice, ...]
"""The index of a part in an output."""

OutputParts: TypeAlias = "Sequence[tuple[Part, ...]]"
"""What each output is joined of, in the order of the outputs."""

Kind = TypeVar("Kind")

WHOLE: tuple[Part, ...] = ((),)
"""The one part of an output that is not joined."""

_MOST_PARTS = 16
_MOST_PLACES = 1 << 24
_NUMBERED = (  # those of a byte are codes, such as of scores
    *(ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.BOOL),
    *(ir.DataType.UINT64, ir.DataType.UINT32, ir.DataType.UINT16),
)
_SIZES = (2, 3, 5, 7, 11, 13)  # of dynamic axes, in the order in which they are met


def output_parts(model: ir.Model) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each output of a graph, in the order of the outputs.

    An output is cut along one axis of known length, never the first: the shortest of those that
    were joined, since longer ones list places, such as the boxes of several scales. It is not cut
    into parts of a single number a sample, or more than 16.

    Args:
        model: with inferred shapes; not changed.
    """
    return tuple(_Follower().parts(output) for output in model.graph.outputs)


class _Follower:
    """Follows one output back to what was joined."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._found = 0

    def parts(self, output: ir.Value) -> tuple[Part, ...]:
        shape = self._shape(output)
        if shape is None or output.shape is None or len(shape) < 2:
            return WHOLE
        labels = self._labels(output, shape)
        known = [i for i, size in enumerate(output.shape) if i and isinstance(size, int)]
        cuts = {axis: _cuts(labels, axis) for axis in known}
        joined = [axis for axis in known if len(cuts[axis]) > 2]
        if not joined:
            return WHOLE
        axis = min(joined, key=lambda each: shape[each])
        ends = list(pairwise(cuts[axis]))
        least = min(stop - start for start, stop in ends) * labels[:1].size // shape[axis]
        if len(ends) > _MOST_PARTS or least < 2:
            return WHOLE
        before = (slice(None),) * axis
        return tuple((*before, slice(*each)) for each in ends)

    def _labels(self, value: ir.Value, shape: tuple[int, ...]) -> Array:
        node = value.producer()
        made = None if node is None else self._through(node, shape)
        if made is not None and made.shape == shape:
            return made
        self._found += 1
        return np.broadcast_to(np.int32(self._found), shape)

    def _through(self, node: ir.Node, shape: tuple[int, ...]) -> Array | None:
        """Return the labels of what a node makes of others, if it only joins or moves them."""
        row = operator(node)
        joins = row.family == "concat"
        if not joins and row.moves not in ("same", "type", "order", "shape"):
            return None
        sources = node.inputs if joins else node.inputs[:1]
        parts = []
        for source in sources:
            size = None if source is None else self._shape(source)
            if source is None or size is None or int(np.prod(size)) > _MOST_PLACES:
                return None
            parts.append(self._labels(source, size))
        if joins:
            axis = node.attributes.get_int("axis", 0)
            rest = {tuple(np.delete(part.shape, axis).tolist()) for part in parts}
            return np.concatenate(parts, axis) if len(rest) == 1 else None
        (labels,) = parts
        if row.moves == "order":
            order = node.attributes.get_ints("perm", None)
            return labels.transpose(None if order is None else list(order))
        if row.moves == "shape":
            return labels.reshape(shape) if labels.size == np.prod(shape) else None
        return labels

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the shape with a small number for each dynamic axis; ``None`` if not known."""
        if value.shape is None:
            return None
        return tuple(d if isinstance(d, int) else self._size(str(d.value)) for d in value.shape)

    def _size(self, axis: str) -> int:
        return self._sizes.setdefault(axis, _SIZES[len(self._sizes) % len(_SIZES)])


def _cuts(labels: Array, axis: int) -> list[int]:
    """Return where labels change along an axis, with its beginning and end."""
    lines = np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
    changes = np.flatnonzero((lines[1:] != lines[:-1]).any(1)) + 1
    return [0, *changes.tolist(), len(lines)]


def cut_parts(outputs: Sequence[Array], parts: OutputParts) -> list[Array]:
    """Return the parts of outputs, one after the other; without any, the outputs."""
    if not parts:
        return list(outputs)
    pairs = zip(outputs, parts, strict=True)
    return [array[part] if part else array for array, cuts in pairs for part in cuts]


def with_parts(outputs: Mapping[str, Kind], parts: OutputParts) -> Mapping[str, Kind]:
    """Return what is known of the outputs that have a part; of all where parts are not known.

    Args:
        outputs: something by output, in their order; or nothing.
    """
    if not parts or not outputs:
        return outputs
    pairs = zip(outputs.items(), parts, strict=True)
    return {name: each for (name, each), cuts in pairs if cuts}


def named_parts(outputs: Batch, parts: OutputParts) -> Batch:
    """Return each part as an output of its own, under the output's name and the part's number."""
    return {
        name if len(cuts) == 1 else f"{name}[{number}]": array[part]
        for (name, array), cuts in zip(outputs.items(), parts, strict=True)
        for number, part in enumerate(cuts)
    }


def compared_outputs(model: ir.Model) -> tuple[bool, ...]:
    """Return for each output whether its distance from another model's says something.

    Two kinds do not count beside others. An output that no value of an input reaches, such as the
    anchors of a detector, is the same for all samples: it would halve what a mean shows of the
    others. Whole numbers wider than a byte are names, of classes or of entries of a table: how far
    apart two are says nothing. Where there is no other output, all count. Shapes are no values: the
    number of samples alone does not change what a row holds.

    Args:
        model: with the types of its outputs; not changed.
    """
    outputs = model.graph.outputs
    reached = _reached(model.graph)
    counted = tuple(value in reached and value.dtype not in _NUMBERED for value in outputs)
    return counted if any(counted) else (True,) * len(outputs)


def _reached(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on values of the graph's inputs."""
    held = set(graph.initializers.values())
    found = {value for value in graph.inputs if value not in held}
    for node in graph:
        if operator(node).family == "shape":
            continue
        branches = any(attribute.type == ir.AttributeType.GRAPH for attribute in _kept(node))
        if branches or any(value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _kept(node: ir.Node) -> list[ir.Attr]:
    return [each for each in node.attributes.values() if isinstance(each, ir.Attr)]
