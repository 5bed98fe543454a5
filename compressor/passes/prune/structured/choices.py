"""What can be chosen in a network: how many units of each group remain, and which blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from compressor.passes.prune.criteria import Queue
from compressor.passes.prune.structured.segments import Segment, Variant
from compressor.types.channels import Flags


@dataclass(frozen=True)
class State:
    """How many units of each group remain, and which blocks are gone."""

    widths: tuple[int, ...]
    dropped: frozenset[int] = frozenset()

    def narrowed(self, group: int, width: int) -> State:
        """Return the state with another number of a group's units."""
        return replace(self, widths=(*self.widths[:group], width, *self.widths[group + 1 :]))


@dataclass(frozen=True, eq=False)
class Network:
    """What can be chosen in a network.

    Attributes:
        segments: its parts whose times add up.
        queues: the order in which each group's units go, and how many may remain.
        blocks: for each block that may be dropped, the groups that go with it.
        count: number of units.
        gone: units that go in any case.
    """

    segments: tuple[Segment, ...]
    queues: tuple[Queue, ...]
    blocks: Mapping[int, tuple[int, ...]]
    count: int
    gone: Flags

    def variant(self, state: State) -> Variant:
        """Return what is taken away in a state."""
        removed = self.gone.copy()
        for queue, width in zip(self.queues, state.widths, strict=True):
            removed[queue.units[: len(queue.units) - width]] = True
        return Variant(removed, state.dropped)

    @property
    def full(self) -> State:
        """The state in which everything remains that may."""
        return State(tuple(len(q.units) for q in self.queues))

    @property
    def least(self) -> State:
        """The state in which everything is gone that can be."""
        return State(tuple(int(q.remaining[0]) for q in self.queues), frozenset(self.blocks))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the segments that depend on each group."""
        return tuple(
            tuple(i for i, s in enumerate(self.segments) if s.units[q.units].any())
            for q in self.queues
        )

    def place(self, block: int) -> int:
        """Return the number of the segment in which a block ends."""
        return next(i for i, s in enumerate(self.segments) if block in s.blocks)
