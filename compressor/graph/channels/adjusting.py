"""Make the constants and attributes of operators fit values that have become smaller."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import Flow
from compressor.graph.channels.lengths import written
from compressor.graph.channels.picking import gather_places, pad_widths, slice_places
from compressor.graph.channels.shape_inputs import ShapeInputs
from compressor.types.channels import Flags
from compressor.types.tensors import Array

_FOLLOWS, _COPIED = -1, 0  # in the shape of a Reshape
_KEPT = 1  # in that of an Expand


class Adjuster:
    """Adjusts one node after the other.

    Args:
        smaller: the copy of a graph, changed in place; the parameters are small already.
        flow: what is known of the graph as it was.
        masks: which positions remain, by value and axis; of axes that lose some.
    """

    def __init__(self, smaller: ir.Model, flow: Flow, masks: Mapping[str, Mapping[int, Flags]]):
        self._graph = smaller.graph
        self._flow = flow
        self._masks = masks
        self._given = ShapeInputs(smaller, flow)

    def adjust(self, node: ir.Node) -> None:
        """Make a node's constants and attributes fit."""
        touched = any(self._mask(v) for v in (*node.inputs, *node.outputs))
        if not touched or node.domain not in ("", "ai.onnx"):
            return
        match node.op_type:
            case "Constant":
                self._constant(node)
            case "Shape" | "Size":
                self._given.restore(node, self._mask(node.inputs[0]))
            case "Reshape" | "Expand" | "ConstantOfShape" | "Tile":
                self._shape(node)
            case "Conv" | "ConvTranspose":
                self._count(node, "group", self._mask(node.inputs[1]).get(0))
            case "GroupNormalization":
                self._count(node, "num_groups", self._mask(node.inputs[0]).get(1))
            case "Split":
                self._split(node)
            case "Slice":
                self._slice(node)
            case "Gather":
                self._gather(node)
            case "Pad":
                self._pad(node)
            case "Resize":
                self._resize(node)
            case "Squeeze":
                self._squeeze(node)

    def _mask(self, value: ir.Value | None) -> Mapping[int, Flags]:
        return {} if value is None else self._masks.get(value.name or "", {})

    def _rank(self, value: ir.Value | None) -> int:
        return len(self._flow.shape(value) or ())

    def _constant(self, node: ir.Node) -> None:
        """Cut a parameter that is written into a node."""
        tensor = written(node)
        assert tensor is not None
        array = tensor.numpy()
        for axis, stays in self._mask(node.outputs[0]).items():
            array = np.compress(stays, array, axis)
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array, dtype=tensor.dtype))

    def _shape(self, node: ir.Node) -> None:
        """Set the lengths that a node gives to axes that lose positions."""
        at = 0 if node.op_type == "ConstantOfShape" else 1
        output, given = node.outputs[0], node.inputs[at]
        lost = self._mask(output)
        if not lost or given is None:
            return
        if node.op_type == "Reshape":
            self._given.scale(node, at, lost, frozenset((_FOLLOWS, _COPIED)))
            return
        if node.op_type == "Tile":
            source = self._flow.shape(node.inputs[0]) or ()
            first = self._rank(output) - len(source)
            lost = {a: s for a, s in lost.items() if a < first or source[a - first] == 1}
        copied = frozenset((_KEPT,) if node.op_type == "Expand" else ())
        behind = self._rank(output) - self._given.length(given)
        lost = {axis - behind: stays for axis, stays in lost.items() if axis >= behind}
        self._given.scale(node, at, lost, copied)

    def _count(self, node: ir.Node, name: str, stays: Flags | None) -> None:
        """Set how many groups a node divides its channels into."""
        groups = node.attributes.get_int(name, 1)
        if groups > 1 and stays is not None:
            left = int(stays.reshape(groups, -1)[:, 0].sum())
            node.attributes[name] = ir.AttrInt64(name, left)

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
        sizes = self._given.constant(node, "split", np.asarray(lengths, dtype=np.int64))
        node.replace_input_with(1, sizes)
        node.attributes.pop("num_outputs", None)

    def _slice(self, node: ir.Node) -> None:
        """Pick what remains of what was picked; other axes are left alone."""
        lost = self._mask(node.inputs[0])
        places = slice_places(self._flow, node) or {}
        for index, (axis, where) in enumerate(places.items()):
            stays = lost.get(axis)
            if stays is None or where is None:
                continue
            line = (np.cumsum(stays) - 1)[where[stays[where]]]
            distances = np.unique(np.diff(line)) if len(line) > 1 else np.asarray([1])
            if len(distances) > 1:
                self._take_before(node, axis, line)
                line, distances = np.arange(len(line)), np.asarray([1])
            step, left = int(distances[0]), int(stays.sum())
            end = int(line[-1]) + (1 if step > 0 else -1)
            self._given.set(node, 1, "starts", {index: int(line[0])})
            self._given.set(node, 2, "ends", {index: end if end >= 0 else -left - 1})
            if len(node.inputs) > 4 and node.inputs[4] is not None:
                self._given.set(node, 4, "steps", {index: step})
            elif step != 1:
                count = len(places)
                if len(node.inputs) < 4 or node.inputs[3] is None:
                    node.resize_inputs(4)
                    axes = np.asarray(list(places), dtype=np.int64)
                    node.replace_input_with(3, self._given.constant(node, "axes", axes))
                steps = np.ones(count, dtype=np.int64)
                steps[index] = step
                node.resize_inputs(5)
                node.replace_input_with(4, self._given.constant(node, "steps", steps))

    def _take_before(self, node: ir.Node, axis: int, line: Array) -> None:
        """Pick channels at uneven distances, which a ``Slice`` cannot."""
        self._given.insert(
            node,
            0,
            "Gather",
            [node.inputs[0], self._given.constant(node, "places", line.astype(np.int64))],
            {"axis": axis},
        )

    def _gather(self, node: ir.Node) -> None:
        axis = node.attributes.get_int("axis", 0) % max(self._rank(node.inputs[0]), 1)
        stays = self._mask(node.inputs[0]).get(axis)
        places = gather_places(self._flow, node)
        if stays is None or places is None:
            return
        index = (np.cumsum(stays) - 1)[places]
        for own in range(index.ndim):
            remaining = self._mask(node.outputs[0]).get(axis + own)
            if remaining is not None:
                index = np.compress(remaining, index, own)
        index = np.asarray(index, dtype=np.int64)
        node.replace_input_with(1, self._given.constant(node, "indices", index))

    def _pad(self, node: ir.Node) -> None:
        widths = pad_widths(self._flow, node) or {}
        lost = self._mask(node.outputs[0])
        entries: dict[int, int] = {}
        for index, (axis, (left, right)) in enumerate(widths.items()):
            stays = lost.get(axis)
            if stays is not None and left is not None and right is not None and (left or right):
                entries[index] = int(stays[:left].sum())
                entries[index + len(widths)] = int(stays[len(stays) - right :].sum())
        if entries:
            self._given.set(node, 1, "pads", entries)

    def _resize(self, node: ir.Node) -> None:
        """Set the channels of a ``Resize`` that is given the lengths of all axes."""
        sizes = node.inputs[3] if len(node.inputs) > 3 else None
        if sizes is not None and node.attributes.get("axes") is None:
            entries = {a: int(s.sum()) for a, s in self._mask(node.outputs[0]).items()}
            self._given.set(node, 3, "sizes", entries)

    def _squeeze(self, node: ir.Node) -> None:
        """Say which axes of length 1 are meant, before others get that length."""
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return
        before = self._flow.shape(node.inputs[0]) or ()
        axes = [axis for axis, length in enumerate(before) if length == 1]
        node.resize_inputs(2)
        axes_input = self._given.constant(node, "axes", np.asarray(axes, dtype=np.int64))
        node.replace_input_with(1, axes_input)
