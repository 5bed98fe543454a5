"""Channels of a model that may change places: which they are, and the order that keeps most.

An order of a layer's input channels is the order in which all that writes, normalizes and reads
them holds them. So whole groups are reordered: everything in them has one axis for each channel,
in one order, and no operator on the way looks at a channel's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import ordering
from compressor.passes.prune.sparse.layers import input_channels, positions
from compressor.passes.prune.sparse.patterns import Pattern
from compressor.passes.prune.sparse.permutation import kept_share, search_order
from compressor.types.carrier import Carrier
from compressor.types.channels import Member
from compressor.types.layers import Layer


@dataclass(frozen=True, eq=False)
class Reorderable:
    """Channels that may change places: axes that share one order, and what is pruned along them."""

    members: tuple[Member, ...]
    readers: tuple[Layer, ...]
    pattern: Pattern


@dataclass(frozen=True)
class Orders:
    """The channels that may change places, and by layer name why others stay where they are."""

    groups: tuple[Reorderable, ...]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Reordered:
    """New orders of channels."""

    # the channel at each position of a layer's input, by layer name
    channels: dict[str, Tensor] = field(default_factory=dict)
    # the position at which each position's values were, by parameter and axis
    axes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    # magnitude that groups of N of M keep as they are, and all magnitude, of the layers whose input
    # channels change places
    before: list[tuple[float, float]] = field(default_factory=list)
    after: list[float] = field(default_factory=list)  # magnitude that they keep in the new order

    def note(self) -> str:
        """Return what the new orders gain, in words."""
        total = sum(whole for _, whole in self.before)
        if not total:
            return "no other order of channels keeps more"
        layers = "1 layer" if len(self.channels) == 1 else f"{len(self.channels)} layers"
        before = 100 * sum(kept for kept, _ in self.before) / total
        after = 100 * sum(self.after) / total
        return (
            f"the input channels of {layers} change places, and their largest weights of each "
            f"group hold {after:.2f} % of the magnitude in place of {before:.2f} %"
        )

    def applied(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter with its channels in their new places."""
        for axis, order in self.axes.get(name, {}).items():
            tensor = tensor.index_select(axis, order)
        return tensor


def plan_orders(carrier: Carrier, patterns: Mapping[str, Pattern]) -> Orders:
    """Find the groups of channels that may change places, by the graph's structure only."""
    analysis = analyse(carrier.graph())
    order = ordering(analysis)
    layers = {x.weight: x for x in carrier.layers() if x.name in patterns}
    owned = carrier.tensors().keys()
    groups = []
    reasons = {
        x.name: "channels stay: its input is not computed by layers" for x in layers.values()
    }
    for group in analysis.channels.groups:
        read = [m.parameter for m in group.members if m.role == "input"]
        readers = tuple(layers[name] for name in dict.fromkeys(read) if name in layers)
        if not readers:
            continue
        wanted = {patterns[x.name] for x in readers}
        foreign = [m.parameter for m in group.members if m.parameter not in owned]
        reason = order.obstacle(group)
        if not reason and foreign:
            reason = f"{foreign[0]!r} is no parameter of the model"
        if not reason and len(wanted) > 1:
            reason = "its readers have different n and m"
        for layer in readers:
            reasons[layer.name] = f"channels stay: {reason}" if reason else ""
        if not reason:
            groups.append(Reorderable(group.members, readers, wanted.pop()))
    return Orders(tuple(groups), {name: reason for name, reason in reasons.items() if reason})


def find_orders(carrier: Carrier, orders: Orders) -> Reordered:
    """Choose an order for each group in which its readers together keep most; reads weights."""
    done = Reordered()
    for group in orders.groups:
        scores = torch.cat([_by_channel(carrier, layer) for layer in group.readers])
        n, m = group.pattern.n, group.pattern.m
        order = search_order(scores, n, m)
        if torch.equal(order, torch.arange(len(order))):
            continue
        whole = float(scores.sum(dtype=torch.float64))
        done.before.append((kept_share(scores, n, m) * whole, whole))
        done.after.append(kept_share(scores[:, order], n, m) * whole)
        done.channels.update({layer.name: order for layer in group.readers})
        for member in group.members:
            done.axes.setdefault(member.parameter, {})[member.axis] = order
    return done


def _by_channel(carrier: Carrier, layer: Layer) -> Tensor:
    """Magnitudes of a layer's weights, ``[rows * positions, channels]``."""
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32).abs()
    split = matrix.reshape(layer.rows, input_channels(layer), positions(layer))
    return split.transpose(1, 2).reshape(-1, input_channels(layer))
