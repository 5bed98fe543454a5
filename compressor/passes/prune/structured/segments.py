"""Cut a network into segments that can be timed alone, at any width of what they hold.

One value flows from each segment to the next, as between residual blocks. Inside a segment the
runtime fuses and lays out operators as it does in the whole network; what it does between two of
them is the same whatever their widths. So times of segments add up, and equal ones are timed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.files import json_sha256
from compressor.graph.blocks import values_read
from compressor.graph.channels.analysis import Analysis
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.residuals import ResidualBlock, drop_blocks, stands_for
from compressor.graph.values import main_values
from compressor.types.carrier import Carrier
from compressor.types.channels import Flags, kept
from compressor.types.tensors import Array, Batch

_SMALL = 64  # elements of a constant that says what its reader does, such as axes and paddings
_HASH = 16  # hexadecimal digits


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of nodes.

    Attributes:
        entries: names of what it reads: values of other segments and inputs of the model.
        exits: names of what others need of it.
        weights: names of the initializers that it reads.
        blocks: numbers of the residual blocks that end in it.
        units: flags of the units that lie on its weights and on what it reads.
        form: a hash of its operators.
    """

    entries: tuple[str, ...]
    exits: tuple[str, ...]
    weights: tuple[str, ...]
    blocks: tuple[int, ...]
    units: Flags
    form: str


@dataclass(frozen=True, eq=False)
class Variant:
    """What is taken away from a network.

    Attributes:
        removed: units.
        dropped: numbers of residual blocks.
    """

    removed: Flags
    dropped: frozenset[int] = frozenset()


class Segments:
    """The segments of one network, and their models at given widths.

    Args:
        blocks: residual blocks that may be dropped.
        batch: what the network is run on.
    """

    def __init__(
        self,
        carrier: Carrier,
        analysis: Analysis,
        blocks: Sequence[ResidualBlock],
        batch: Batch,
    ):
        self._carrier, self._graph = carrier, carrier.graph()
        self._analysis, self._blocks = analysis, tuple(blocks)
        self.batch = batch

    @cached_property
    def all(self) -> tuple[Segment, ...]:
        """The segments in the order of execution."""
        return tuple(self._segment(nodes, exits) for nodes, exits in _cut(self._graph))

    def _segment(self, nodes: Sequence[ir.Node], ends: Sequence[ir.Value]) -> Segment:
        exits = tuple(v.name or "" for v in ends)
        reached, inputs = _behind(ends, set(nodes), self._moving)
        entries = tuple(dict.fromkeys(v.name or "" for v in inputs))
        weights = tuple(
            dict.fromkeys(
                v.name or "" for n in reached for v in values_read(n) if v.is_initializer()
            )
        )
        made = {v.name for node in reached for v in node.outputs}
        blocks = tuple(i for i, block in enumerate(self._blocks) if block.output in made)
        units = np.zeros(self._analysis.channels.count, dtype=bool)
        for name in (*entries, *weights):
            for axis in self._analysis.axes.get(name, ()):
                if axis is not None:
                    units[axis[axis >= 0]] = True
        return Segment(entries, exits, weights, blocks, units, _form(reached, entries))

    @cached_property
    def _moving(self) -> frozenset[ir.Value]:
        """Values that depend on an input of the model."""
        moving = {v for v in self._graph.graph.inputs if not v.is_initializer()}
        for node in self._graph.graph:
            if not moving.isdisjoint(values_read(node)):
                moving.update(node.outputs)
        return frozenset(moving)

    @cached_property
    def _values(self) -> Batch:
        """What flows between segments, in the whole network."""
        inputs = {v.name for v in self._graph.graph.inputs}
        names = dict.fromkeys(name for s in self.all for name in s.entries if name not in inputs)
        outputs = self._carrier.runner(list(names)).run(self.batch)
        return {**self.batch, **outputs}

    def key(self, segment: Segment, variant: Variant) -> str:
        """Return a hash of what a segment computes: equal ones take the same time."""
        axes, initializers = self._analysis.axes, self._graph.graph.initializers
        sizes: list[Any] = []
        for name in segment.weights:
            shape = initializers[name].shape
            assert shape is not None
            sizes.append(self._lengths(axes.get(name, ()), shape.numpy(), variant.removed))
        for name in segment.entries:
            entry = self._values[name]
            sizes.append(self._lengths(axes.get(name, ()), entry.shape, variant.removed))
        dropped = [i for i, block in enumerate(segment.blocks) if block in variant.dropped]
        return json_sha256({"form": segment.form, "sizes": sizes, "dropped": dropped})[:_HASH]

    @staticmethod
    def _lengths(axes: Sequence[Any], shape: Sequence[int], removed: Flags) -> list[int]:
        return [
            int(n) if i >= len(axes) or axes[i] is None else int(kept(axes[i], removed).sum())
            for i, n in enumerate(shape)
        ]

    def models(
        self, wanted: Sequence[tuple[Segment, Variant]]
    ) -> Iterator[tuple[ir.Model, Batch] | None]:
        """Yield each segment's model at given widths and what to run it on.

        ``None`` for a segment of which nothing is left.
        """
        for segment, variant in wanted:
            yield self._model(segment, variant)

    def smaller(self, variant: Variant) -> ir.Model:
        """Return the whole network without what a variant takes away."""
        graph = self._graph
        if variant.removed.any():
            graph = remove_channels(graph, self._analysis, variant.removed)[0]
        return drop_blocks(graph, self._chosen(variant))

    def _chosen(self, variant: Variant) -> list[ResidualBlock]:
        return [self._blocks[i] for i in sorted(variant.dropped)]

    def _model(self, segment: Segment, variant: Variant) -> tuple[ir.Model, Batch] | None:
        only = Variant(variant.removed & segment.units, variant.dropped & {*segment.blocks})
        whole, gone = self.smaller(only), self._chosen(only)
        exits = list(dict.fromkeys(stands_for(name, gone) for name in segment.exits))
        exits = [name for name in exits if name not in segment.entries]
        if not exits:
            return None
        values = main_values(whole)
        starts = [values[n] for n in segment.entries if n in values]
        inputs = list(dict.fromkeys([*starts, *whole.graph.inputs]))
        graph = ir.convenience.extract(whole.graph, inputs, [values[n] for n in exits])
        read = {v for node in graph for v in values_read(node)}
        for value in [v for v in graph.inputs if v not in read]:
            graph.inputs.remove(value)
        graph.opset_imports.update(whole.opset_imports)
        feed = {v.name or "": self._fed(v.name or "", only.removed) for v in graph.inputs}
        for value in (v for v in (*graph.inputs, *graph.outputs) if v.type is None):
            seen = self._values.get(value.name or "")
            value.type = None if seen is None else ir.TensorType(ir.DataType.from_numpy(seen.dtype))
        return ir.Model(graph, ir_version=whole.ir_version), feed

    def _fed(self, name: str, removed: Flags) -> Array:
        """Return what flows into a segment, without what has been removed of it."""
        value = self._values[name]
        for axis, units in enumerate(self._analysis.axes.get(name, ())):
            if units is not None:
                value = np.compress(kept(units, removed), value, axis)
        return np.ascontiguousarray(value)


def _cut(model: ir.Model) -> Iterator[tuple[list[ir.Node], list[ir.Value]]]:
    """Yield the nodes of each segment, which multiply, and what others need of them.

    Lengths that are read off a value are no part of what flows.
    """
    flowing: list[ir.Node] = []
    carried = {v for v in model.graph.inputs if v.dtype and v.dtype.is_floating_point()}
    for node in model.graph:
        if operator(node).family == "shape":
            continue
        if layer_of(node) is not None or not carried.isdisjoint(values_read(node)):
            flowing.append(node)
            carried.update(node.outputs)
    last = {value: i for i, node in enumerate(flowing) for value in values_read(node)}
    live = {value for value in carried if value.producer() is None and value in last}
    multiply = [_multiplies(node) for node in flowing]
    start, left = 0, sum(multiply)
    for index, node in enumerate(flowing):
        live = {v for v in (*live, *node.outputs) if last.get(v, -1) > index}
        left -= multiply[index]
        end = index + 1 == len(flowing)
        if end or (left and len(live) == 1 and any(multiply[start : index + 1])):
            nodes = flowing[start : index + 1]
            outputs = [v for n in nodes for v in n.outputs if v.is_graph_output()]
            yield nodes, list(dict.fromkeys([*outputs, *([] if end else live)]))
            start = index + 1


def _multiplies(node: ir.Node) -> bool:
    layer = layer_of(node)
    return layer is not None and not layer.is_table


def _behind(
    ends: Sequence[ir.Value], nodes: Collection[ir.Node], moving: Collection[ir.Value]
) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes that compute values within a segment, and what they read from outside.

    What depends on no input of the model is computed within.
    """
    reached: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    pending = list(ends)
    while pending:
        value = pending.pop()
        maker = value.producer()
        if maker is None or (maker not in nodes and value in moving):
            if not value.is_initializer():
                inputs.setdefault(value)
        elif maker not in reached:
            reached[maker] = None
            pending.extend(values_read(maker))
    return list(reversed(reached)), list(reversed(inputs))


def _form(nodes: Sequence[ir.Node], entries: Sequence[str]) -> str:
    """Return a hash of nodes in which names and large weights do not count."""
    numbers: dict[str, int] = {name: i for i, name in enumerate(entries)}
    parts: list[Any] = []
    for node in nodes:
        read: list[Any] = []
        for value in node.inputs:
            name = "" if value is None else value.name or ""
            read.append([numbers.setdefault(name, len(numbers)), _content(value)])
        for value in node.outputs:
            numbers.setdefault(value.name or "", len(numbers))
        attributes = sorted(f"{k}={_shown(a)}" for k, a in node.attributes.items())
        parts.append([node.domain, node.op_type, attributes, read])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:_HASH]


def _shown(attribute: ir.Attr) -> str:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return f"{attribute.name} {id(attribute)}"  # no two of them are taken to be equal
    if attribute.type == ir.AttributeType.TENSOR:
        return repr(attribute.as_tensor().tobytes()[:_SMALL])
    return repr(attribute.value)


def _content(value: ir.Value | None) -> str:
    """Return the numbers of a small integer constant."""
    if value is None or not value.is_initializer() or value.const_value is None:
        return "" if value is None else str(value.dtype)
    tensor = value.const_value
    if tensor.dtype.is_floating_point() or tensor.size > _SMALL:
        return str(tensor.dtype)
    return repr(tensor.numpy().tolist())
