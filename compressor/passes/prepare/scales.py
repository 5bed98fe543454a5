"""Channels that can be scaled together: what writes them and what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compressor.types.channels import Units
from compressor.types.layers import Layer


@dataclass(frozen=True, eq=False)
class Read:
    """A layer that reads channels of a group."""

    layer: Layer
    value: str  # what it reads
    index: Units  # the number of the factor of each weight in a row, `[groups, columns]`


@dataclass(frozen=True, eq=False)
class Written:
    """A layer whose rows are channels of a group."""

    layer: Layer
    value: str  # what it writes
    index: Units  # the number of each row's factor


@dataclass(frozen=True, eq=False)
class ChannelVector:
    """A parameter with one element for each channel: a bias, or the scale of a norm."""

    name: str
    index: Units  # the number of each element's factor


@dataclass(frozen=True, eq=False)
class ScaleGroup:
    """Channels that can be scaled together; a factor of -1 as a number stands for none.

    Attributes:
        name: the first layer that writes them.
        count: how many factors there are.
        reads: layers whose columns are multiplied with the factors.
        writes: layers whose rows are divided by them.
        vectors: parameters that are divided by them.
        values: the axis of each value's channels, and the number of each channel's factor.
        inserted: nothing takes the factors over, and a node of its own divides what layers read.
        through: operators between what writes the channels and what reads them.
        others: further values that are divided, with channels along several axes.
    """

    name: str
    count: int
    reads: tuple[Read, ...]
    writes: tuple[Written, ...]
    vectors: tuple[ChannelVector, ...]
    values: Mapping[str, tuple[int, Units]]
    inserted: bool = False
    through: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def scaled_values(self) -> tuple[str, ...]:
        """The names of the values whose channels are divided, as they are afterwards."""
        return (f"{self.reads[0].value}_equalized",) if self.inserted else tuple(self.values)


@dataclass(frozen=True, eq=False)
class Step:
    """How errors propagate through one node, a layer or another, from its inputs to its output."""

    output: str
    inputs: tuple[str, ...]
    layer: Layer | None = None

    @property
    def reads(self) -> bool:
        """Whether it is a layer or a sum, whose inputs a target may quantize."""
        return self.layer is not None or len(self.inputs) > 1


@dataclass(frozen=True, eq=False)
class ScaleMap:
    """What can be scaled in a graph.

    Attributes:
        groups: in the order of execution.
        steps: the nodes through which errors can be followed, in the order of execution.
        lines: the axis and the units of the channels of each value.
        reason: the most frequent reason why channels cannot be scaled.
        reasons: why a value's channels cannot, by its name.
    """

    groups: tuple[ScaleGroup, ...]
    steps: tuple[Step, ...]
    lines: Mapping[str, tuple[int, Units]]
    reason: str
    reasons: Mapping[str, str] = field(default_factory=dict)
