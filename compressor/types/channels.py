"""Channels of a model, and which of them can only be removed together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Units: TypeAlias = NDArray[np.int64]
"""The unit at each position of an axis; -1 where nothing can be removed."""
Flags: TypeAlias = NDArray[np.bool_]
"""One for each unit of a model."""

Role = Literal[
    "output", "input", "norm-scale", "norm-shift", "norm-mean", "norm-variance", "bias", "other"
]
"""What the channels of a parameter's axis are: what its layer computes or reads, what a
normalization holds for each, what is added to each, or anything else."""
SPARED: tuple[Role, ...] = ("norm-variance", "other")
"""Roles of parameters that are not zeroed where a removal is proved by zeroing: a divisor of zero
gives NaN, and of other constants it is not known what zero means."""


@dataclass(frozen=True)
class Member:
    """An axis of a parameter on which channels of a group lie."""

    parameter: str
    axis: int
    role: Role


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Units that lie on the same axes of the same parameters, so that they can be compared.

    A unit is what can be removed at once, from every place where it lies: a channel from all that
    write, normalize and read it; for attention, a whole head.

    Attributes:
        name: the first layer that computes them.
        units: their numbers in the model.
        members: where they lie.
        frozen: why none of them can be removed; empty if they can.
        mixed: an operator that computes with all of them at once, such as a layer norm over them,
            so that a unit of zeros is not the same as no unit; empty if there is none.
    """

    name: str
    units: Units
    members: tuple[Member, ...]
    frozen: str = ""
    mixed: str = ""


@dataclass(frozen=True, eq=False)
class Product:
    """Multiply-accumulates of one node, and the axes that they are proportional to.

    Attributes:
        node: the node's name.
        macs: for one sample of the lengths that were given, as the model is.
        axes: units at each position of every axis whose length is a factor of ``macs``.
    """

    node: str
    macs: float
    axes: tuple[Units, ...]


@dataclass(frozen=True, eq=False)
class Activation:
    """An axis of a graph value along which units lie; for statistics of activations."""

    value: str
    axis: int
    units: Units


@dataclass(frozen=True)
class FrozenOperator:
    """A node that keeps channels from being removed.

    Attributes:
        node: its name.
        op_type: its operator, with the domain if that is not ONNX's own.
        reason: why, in a few words.
    """

    node: str
    op_type: str
    reason: str


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """All channels of a model.

    Attributes:
        count: number of units; they are numbered from 0.
        groups: every unit is in one.
        parameters: for each parameter that holds units, its axes' units; ``None`` for an axis
            without any.
        products: the nodes that multiply.
        activations: outputs of layers and of their activation functions, with the units on them.
        frozen: what keeps units from being removed.
    """

    count: int
    groups: tuple[ChannelGroup, ...]
    parameters: Mapping[str, tuple[Units | None, ...]]
    products: tuple[Product, ...]
    activations: tuple[Activation, ...]
    frozen: tuple[FrozenOperator, ...]

    @property
    def removable(self) -> Flags:
        """Whether each unit may be removed."""
        flags = np.zeros(self.count, dtype=bool)
        for group in self.groups:
            flags[group.units] = not group.frozen
        return flags

    def macs(self, removed: Flags) -> float:
        """Multiply-accumulates for one sample without the removed units."""
        total = 0.0
        for product in self.products:
            share = 1.0
            for axis in product.axes:
                share *= float(kept(axis, removed).mean())
            total += product.macs * share
        return total


def kept(axis: Units, removed: Flags) -> Flags:
    """Return which positions of an axis remain.

    Args:
        axis: the unit at each position.
        removed: the units that go.
    """
    return (axis < 0) | ~removed[axis]
