"""Channels as they flow through a graph, as the rules of operators record them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.labels import Family, Unions, depends_on, overlap, placed, spread
from compressor.graph.costs import node_macs
from compressor.graph.layers import layer_name
from compressor.graph.lengths import Lengths, Shape
from compressor.graph.values import is_stored
from compressor.types.channels import Role, Units

UNKNOWN = "has a value of unknown shape"


@dataclass(frozen=True, eq=False)
class Source:
    """Channels that a layer computes from others."""

    layer: str
    channels: Units


@dataclass(frozen=True, eq=False)
class Note:
    """An effect of a node on channels."""

    node: ir.Node | None
    op_type: str
    reason: str
    channels: Units


@dataclass(frozen=True, eq=False)
class Counted:
    """Multiply-accumulates of a node, and the axes whose lengths they are proportional to."""

    node: ir.Node
    axes: tuple[tuple[ir.Value, int], ...]
    work: int


@dataclass(frozen=True, eq=False)
class Meeting:
    """One of several values that meet element by element.

    Attributes:
        lengths: of its axes, after it got the rank of the others.
        families: its channels, of the same rank.
    """

    name: str
    lengths: Shape
    families: Sequence[Family]


class Flow:
    """Channels of all values of a graph; rules fill it node by node.

    Attributes:
        families: by value name.
        roles: of the axes of initializers.
        sources: channels that layers compute, in the order of execution.
        frozen: channels that cannot be removed.
        mixed: channels that an operator combines, as a normalization does.
        placed: channels whose position matters to an operator, though any of them may be removed.
        counted: nodes that multiply.
        repeats: channels along axes on which a value is the same everywhere.
        observed: outputs of layers and activation functions, with the axis of their channels.
    """

    def __init__(self, model: ir.Model, lengths: Lengths):
        self.model = model
        self.lengths = lengths
        self.unions = Unions()
        self.families: dict[str, list[Family]] = {}
        self.roles: dict[tuple[str, int], Role] = {}
        self.sources: list[Source] = []
        self.frozen: list[Note] = []
        self.mixed: list[Note] = []
        self.placed: list[Note] = []
        self.counted: list[Counted] = []
        self.observed: list[tuple[ir.Value, int]] = []
        self.repeats: set[int] = set()
        self._now: ir.Node | None = None
        inputs = {value.name for value in model.graph.inputs}
        self._constants = set(model.graph.initializers) - inputs

    # ------------------------------------------------------------------ queries

    def shape(self, value: ir.Value | None) -> Shape | None:
        """Return a value's shape, if it is known."""
        return self.lengths.shape(value)

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value depends on no input."""
        return value is not None and value.name in self._constants

    def enter(self, node: ir.Node | None) -> None:
        """Start on a node, if there is one, and note whether its outputs are constant."""
        self._now = node
        if node is None:
            return
        inputs = [v for v in node.inputs if v is not None]
        if all(self.is_constant(v) for v in inputs):
            self._constants.update(v.name for v in node.outputs if v.name)

    def labels(self, value: ir.Value | None) -> list[Family]:
        """Return a value's families; those of a constant are created on first use."""
        if value is None or not value.name:
            return []
        families = self.families.get(value.name)
        if families is None and is_stored(value):
            shape = self.shape(value) or ()
            families = [
                placed(self.unions.fresh((length,)), axis, len(shape))
                for axis, length in enumerate(shape)
                if length > 1
            ]
            self.families[value.name] = families
        return families or []

    def on_axis(self, value: ir.Value | None, axis: int) -> Family | None:
        """Return the family that depends on an axis of a value."""
        return next((f for f in self.labels(value) if depends_on(f, axis)), None)

    # ------------------------------------------------------------------ what rules record

    def put(self, value: ir.Value, families: Iterable[Family]) -> None:
        """Set the channels of a value."""
        if value.name:
            self.families[value.name] = list(families)

    def unify(self, first: Family, second: Family, node: ir.Node) -> Family:
        """Unite channels at the same position, after broadcasting, and return them.

        Where only one of the two has a channel, that channel cannot be removed. Nor can those along
        axes of different lengths: there the graph fits one length of an open axis, which is not
        told.
        """
        lengths = zip(reversed(first.shape), reversed(second.shape), strict=False)
        apart = [-1 - i for i, (a, b) in enumerate(lengths) if a != b and 1 not in (a, b)]
        if apart:
            self.freeze([first, second], node, UNKNOWN)
            for axis in apart:
                first, second = first.take([0], axis), second.take([0], axis)
        first, second = np.broadcast_arrays(first, second)
        both = (first >= 0) & (second >= 0)
        self.unions.join(first[both], second[both])
        alone = (first >= 0) != (second >= 0)
        if alone.any():
            lonely = np.maximum(first, second)[alone]
            self.freeze([lonely], node, "meets channels that nothing computes")
        unified: Family = np.where(first >= 0, first, second)
        return unified

    def united(self, family: Family, others: list[Family], node: ir.Node) -> list[Family]:
        """Return families with one more, which is united with those that it overlaps."""
        for other in [f for f in others if overlap(f, family)]:
            family = self.unify(other, family, node)
            others = [f for f in others if f is not other]
        return [*others, family]

    def couple(self, family: Family, axis: int) -> Family:
        """Unite channels along an axis; return the family without the axis.

        Channels beside a position without a channel cannot be removed.
        """
        first = family.take([0], axis)
        lonely = (family < 0).any(axis, keepdims=True)
        if lonely.any():
            alone = np.broadcast_to(lonely, family.shape) & (family >= 0)
            self.freeze([family[alone]], self._now, "puts them beside values without channels")
            first = np.where(lonely, -1, first)
        beside = np.broadcast_to(first, family.shape) >= 0
        self.unions.join(family[beside], np.broadcast_to(first, family.shape)[beside])
        return first

    def couple_others(self, family: Family, axis: int) -> Family:
        """Unite channels along all axes but this one; return the family along it."""
        for other in range(family.ndim):
            if other != axis and depends_on(family, other):
                family = self.couple(family, other)
        return family

    def freeze(self, families: Iterable[Family], node: ir.Node | None, reason: str) -> None:
        """Record that channels cannot be removed."""
        self.frozen += _notes(families, node, reason)

    def freeze_node(self, node: ir.Node, reason: str) -> None:
        """Record that no channel that a node reads can be removed; its outputs get no channels."""
        self.freeze_values(node.inputs, node, reason)
        for output in node.outputs:
            self.put(output, [])

    def freeze_values(
        self, values: Iterable[ir.Value | None], node: ir.Node | None, reason: str
    ) -> None:
        """Record that no channel of some values can be removed."""
        for value in values:
            self.freeze(self.labels(value), node, reason)

    def mix(self, families: Iterable[Family], node: ir.Node) -> None:
        """Record that an operator combines all channels."""
        self.mixed += _notes(families, node)

    def place(self, families: Iterable[Family], node: ir.Node) -> None:
        """Record that the positions of channels matter to an operator."""
        self.placed += _notes(families, node)

    def source(self, node: ir.Node, weight: ir.Value | None, channels: Units) -> None:
        """Record that a layer computes channels."""
        name = node.name or "" if weight is None else layer_name(weight.name or "")
        self.sources.append(Source(name, channels[channels >= 0]))

    def role(self, value: ir.Value | None, axis: int, role: Role) -> None:
        """Record the role of an initializer's axis, unless it has one."""
        if value is not None and value.is_initializer() and value.name:
            self.roles.setdefault((value.name, axis), role)

    def count(
        self, node: ir.Node, *axes: tuple[ir.Value | None, int], work: int | None = None
    ) -> None:
        """Record a node that multiplies, and the axes that its work is proportional to.

        Args:
            work: multiply-accumulates, if these are only a part of the node's.
        """
        factors = tuple((value, axis) for value, axis in axes if value is not None)
        self.counted.append(Counted(node, factors, node_macs(node) if work is None else work))

    def observe(self, value: ir.Value, axis: int) -> None:
        """Record a value that a layer or its activation function computes."""
        self.observed.append((value, axis))

    # ------------------------------------------------------------------ common to many operators

    def broadcast(self, node: ir.Node, inputs: Sequence[ir.Value], shape: Shape) -> list[Family]:
        """Combine the channels of values that meet element by element.

        Args:
            inputs: the values; their shapes are known.
        """
        rank = len(shape)
        meetings = []
        for value in inputs:
            value_shape = self.shape(value) or ()
            lengths = (1,) * (rank - len(value_shape)) + value_shape
            families = [spread(f, rank) for f in self.labels(value)]
            meetings.append(Meeting(value.name or "", lengths, families))
        return self.meet(node, meetings)

    def meet(self, node: ir.Node, meetings: Sequence[Meeting]) -> list[Family]:
        """Combine the channels of values of one rank that meet element by element."""
        merged: list[Family] = []
        for meeting in meetings:
            for family in meeting.families:
                current: Family | None = family
                for other in [f for f in merged if current is not None and overlap(f, current)]:
                    current, stays = self._meet(current, other, node)
                    if not stays:
                        merged = [f for f in merged if f is not other]
                if current is not None:
                    merged.append(current)
        for meeting in meetings:
            for family in merged:
                axes = [i for i, n in enumerate(family.shape) if n > 1 and meeting.lengths[i] > 1]
                if axes and not any(overlap(family, current) for current in meeting.families):
                    reason = f"meets {meeting.name!r}, which has no channels"
                    self.fix(family, axes, node, reason)
        return merged

    def _meet(
        self, current: Family | None, other: Family, node: ir.Node
    ) -> tuple[Family | None, bool]:
        """Combine two families that meet; return the result, and whether the other one stays.

        Values shared by all heads, such as a scale for each feature of a head, meet only the inner
        axes of a joint family: heads can be removed, single features cannot.
        """
        if current is None:
            return None, True
        for inner, joint in ((current, other), (other, current)):
            axes = [i for i, n in enumerate(inner.shape) if n > 1]
            first = next(i for i, n in enumerate(joint.shape) if n > 1)
            if first not in axes and self._outside(joint, axes):
                for axis in axes:
                    if joint.shape[axis] > 1:
                        self.couple(joint, axis)
                self.freeze([inner], node, "holds the same for every head or group")
                return (None, True) if inner is current else (current, False)
        return self.unify(other, current, node), False

    def fix(self, family: Family, axes: Sequence[int], node: ir.Node, reason: str) -> None:
        """Record that nothing can be removed along some axes, only along others, if any."""
        if self._outside(family, axes):
            for axis in axes:
                self.couple(family, axis)
        else:
            self.freeze([family], node, reason)

    def mix_over(self, families: Iterable[Family], axes: Sequence[int], node: ir.Node) -> None:
        """Record that an operator combines all channels along some axes."""
        for family in families:
            touched = [axis for axis in axes if depends_on(family, axis)]
            if touched and self._outside(family, axes):
                for axis in touched:
                    self.couple(family, axis)
            elif touched:
                self.mix([family], node)

    def sum_over(self, families: Iterable[Family], axes: Sequence[int]) -> None:
        """Record a sum along some axes; channels that lie on others, too, are removed as a whole.

        Whether the sum stays the same without the removed channels is decided later: see
        :mod:`compressor.graph.channels.zeros`.
        """
        for family in families:
            if self._outside(family, axes):
                for axis in axes:
                    if depends_on(family, axis):
                        self.couple(family, axis)

    def _outside(self, family: Family, axes: Sequence[int]) -> bool:
        return any(n > 1 and axis not in axes for axis, n in enumerate(family.shape))


def named(node: ir.Node) -> str:
    """Return a node's name, or that of what it computes."""
    return node.name or next((v.name for v in node.outputs if v.name), "")


def _notes(families: Iterable[Family], node: ir.Node | None, reason: str = "") -> Iterator[Note]:
    op_type = ""
    if node is not None:
        op_type = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    for family in families:
        channels = family[family >= 0]
        if len(channels):
            yield Note(node, op_type, reason, np.unique(channels))
