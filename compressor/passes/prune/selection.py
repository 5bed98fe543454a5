"""Which units go under a target: one order over all groups, cut where the target is met.

Each group has an order in which its units would go. The orders are merged into one by a value that
compares across groups, and a prefix of it is removed; so the more has to go, the more goes of each
group, and never does a unit stay that went under a milder target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, lcm, prod

import numpy as np
from numpy.typing import NDArray

from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Units, kept

Values = NDArray[np.float64]
_TOLERANCE = 1e-9  # of a share, so that 0.3 of 10 units is 3


@dataclass(frozen=True, eq=False)
class Queue:
    """A group's units in the order in which they go.

    Attributes:
        units: the least important first, ``[n]``.
        values: what decides between groups, for each unit; ascending.
        remaining: how many may remain, ascending; the last is all of them.
    """

    units: Units
    values: Values
    remaining: Units

    def first(self, count: int) -> Units:
        """Return the units to remove where ``count`` should go; fewer, if that leaves too few."""
        wanted = len(self.units) - count
        stay = int(self.remaining[np.searchsorted(self.remaining, wanted)])
        return self.units[: len(self.units) - stay]

    def nearest(self, share: float) -> Units:
        """Return the units to remove so that about ``share`` of them goes.

        Where two numbers are as near, fewer go.
        """
        distance = np.abs(self.remaining - len(self.units) * (1 - share))
        near = np.flatnonzero(distance <= distance.min() + _TOLERANCE * len(self.units))
        return self.units[: len(self.units) - int(self.remaining[near[-1]])]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Several groups' units in one order, by ascending value.

    Attributes:
        queues: the groups.
        count: units of the whole model.
        gone: units that go whatever the target is.
    """

    queues: tuple[Queue, ...]
    count: int
    gone: Units

    @cached_property
    def _owners(self) -> Units:
        """The group of each unit of the common order."""
        sizes = [len(q.units) for q in self.queues]
        owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        place = np.concatenate([np.arange(n) for n in sizes] or [np.zeros(0, np.int64)])
        values = np.concatenate([q.values for q in self.queues] or [np.zeros(0)])
        found: Units = owner[np.lexsort((owner, place, values))]
        return found

    def __len__(self) -> int:
        """Return how many units the order has."""
        return len(self._owners)

    def removed(self, length: int) -> Flags:
        """Return what goes with the first ``length`` units of the order."""
        counts = np.bincount(self._owners[:length], minlength=len(self.queues))
        flags = np.zeros(self.count, dtype=bool)
        flags[self.gone] = True
        for queue, count in zip(self.queues, counts, strict=True):
            flags[queue.first(int(count))] = True
        return flags

    def cut(self, cost: Callable[[Flags], float], target: float) -> int:
        """Return the shortest length at which the cost is at most ``target``, by bisection.

        Args:
            cost: of the model without some units; never more where more of them go.
            target: what the cost may be. If even the whole order leaves more, all of it goes.
        """
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if cost(self.removed(middle)) <= target:
                high = middle
            else:
                low = middle + 1
        return high


def allowed_counts(count: int, step: int, minimum: float) -> Units:
    """Return how many of ``count`` units may remain, ascending; the last is ``count``.

    Args:
        count: units of the group.
        step: they remain in multiples of it, or all.
        minimum: the least number (an ``int``) or share (a ``float``); one stays in any case.
    """
    least = minimum if isinstance(minimum, int) else ceil(minimum * count - _TOLERANCE)
    counts = np.arange(step, count, step, dtype=np.int64)
    return np.append(counts[counts >= max(least, 1)], np.int64(count))


def unit_step(channels: ChannelMap, group: ChannelGroup, multiple: int) -> int:
    """Return in which steps a group's units go if positions come in multiples.

    Where each unit takes as many positions ``p`` on an output axis, that is
    ``multiple / gcd(multiple, p)``. An axis on which units differ in size has no say.

    Args:
        channels: all of the model's.
        group: one of its groups.
        multiple: what the positions of its output axes are to be multiples of.
    """
    step = 1
    for member in group.members:
        axis = channels.parameters[member.parameter][member.axis]
        if member.role != "output" or axis is None:
            continue
        sizes = np.bincount(axis[axis >= 0], minlength=channels.count)[group.units]
        if sizes.size and sizes.min() == sizes.max() > 0:
            step = lcm(step, multiple // gcd(multiple, int(sizes[0])))
    return step


def by_score(units: Units, scores: Values, remaining: Units) -> Queue:
    """Return a group's queue whose values are its scores; equal scores go by number.

    Args:
        units: the group's, ``[n]``.
        scores: how important each is, ``[n]``.
        remaining: as in :class:`Queue`.
    """
    order = np.lexsort((units, scores))
    return Queue(units[order], scores[order], remaining)


def by_share(queue: Queue) -> Queue:
    """Return the queue with the share of the group that is gone as values.

    So all groups lose the same share.
    """
    total = len(queue.units)
    return Queue(queue.units, np.arange(1, total + 1) / max(total, 1), queue.remaining)


def by_loss(queue: Queue, shares: Sequence[float], losses: Sequence[float]) -> Queue:
    """Return the queue with the loss that was measured on the group alone as values.

    So groups lose until each alone would cost the same.

    Args:
        queue: the group's.
        shares: shares of its units that were removed, ascending.
        losses: what that cost. Made ascending, and interpolated linearly from nothing at share 0;
            beyond the last share it goes on as before.
    """
    known = np.maximum.accumulate(np.maximum([0.0, *losses], 0.0))
    at = np.array([0.0, *shares])
    slope = (known[-1] - known[-2]) / (at[-1] - at[-2])
    wanted = by_share(queue).values
    beyond = np.maximum(wanted - at[-1], 0.0) * slope
    return Queue(queue.units, np.interp(wanted, at, known) + beyond, queue.remaining)


@dataclass(frozen=True, eq=False)
class Tensors:
    """Sizes of a model's parameters, as far as units lie on them.

    Attributes:
        fixed: weights on which no unit lies.
        factors: for each other parameter, the product of its axes without units, and the units
            at each position of the other axes.
    """

    fixed: int
    factors: tuple[tuple[int, tuple[Units, ...]], ...]

    def count(self, removed: Flags) -> float:
        """Return how many weights there are without the removed units."""
        return self.fixed + sum(
            constant * prod(int(kept(axis, removed).sum()) for axis in axes)
            for constant, axes in self.factors
        )
