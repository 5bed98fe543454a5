"""Adapt constants, attributes and shape inputs of operators to smaller values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd

import numpy as np
import onnx_ir as ir

from compressor.graph.channels import picking, recurrences, views
from compressor.graph.channels.flow import Flow
from compressor.graph.channels.rules import Rule, rule_of
from compressor.graph.editing import Attributes, Editor
from compressor.graph.operators import operator
from compressor.graph.values import (
    constant_array,
    constant_attribute,
    given_shape,
    input_of,
    is_op,
)
from compressor.types.channels import Flags
from compressor.types.tensors import Array

Lost = Mapping[int, Flags]


class ShapeInputs:
    """Adapts the lengths that nodes are given.

    ``Shape`` keeps returning the old lengths, so that what is computed from them stays the same,
    such as the divisor of a mean; a length is corrected only where it is used as a shape.

    Args:
        smaller: changed in place.
    """

    def __init__(self, smaller: ir.Model, flow: Flow):
        self._graph = smaller.graph
        self._flow = flow
        self._editor = Editor(smaller)
        self._before: dict[str, ir.Value] = {}

    def constant(self, node: ir.Node, name: str, values: Array) -> ir.Value:
        """Add an initializer that is named after a node's output."""
        return self._editor.initializer(f"{node.outputs[0].name}_{name}", ir.tensor(values))

    def set(self, node: ir.Node, at: int, name: str, entries: Mapping[int, int]) -> None:
        """Set some entries of an input that is a vector of integers."""
        vector = node.inputs[at]
        assert vector is not None
        held = constant_array(vector)
        if held is not None:
            changed = np.array(held)
            for index, number in entries.items():
                changed[index] = number
            node.replace_input_with(at, self.constant(node, name, changed))
            return
        length = self.length(vector)
        dtype = np.dtype(np.int64) if vector.dtype is None else vector.dtype.numpy()
        numbers = np.asarray([entries.get(i, 0) for i in range(length)], dtype=dtype)
        replaced = self.constant(node, f"{name}_set", np.isin(np.arange(length), list(entries)))
        self.insert(node, at, "Where", [replaced, self.constant(node, name, numbers), vector])

    def length(self, vector: ir.Value) -> int:
        """Return of how many entries a vector is."""
        return (self._flow.shape(self._as_it_was(vector)) or (0,))[0]

    def scale(self, node: ir.Node, at: int, lost: Lost, copied: frozenset[int]) -> None:
        """Shorten the lengths that a node is given.

        Args:
            at: which input they are.
            lost: which positions remain, by entry.
            copied: numbers that do not stand for a length.
        """
        vector = node.inputs[at]
        assert vector is not None
        constant = self._flow.lengths.constant(self._as_it_was(vector))
        scaled = {
            entry: stays
            for entry, stays in lost.items()
            if constant is None or int(constant.reshape(-1)[entry]) not in copied
        }
        held = constant_array(vector)
        if held is not None:
            shorter = {e: int(held[e]) * int(s.sum()) // len(s) for e, s in scaled.items()}
            self.set(node, at, "lengths", shorter)
        elif scaled:
            length = self.length(vector)
            above, below = _ratio(scaled, length)
            self.insert(node, at, "Mul", [vector, self.constant(node, "kept", above)])
            multiplied = node.inputs[at]
            self.insert(node, at, "Div", [multiplied, self.constant(node, "of", below)])

    def restore(self, node: ir.Node, lost: Lost) -> None:
        """Make the readers of ``Shape`` or ``Size`` see the original lengths."""
        output = node.outputs[0]
        if is_op(node, "Size"):
            one = np.ones((), dtype=np.int64)
            above, below = one, one
            for stays in lost.values():
                above, below = above * len(stays), below * int(stays.sum())
        else:
            rank = len(self._flow.shape(node.inputs[0]) or ())
            start = node.attributes.get_int("start", 0)
            start = min(max(start + rank if start < 0 else start, 0), rank)
            length = self.length(output)
            entries = {a - start: s for a, s in lost.items() if 0 <= a - start < length}
            if not entries or not any(self._reads(use.node, entries) for use in output.uses()):
                return
            below, above = _ratio(entries, length)
        readers = [(use.node, use.idx) for use in output.uses()]
        int64, of = ir.DataType.INT64, self.constant(node, "of", above)
        wide = self._editor.node("Mul", [output, of], f"{output.name}_wide", int64)
        kept = self.constant(node, "kept", below)
        name = f"{output.name}_before"
        whole = self._editor.node("Div", [wide.outputs[0], kept], name, int64)
        self._graph.insert_after(node, [wide, whole])
        for reader, index in readers:
            reader.replace_input_with(index, whole.outputs[0])
        self._before[whole.name or ""] = output

    def _as_it_was(self, value: ir.Value) -> ir.Value:
        return self._before.get(value.name or "", value)

    def _reads(self, reader: ir.Node, entries: Lost) -> bool:
        """Whether a reader of a shape may look at some entries."""
        places: Array | None = None
        if operator(reader).is_table:
            places = picking.gather_places(self._flow, reader)
        elif rule_of(reader) is picking.cut:
            places = (picking.slice_places(self._flow, reader) or {}).get(0)
        return places is None or bool(np.isin(places, list(entries)).any())

    def insert(
        self,
        node: ir.Node,
        at: int,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes | None = None,
    ) -> None:
        """Insert a node in front of one input of another.

        Args:
            inputs: of the new node; one of them is what was read before.
        """
        before = node.inputs[at]
        name = f"{node.outputs[0].name}_{op_type.lower()}"
        dtype = None if before is None else before.dtype
        made = self._editor.node(op_type, inputs, name, dtype, attributes)
        self._graph.insert_before(node, made)
        node.replace_input_with(at, made.outputs[0])


def _ratio(lost: Lost, length: int) -> tuple[Array, Array]:
    above, below = np.ones(length, dtype=np.int64), np.ones(length, dtype=np.int64)
    for entry, stays in lost.items():
        common = gcd(int(stays.sum()), len(stays))
        above[entry], below[entry] = int(stays.sum()) // common, len(stays) // common
    return above, below


_FOLLOWS, _COPIED = -1, 0  # in the shape of a Reshape
_KEPT = 1  # in that of an Expand


class Adjuster:
    """Adjusts one node after the other.

    Args:
        smaller: the copy of a graph, changed in place; the parameters are small already.
        masks: which positions remain, by value and axis; of axes that lose some.
    """

    def __init__(self, smaller: ir.Model, flow: Flow, masks: Mapping[str, Mapping[int, Flags]]):
        self._graph = smaller.graph
        self._flow = flow
        self._masks = masks
        self._lengths = ShapeInputs(smaller, flow)

    def adjust(self, node: ir.Node) -> None:
        """Adapt a node's constants and attributes."""
        touched = any(self._mask(v) for v in (*node.inputs, *node.outputs))
        if not touched or node.domain not in ("", "ai.onnx"):
            return
        row = operator(node)
        if row.family == "shape":
            self._lengths.restore(node, self._mask(node.inputs[0]))
        elif row.is_convolution:
            self._count(node, "group", self._mask(node.inputs[1]).get(0))
        elif row.family == "group-norm":
            self._count(node, "num_groups", self._mask(node.inputs[0]).get(1))
        adjustment = _BY_NAME.get(node.op_type) or _BY_RULE.get(rule_of(node))
        if given_shape(node) is not None:
            adjustment = Adjuster._shape
        if adjustment is not None:
            adjustment(self, node)

    def _mask(self, value: ir.Value | None) -> Mapping[int, Flags]:
        return {} if value is None else self._masks.get(value.name or "", {})

    def _rank(self, value: ir.Value | None) -> int:
        return len(self._flow.shape(value) or ())

    def _constant(self, node: ir.Node) -> None:
        """Cut a parameter inside a node."""
        tensor = constant_attribute(node)
        assert tensor is not None
        array = tensor.numpy()
        for axis, stays in self._mask(node.outputs[0]).items():
            array = np.compress(stays, array, axis)
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array, dtype=tensor.dtype))

    def _shape(self, node: ir.Node) -> None:
        """Set the lengths that a node gives to axes that lose positions."""
        rule = rule_of(node)
        at = 0 if rule is views.constant_of_shape else 1
        output, lengths = node.outputs[0], node.inputs[at]
        lost = self._mask(output)
        if not lost or lengths is None:
            return
        if rule is views.reshape:
            self._lengths.scale(node, at, lost, frozenset((_FOLLOWS, _COPIED)))
            return
        if rule is views.tile:
            source = self._flow.shape(node.inputs[0]) or ()
            first = self._rank(output) - len(source)
            lost = {a: s for a, s in lost.items() if a < first or source[a - first] == 1}
        copied = frozenset((_KEPT,) if rule is views.expand else ())
        behind = self._rank(output) - self._lengths.length(lengths)
        lost = {axis - behind: stays for axis, stays in lost.items() if axis >= behind}
        self._lengths.scale(node, at, lost, copied)

    def _count(self, node: ir.Node, name: str, stays: Flags | None) -> None:
        groups = node.attributes.get_int(name, 1)
        if groups > 1 and stays is not None:
            left = int(stays.reshape(groups, -1)[:, 0].sum())
            node.attributes[name] = ir.AttrInt64(name, left)

    def _hidden(self, node: ir.Node) -> None:
        stays = self._mask(node.inputs[2]).get(2)
        if stays is not None:
            node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", int(stays.sum()))

    def _split(self, node: ir.Node) -> None:
        axis = node.attributes.get_int("axis", 0) % max(self._rank(node.inputs[0]), 1)
        stays = self._mask(node.inputs[0]).get(axis)
        if stays is None:
            return
        lengths, start = [], 0
        for output in node.outputs:
            length = (self._flow.shape(output) or ())[axis]
            lengths.append(int(stays[start : start + length].sum()))
            start += length
        node.resize_inputs(2)
        sizes = self._lengths.constant(node, "split", np.asarray(lengths, dtype=np.int64))
        node.replace_input_with(1, sizes)
        node.attributes.pop("num_outputs", None)

    def _slice(self, node: ir.Node) -> None:
        """Select what remains of the selected positions; other axes are left alone."""
        lost = self._mask(node.inputs[0])
        places = picking.slice_places(self._flow, node) or {}
        for index, (axis, where) in enumerate(places.items()):
            stays = lost.get(axis)
            if stays is None or where is None or not len(where):  # nothing picked stays so
                continue
            if len(where) == len(stays):  # all stays all, also of an axis that samples lie on too
                continue
            line = (np.cumsum(stays) - 1)[where[stays[where]]]
            distances = np.unique(np.diff(line)) if len(line) > 1 else np.asarray([1])
            if len(distances) > 1:
                self._take_before(node, axis, line)
                line, distances = np.arange(len(line)), np.asarray([1])
            step, left = int(distances[0]), int(stays.sum())
            end = int(line[-1]) + (1 if step > 0 else -1)
            self._lengths.set(node, 1, "starts", {index: int(line[0])})
            self._lengths.set(node, 2, "ends", {index: end if end >= 0 else -left - 1})
            if input_of(node, 4) is not None:
                self._lengths.set(node, 4, "steps", {index: step})
            elif step != 1:
                count = len(places)
                if input_of(node, 3) is None:
                    node.resize_inputs(4)
                    axes = np.asarray(list(places), dtype=np.int64)
                    node.replace_input_with(3, self._lengths.constant(node, "axes", axes))
                steps = np.ones(count, dtype=np.int64)
                steps[index] = step
                node.resize_inputs(5)
                node.replace_input_with(4, self._lengths.constant(node, "steps", steps))

    def _take_before(self, node: ir.Node, axis: int, line: Array) -> None:
        """Select channels at uneven distances, which a ``Slice`` cannot do."""
        places = self._lengths.constant(node, "places", line.astype(np.int64))
        self._lengths.insert(node, 0, "Gather", [node.inputs[0], places], {"axis": axis})

    def _gather(self, node: ir.Node) -> None:
        axis = node.attributes.get_int("axis", 0) % max(self._rank(node.inputs[0]), 1)
        stays = self._mask(node.inputs[0]).get(axis)
        places = picking.gather_places(self._flow, node)
        if stays is None or places is None:
            return
        index = (np.cumsum(stays) - 1)[places]
        for index_axis in range(index.ndim):
            remaining = self._mask(node.outputs[0]).get(axis + index_axis)
            if remaining is not None:
                index = np.compress(remaining, index, index_axis)
        index = np.asarray(index, dtype=np.int64)
        node.replace_input_with(1, self._lengths.constant(node, "indices", index))

    def _pad(self, node: ir.Node) -> None:
        widths = picking.pad_widths(self._flow, node) or {}
        lost = self._mask(node.outputs[0])
        entries: dict[int, int] = {}
        for index, (axis, (left, right)) in enumerate(widths.items()):
            stays = lost.get(axis)
            if stays is not None and left is not None and right is not None and (left or right):
                entries[index] = int(stays[:left].sum())
                entries[index + len(widths)] = int(stays[len(stays) - right :].sum())
        if entries:
            self._lengths.set(node, 1, "pads", entries)

    def _resize(self, node: ir.Node) -> None:
        """Set the channels of a ``Resize`` that is given the lengths of all axes."""
        sizes = input_of(node, 3)
        if sizes is not None and node.attributes.get("axes") is None:
            entries = {a: int(s.sum()) for a, s in self._mask(node.outputs[0]).items()}
            self._lengths.set(node, 3, "sizes", entries)

    def _squeeze(self, node: ir.Node) -> None:
        """Name the squeezed axes of length 1 before other axes get that length."""
        if input_of(node, 1) is not None:
            return
        before = self._flow.shape(node.inputs[0]) or ()
        axes = [axis for axis, length in enumerate(before) if length == 1]
        node.resize_inputs(2)
        axes_input = self._lengths.constant(node, "axes", np.asarray(axes, dtype=np.int64))
        node.replace_input_with(1, axes_input)


_BY_RULE: Mapping[Rule | None, Callable[[Adjuster, ir.Node], None]] = {
    views.constant: Adjuster._constant,
    views.expand: Adjuster._shape,
    views.tile: Adjuster._shape,
    picking.split: Adjuster._split,
    picking.cut: Adjuster._slice,
    picking.gather: Adjuster._gather,
    picking.pad: Adjuster._pad,
    recurrences.recurrent: Adjuster._hidden,
}
"""By the rule that the channels followed through a node."""
_BY_NAME: Mapping[str, Callable[[Adjuster, ir.Node], None]] = {
    "Squeeze": Adjuster._squeeze,
    "Resize": Adjuster._resize,
}
"""Where one rule is that of several operators."""
