"""Which channels may change places: all that computes with them treats them alike.

What a rule lets pass holds the channels in an order that it knows: operators that count them, add
them up one after another or look them up freeze them, and those that move, repeat or pick some
leave them in another order than before. So channels that are not frozen, and that lie in one order
wherever they lie, may take any other order. An operator that mixes them, such as a sum or a norm
over them, mixes them in that order too; the only exception is noted by its rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compressor.graph.channels.analysis import Analysis
from compressor.graph.values import is_op
from compressor.types.channels import ChannelGroup, Units


@dataclass(frozen=True, eq=False)
class Ordering:
    """In which orders a graph's channels lie.

    Attributes:
        lines: by unit, every axis of every value on which it lies.
        placed: by unit, an operator that looks at its place.
        inline: units that lie on tensors which are written into nodes, and so are no parameters.
    """

    lines: Mapping[int, list[Units]]
    placed: Mapping[int, str]
    inline: frozenset[int]

    def obstacle(self, group: ChannelGroup) -> str:
        """Say why a group's channels cannot change places among each other; empty if they can."""
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


def ordering(found: Analysis) -> Ordering:
    """Look up every axis on which channels lie."""
    lines: dict[int, list[Units]] = {}
    for axes in found.axes.values():
        for axis in axes:
            if axis is not None:
                for unit in _on(axis):
                    lines.setdefault(unit, []).append(axis)
    inline = {
        unit
        for node in found.flow.model.graph
        if is_op(node, "Constant")
        for axis in found.axes.get(node.outputs[0].name or "", ())
        if axis is not None
        for unit in _on(axis)
    }
    return Ordering(lines, found.placed, frozenset(inline))


def _on(axis: Units) -> list[int]:
    found: list[int] = np.unique(axis[axis >= 0]).tolist()
    return found
