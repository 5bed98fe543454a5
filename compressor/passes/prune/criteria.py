"""How important units are, and which of them go under a target.

Scores come from weights, gradients or activations, and are taken over whole groups. Each group has
an order in which its units would go. The orders are merged into one by a value that compares
across groups, and a prefix of it is removed, but for units that the target does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil, gcd, lcm, prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float64

from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Units, kept

Scores = NDArray[np.float64]
_TOLERANCE = 1e-9  # of a share, so that 0.3 of 10 units is 3


def position_sums(tensor: Tensor, axis: int) -> Scores:
    """Return the sums at an axis's positions, over all other axes, in double precision: ``[n]``."""
    rest = [i for i in range(tensor.ndim) if i != axis]
    summed = tensor.sum(rest, dtype=float64) if rest else tensor.to(float64)
    return np.asarray(summed.cpu().numpy(), np.float64)


def powers(weight: Tensor, norm: int) -> Tensor:
    """Return the terms of a norm: absolute values (1) or squares (2), in float32 at least."""
    wide = weight.detach()
    wide = wide if wide.dtype.itemsize >= 4 else wide.float()
    return wide.abs() if norm == 1 else wide.square()


def unit_sums(positions: Scores, axis: Units, count: int) -> Scores:
    """Add up the numbers at an axis's positions by unit: ``[count]``, 0 for units not on the axis.

    ``axis`` is the unit at each position; -1 for none.
    """
    owned = axis >= 0
    return np.bincount(axis[owned], weights=positions[owned], minlength=count).astype(np.float64)


def unit_means(positions: Scores, axis: Units, count: int) -> Scores:
    """Average what belongs to each unit; arguments and result as in :func:`unit_sums`."""
    owned = axis >= 0
    sizes = np.bincount(axis[owned], minlength=count)
    return unit_sums(positions, axis, count) / np.maximum(sizes, 1)


def magnitude(terms: Sequence[Scores]) -> Scores:
    """Return the size of everything that a unit consists of, ``mean over members of sum |w|^p``.

    The members' weights lie in one vector, so that a wide convolution counts for more than a
    normalization's single scale. No root is taken: within a group the order is that of the norm,
    and across groups powers tell small units from middling ones, as G. Fang et al. score them
    (DepGraph, 2023, arXiv:2301.12900, section 3.3, who sum over a group).

    Args:
        terms: for each member the sums of :func:`powers`, ``[n]``.
    """
    return np.asarray(np.mean(terms, axis=0))


def average(terms: Sequence[Scores]) -> Scores:
    """Average over members in units of each member's own mean, ``[n]``.

    For what has no common unit, such as activations before and after an activation function.
    """
    return np.asarray(np.mean([normalized(t) for t in terms], axis=0))


def normalized(scores: Scores) -> Scores:
    """Divide by the mean, so that groups compare; all zeros stay."""
    mean = scores.mean() if scores.size else 0.0
    return scores / mean if mean > 0 else scores


def cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """Return the share of weights that are to be zero at a step of training.

    >>> cubic_sparsity(5, begin=0, end=10, final=0.8)
    0.7000000000000001

    ``final + (initial - final) * (1 - t)^3``, with ``t`` growing from 0 at ``begin`` to 1 at
    ``end``: many weights go while there are plenty, few at the end. M. Zhu and S. Gupta, To prune,
    or not to prune, 2017 (arXiv:1710.01878), section 3.

    Args:
        step: the step; it may lie before ``begin`` or after ``end``.
        begin: the last step with the initial share.
        end: the first step with the final share.
        final: share of zeros at the end, 0 to 1.
        initial: share of zeros at the beginning, not above ``final``.

    Raises:
        ValueError: a share is out of range, the shares fall, or ``end`` lies before ``begin``.
    """
    if not 0 <= initial <= final <= 1:
        raise ValueError(f"shares {initial} and {final} do not rise within 0 to 1")
    if end < begin:
        raise ValueError(f"step {end} lies before step {begin}")
    if step >= end:
        return final
    if step <= begin:
        return initial
    left = 1 - (step - begin) / (end - begin)
    return final + (initial - final) * left**3


@dataclass(frozen=True, eq=False)
class Queue:
    """A group's units in the order in which they go."""

    units: Units  # the least important first, `[n]`
    values: Scores  # what decides between groups, for each unit; ascending
    remaining: Units  # how many may remain, ascending; the last is all of them

    @property
    def most(self) -> int:
        """How many may go."""
        return len(self.units) - int(self.remaining[0])

    def first(self, count: int) -> Units:
        """Return the units to remove where ``count`` should go; fewer, if that leaves too few."""
        least = len(self.units) - count
        stay = int(self.remaining[np.searchsorted(self.remaining, least)])
        return self.units[: len(self.units) - stay]

    def fewer(self, gone: int) -> int:
        """Return the next smaller number of units that may go."""
        least = len(self.units) - gone + 1
        return len(self.units) - int(self.remaining[np.searchsorted(self.remaining, least)])

    def nearest(self, share: float) -> Units:
        """Return the units to remove so that about ``share`` of them goes.

        Where two numbers are as near, fewer go.
        """
        distance = np.abs(self.remaining - len(self.units) * (1 - share))
        near = np.flatnonzero(distance <= distance.min() + _TOLERANCE * len(self.units))
        return self.units[: len(self.units) - int(self.remaining[near[-1]])]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Several groups' units in one order by ascending value; ``gone`` go whatever the target is."""

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
        return np.asarray(owner[np.lexsort((owner, place, values))])

    def __len__(self) -> int:
        """Return how many units the order has."""
        return len(self._owners)

    def removed(self, length: int) -> Flags:
        """Return the units that go with the first ``length`` ones of the order."""
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

    def needed(self, cost: Callable[[Flags], float], target: float) -> Flags:
        """Return the units that go with :meth:`cut`, except those that the target does not need.

        The last unit of the order may save much more than was missing, such as a head of
        attention. Then units of other groups stay, those of the greatest values first.
        """
        removed = self.removed(self.cut(cost, target))
        return self.given_back(removed, self.queues, cost, target)

    @staticmethod
    def given_back(
        removed: Flags,
        queues: Iterable[Queue],
        cost: Callable[[Flags], float],
        target: float,
    ) -> Flags:
        """Return the units that go once groups have back what the target does not need.

        Those of the greatest values come back first.

        Args:
            removed: the units that go, which is changed.
            queues: how many units of each group may remain.
            cost: of the model without some units.
            target: what the cost may be.
        """
        left = [(q, int(removed[q.units].sum())) for q in queues]
        waiting = [(-q.values[gone - 1], i, gone) for i, (q, gone) in enumerate(left) if gone]
        heapify(waiting)
        while waiting:
            _, index, gone = heappop(waiting)
            queue = left[index][0]
            fewer = queue.fewer(gone)
            back = queue.units[fewer:gone]
            removed[back] = False
            if cost(removed) > target:
                removed[back] = True  # and less than now is never left to spare
            elif fewer:
                heappush(waiting, (-queue.values[fewer - 1], index, fewer))
        return removed


def allowed_counts(count: int, step: int, minimum: float) -> Units:
    """Return how many of ``count`` units may remain, ascending; the last is ``count``.

    >>> allowed_counts(10, step=4, minimum=1).tolist()
    [4, 8, 10]

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


def by_score(units: Units, scores: Scores, remaining: Units) -> Queue:
    """Return a group's queue whose values are its scores ``[n]``; equal scores go by number."""
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
    measured = np.maximum.accumulate(np.maximum([0.0, *losses], 0.0))
    at = np.array([0.0, *shares])
    slope = (measured[-1] - measured[-2]) / (at[-1] - at[-2])
    gone = by_share(queue).values
    beyond = np.maximum(gone - at[-1], 0.0) * slope
    return Queue(queue.units, np.interp(gone, at, measured) + beyond, queue.remaining)


def by_slope(
    queue: Queue, gone: Sequence[int], losses: Sequence[float], saved: Sequence[float]
) -> Queue:
    """Return the queue with what a unit costs for what it saves as values.

    Values are the slopes of the lower convex hull of losses over savings, so that a prefix of
    several such queues in one order is the cheapest choice for what it saves, if losses of groups
    add up: H. Everett, Generalized Lagrange multiplier method, 1963 (Operations Research 11).
    Between two numbers of units, loss and savings are taken to rise evenly.

    Args:
        queue: the group's.
        gone: numbers of its units, ascending.
        losses: what it cost that so many were removed, one for each of them; made ascending.
        saved: what the target counts less without them, for each of them. What comes behind the
            last that saves anything has infinite values.
    """
    risen = np.maximum.accumulate(np.maximum(np.array(losses, np.float64), 0.0))
    corners = [(0, 0.0, 0.0)]  # units, loss, savings
    for corner in zip(gone, risen.tolist(), saved, strict=True):
        if corner[2] <= corners[-1][2]:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-2], corner):
            corners.pop()
        corners.append(corner)
    values = np.full(len(queue.units), np.inf)
    for first, last in pairwise(corners):
        values[first[0] : last[0]] = _slope(first, last)
    return Queue(queue.units, values, queue.remaining)


def _slope(first: tuple[int, float, float], last: tuple[int, float, float]) -> float:
    return (last[1] - first[1]) / (last[2] - first[2])


@dataclass(frozen=True, eq=False)
class Tensors:
    """Sizes of a model's parameters, and how they depend on its units."""

    fixed: int  # weights on which no unit lies
    # for each other parameter, the product of its axes without units, and the units at each
    # position of the other axes
    factors: tuple[tuple[int, tuple[Units, ...]], ...]

    def count(self, removed: Flags) -> float:
        """Return how many weights there are without the removed units."""
        return self.fixed + sum(
            constant * prod(int(kept(axis, removed).sum()) for axis in axes)
            for constant, axes in self.factors
        )
