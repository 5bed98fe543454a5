"""An order of channels in which N of M keeps more.

Any order of a layer's input channels computes the same function if what writes them has the same
order. J. Pool and C. Yu, Channel Permutations for N:M Sparsity, 2021 (NeurIPS), search for one by
exchanging two channels at a time, the pair that gains most first; here many pairs are exchanged in
a round, each from groups that no other touches, so that their gains add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import Ordering, ordering
from compressor.passes.prune.sparse.layers import input_channels, positions
from compressor.passes.prune.sparse.patterns import Pattern, group_mask
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, Member
from compressor.types.layers import Layer

_ROUNDS = 100
_CHANNELS = 2048  # that are searched together; memory grows with the square
_WORK = 2e9  # differences of two weights that are looked at, all rounds together
_LEAST_ROWS = 64  # weights of a channel that are looked at whatever that costs
_LEAST_GAIN = 1e-5  # of what a group keeps on average; less may be an error of rounding


def kept_share(scores: Tensor, n: int, m: int) -> float:
    """Return the share of the sum of all scores that N of M keeps.

    Args:
        scores: magnitudes, ``[rows, columns]``.
        n: how many stay.
        m: columns in a group.
    """
    total = float(scores.sum(dtype=torch.float64))
    kept = scores.where(group_mask(scores, n, m), 0.0)
    return float(kept.sum(dtype=torch.float64)) / total if total else 1.0


def search_order(scores: Tensor, n: int, m: int) -> Tensor:
    """Find an order of channels in which N of M keeps more of the scores.

    Deterministic, and bounded in work: where there are many channels, only those within 2048 of
    each other are exchanged, and an even sample of the rows is looked at.

    Args:
        scores: magnitudes, ``[rows, channels]``; each row is a place where one weight of each
            channel is compared with the others.
        n: how many stay.
        m: channels in a group.

    Returns:
        The channel at each position, int64 ``[channels]``; the order as it was, if none is found
        that keeps more.

    Raises:
        ValueError: the channels do not divide into groups.
    """
    channels = scores.shape[1]
    if channels % m:
        raise ValueError(f"{channels} channels do not divide into groups of {m}")
    same = torch.arange(channels)
    if not 0 < n < m or channels == m:
        return same
    width = max(_CHANNELS // m, 2) * m
    spans = [slice(s, min(s + width, channels)) for s in range(0, channels, width)]
    order = torch.cat([_searched(scores[:, span], n, m) + span.start for span in spans])
    gained = kept_share(scores[:, order], n, m) > kept_share(scores, n, m)
    return order if gained else same


def _searched(scores: Tensor, n: int, m: int) -> Tensor:
    """Exchange channels until nothing is gained, or enough work is done."""
    sampled = _sampled(scores).to(torch.float32).T.contiguous()  # a channel is a row
    channels, rows = sampled.shape
    groups = torch.arange(channels).reshape(-1, m)  # the channels in each group
    sums = sampled.sum(1, dtype=torch.float64)
    rest = torch.empty(channels, dtype=torch.float64)  # what its group keeps without a channel
    least = torch.empty_like(sampled)  # the least score that is kept then
    above = torch.empty(channels, channels, dtype=torch.float64)
    kept = torch.empty(len(groups), dtype=torch.float64)
    changed = torch.arange(len(groups))
    work = 0.0
    for _ in range(_ROUNDS):
        _look_at(sampled, groups, changed, n, (rest, least, kept))
        own = groups[changed].reshape(-1)
        # The sum of max(b - a, 0) is half that of |b - a| + b - a.
        distance = torch.cdist(least[own], sampled, p=1).to(torch.float64)
        above[own] = (distance + sums - least[own].sum(1, dtype=torch.float64)[:, None]) / 2
        work += len(own) * channels * rows
        changed = _exchange(groups, rest, above, kept)
        if not len(changed) or work > _WORK:
            break
    return groups.reshape(-1)


def _sampled(scores: Tensor) -> Tensor:
    """Return as many rows as can be looked at ten times, evenly spread."""
    rows, channels = scores.shape
    count = max(int(_WORK / 10 / channels**2), _LEAST_ROWS)
    if rows <= count:
        return scores
    return scores[torch.linspace(0, rows - 1, count).round().to(torch.int64)]


def _look_at(
    scores: Tensor, groups: Tensor, changed: Tensor, n: int, found: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Find again what some groups keep: as they are, and without each of their channels."""
    rest, least, kept = found
    members = groups[changed]
    kept[changed] = scores[members].topk(n, dim=1).values.sum((1, 2), dtype=torch.float64)
    for place in range(members.shape[1]):
        others = torch.cat([members[:, :place], members[:, place + 1 :]], dim=1)
        highest = scores[others].topk(n, dim=1).values
        rest[members[:, place]] = highest.sum((1, 2), dtype=torch.float64)
        least[members[:, place]] = highest[:, -1]


def _exchange(groups: Tensor, rest: Tensor, above: Tensor, kept: Tensor) -> Tensor:
    """Exchange the pairs of channels that gain most; returns the groups that have changed."""
    count, m = groups.shape
    order = groups.reshape(-1)
    # A group that loses channel a and gets b keeps rest[a] + above[a, b].
    gets = (rest[:, None] + above)[order][:, order]
    gain = (gets + gets.T).reshape(count, m, count, m)
    gain = gain - (kept[:, None] + kept)[:, None, :, None]
    best, places = gain.permute(0, 2, 1, 3).reshape(count, count, m * m).max(2)
    threshold = _LEAST_GAIN * float(kept.mean())
    first, second = torch.triu_indices(count, count, 1)
    gains = best[first, second]
    candidates = torch.nonzero(gains > threshold)[:, 0]
    ranked = candidates[torch.argsort(gains[candidates], descending=True, stable=True)]
    busy: set[int] = set()
    for a, b in zip(first[ranked].tolist(), second[ranked].tolist(), strict=True):
        if a in busy or b in busy:
            continue
        busy |= {a, b}
        i, j = divmod(int(places[a, b]), m)
        groups[a, i], groups[b, j] = groups[b, j].clone(), groups[a, i].clone()
    return torch.tensor(sorted(busy), dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Reorderable:
    """A group of channels that may change places.

    Attributes:
        members: the axes on which they lie, all in the same order.
        readers: layers that are pruned along them.
        pattern: of those layers.
    """

    members: tuple[Member, ...]
    readers: tuple[Layer, ...]
    pattern: Pattern


@dataclass(frozen=True)
class Orders:
    """Which layers' input channels may change places.

    Attributes:
        groups: the channels, group by group.
        reasons: why a pruned layer's input channels stay where they are, by layer name.
    """

    groups: tuple[Reorderable, ...]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Reordered:
    """New orders of channels.

    Attributes:
        channels: the channel at each position of a layer's input, by layer name.
        axes: the position at which each position's values were, by parameter and axis.
        before: magnitude that groups of N of M keep as they are, and all magnitude, of the
            layers whose input channels change places.
        after: magnitude that they keep in the new order.
    """

    channels: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    before: list[tuple[float, float]] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def note(self) -> str:
        """Say what the new orders gain."""
        total = sum(whole for _, whole in self.before)
        if not total:
            return "no order of channels keeps more than the one that is"
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
    """Find the groups of channels that may change places; reads structure only.

    Args:
        carrier: the model; it has a graph.
        patterns: N of M for each layer that is pruned, by name.
    """
    found = analyse(carrier.graph())
    order = ordering(found)
    layers = {x.weight: x for x in carrier.layers() if x.name in patterns}
    owned = carrier.tensors().keys()
    groups = []
    reasons = {
        x.name: "channels stay: what it reads is not computed by layers" for x in layers.values()
    }
    for group in found.channels.groups:
        read = [m.parameter for m in group.members if m.role == "input"]
        readers = tuple(layers[name] for name in dict.fromkeys(read) if name in layers)
        if not readers:
            continue
        wanted = {patterns[x.name] for x in readers}
        reason = _obstacle(group, order, owned)
        if not reason and len(wanted) > 1:
            reason = "its readers have unlike n and m"
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


def _obstacle(group: ChannelGroup, order: Ordering, owned: Collection[str]) -> str:
    """Say why channels cannot change places; empty if they can."""
    if reason := order.obstacle(group):
        return reason
    foreign = [m.parameter for m in group.members if m.parameter not in owned]
    return f"{foreign[0]!r} is no parameter of the model" if foreign else ""


def _by_channel(carrier: Carrier, layer: Layer) -> Tensor:
    """Magnitudes of a layer's weights, ``[rows * positions, channels]``."""
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32).abs()
    split = matrix.reshape(layer.rows, input_channels(layer), positions(layer))
    return split.transpose(1, 2).reshape(-1, input_channels(layer))
