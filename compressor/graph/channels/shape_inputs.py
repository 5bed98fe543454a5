"""Lengths and places that a graph holds or computes, changed for axes that become shorter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import Flow
from compressor.graph.channels.picking import gather_places, slice_places
from compressor.graph.editing import Attributes, Editor
from compressor.graph.values import constant_array, is_op
from compressor.types.channels import Flags
from compressor.types.tensors import Array

Lost = Mapping[int, Flags]


class ShapeInputs:
    """Changes what nodes are told about lengths.

    ``Shape`` goes on saying what it said before, so that whatever is computed from it stays the
    same, such as the divisor of a mean; only where a length is used as one it is corrected.

    Args:
        smaller: changed in place.
        flow: what is known of the graph as it was.
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
        given = node.inputs[at]
        assert given is not None
        held = constant_array(given)
        if held is not None:
            changed = np.array(held)
            for index, number in entries.items():
                changed[index] = number
            node.replace_input_with(at, self.constant(node, name, changed))
            return
        length = self.length(given)
        dtype = np.dtype(np.int64) if given.dtype is None else given.dtype.numpy()
        own = np.asarray([entries.get(i, 0) for i in range(length)], dtype=dtype)
        chosen = self.constant(node, f"{name}_set", np.isin(np.arange(length), list(entries)))
        self.insert(node, at, "Where", [chosen, self.constant(node, name, own), given])

    def length(self, vector: ir.Value) -> int:
        """Return of how many entries a vector is."""
        return (self._flow.shape(self._as_it_was(vector)) or (0,))[0]

    def scale(self, node: ir.Node, at: int, lost: Lost, copied: frozenset[int]) -> None:
        """Make lengths that a node is given shorter.

        Args:
            node: reads them.
            at: which input they are.
            lost: which positions remain, by entry.
            copied: values that do not stand for a length.
        """
        given = node.inputs[at]
        assert given is not None
        known = self._flow.lengths.constant(self._as_it_was(given))
        scaled = {
            entry: stays
            for entry, stays in lost.items()
            if known is None or int(known.reshape(-1)[entry]) not in copied
        }
        held = constant_array(given)
        if held is not None:
            own = {e: int(held[e]) * int(s.sum()) // len(s) for e, s in scaled.items()}
            self.set(node, at, "lengths", own)
        elif scaled:
            length = self.length(given)
            above, below = _ratio(scaled, length)
            self.insert(node, at, "Mul", [given, self.constant(node, "kept", above)])
            own_input = node.inputs[at]
            self.insert(node, at, "Div", [own_input, self.constant(node, "of", below)])

    def restore(self, node: ir.Node, lost: Lost) -> None:
        """Let ``Shape`` or ``Size`` say what it said before the axes became shorter."""
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
        wide = self._editor.node(
            "Mul",
            [output, self.constant(node, "of", above)],
            f"{output.name}_wide",
            ir.DataType.INT64,
        )
        whole = self._editor.node(
            "Div",
            [wide.outputs[0], self.constant(node, "kept", below)],
            f"{output.name}_before",
            ir.DataType.INT64,
        )
        self._graph.insert_after(node, [wide, whole])
        for reader, index in readers:
            reader.replace_input_with(index, whole.outputs[0])
        self._before[whole.name or ""] = output

    def _as_it_was(self, value: ir.Value) -> ir.Value:
        return self._before.get(value.name or "", value)

    def _reads(self, reader: ir.Node, entries: Lost) -> bool:
        """Return whether a reader of a shape may look at some entries."""
        places: Array | None = None
        if is_op(reader, "Gather"):
            places = gather_places(self._flow, reader)
        elif is_op(reader, "Slice"):
            places = (slice_places(self._flow, reader) or {}).get(0)
        return places is None or bool(np.isin(places, list(entries)).any())

    def insert(
        self,
        node: ir.Node,
        at: int,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes | None = None,
    ) -> None:
        """Put a node before another, in the place of one of its inputs.

        Args:
            node: what reads the new node.
            at: which of its inputs.
            op_type: of the new node.
            inputs: of the new node; one of them is what was read before.
            attributes: of the new node.
        """
        given = node.inputs[at]
        name = f"{node.outputs[0].name}_{op_type.lower()}"
        dtype = None if given is None else given.dtype
        made = self._editor.node(op_type, inputs, name, dtype, attributes)
        self._graph.insert_before(node, made)
        node.replace_input_with(at, made.outputs[0])


def _ratio(lost: Lost, length: int) -> tuple[Array, Array]:
    """Return by how much to multiply and divide each entry."""
    above, below = np.ones(length, dtype=np.int64), np.ones(length, dtype=np.int64)
    for entry, stays in lost.items():
        common = gcd(int(stays.sum()), len(stays))
        above[entry], below[entry] = int(stays.sum()) // common, len(stays) // common
    return above, below
