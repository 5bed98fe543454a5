"""Ranks of many layers under one budget.

A layer may stay whole, which loses nothing, or have any rank that is cheaper. The loss of a rank
is minus the logarithm of the energy that it keeps: layers whose weights differ in size compare, no
layer loses nearly all of its energy, and the sum over the layers is least where the product of the
energies is greatest, which is the aim of X. Zhang et al., 2015 (arXiv:1505.06798), section 3.3.

With each rank that goes, the next one costs more loss; so layers give up ranks in the order of
loss for each unit of cost, and at every point of that order no other choice of ranks that costs
as little loses less. To leave the whole layer is the first step of each: it goes at once to the
rank where loss over saving is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_TOLERANCE = 1e-9  # of the budget


@dataclass(frozen=True, eq=False)
class Curve:
    """What a layer loses and costs at each of its ranks.

    Attributes:
        losses: at rank 1, 2, ... up to the highest that is cheaper than the whole layer.
        unit: cost of a rank.
        whole: cost of the layer as it is, at which it loses nothing.
    """

    losses: Values
    unit: float
    whole: float

    def cost(self, rank: int | None) -> float:
        """Return the cost of a rank; ``None`` is the whole layer."""
        return self.whole if rank is None else rank * self.unit

    def loss(self, rank: int | None) -> float:
        """Return the loss at a rank; ``None`` is the whole layer."""
        return 0.0 if rank is None else float(self.losses[rank - 1])


@dataclass(frozen=True, order=True)
class _Step:
    """A layer goes down to a rank; steps are ordered by what they lose for what they save."""

    price: float
    layer: int
    order: int
    rank: int


def log_losses(shares: Values) -> Values:
    """Return the loss of ranks from the shares of the energy that they keep, all positive."""
    return np.maximum(-np.log(np.minimum(shares, 1.0)), 0.0)


def allocate(curves: Sequence[Curve], budget: float) -> list[int | None]:
    """Choose a rank for each layer; ``None`` leaves it whole.

    Args:
        curves: one for each layer.
        budget: what all of them may cost together. Where every layer at rank 1 costs more, that
            is what is returned.
    """
    return refilled(curves, reduced(curves, budget), budget)


def reduced(curves: Sequence[Curve], budget: float) -> list[int | None]:
    """Take the steps that save most for their loss, until the budget is met."""
    ranks: list[int | None] = [None] * len(curves)
    cost = sum(curve.whole for curve in curves)
    steps = sorted(step for i, curve in enumerate(curves) for step in _steps(i, curve))
    for step in steps:
        if cost <= budget * (1 + _TOLERANCE):
            break
        curve = curves[step.layer]
        cost += curve.cost(step.rank) - curve.cost(ranks[step.layer])
        ranks[step.layer] = step.rank
    return ranks


def refilled(
    curves: Sequence[Curve], ranks: Sequence[int | None], budget: float
) -> list[int | None]:
    """Give back what the last step saved beyond need, where it wins most for its cost."""
    result = list(ranks)
    cost = sum(curve.cost(rank) for curve, rank in zip(curves, result, strict=True))
    slack = budget * (1 + _TOLERANCE) - cost
    offers = [(-_gain(c, r), i) for i, (c, r) in enumerate(zip(curves, result, strict=True)) if r]
    heapify(offers)
    while offers:
        _, index = heappop(offers)
        curve, rank = curves[index], result[index]
        assert rank is not None
        above = _above(curve, rank)
        price = curve.cost(above) - curve.cost(rank)
        if price > slack:
            continue
        result[index] = above
        slack -= price
        if above is not None:
            heappush(offers, (-_gain(curve, above), index))
    return result


def _steps(index: int, curve: Curve) -> list[_Step]:
    ranks = np.arange(1, len(curve.losses) + 1)
    if not len(ranks):
        return []
    prices = curve.losses / (curve.whole - ranks * curve.unit)
    first = len(ranks) - 1 - int(prices[::-1].argmin())
    later = -np.diff(curve.losses[: first + 1])[::-1] / curve.unit
    # Rounding must not let a step come before the one that it follows.
    ordered = np.maximum.accumulate([prices[first], *later])
    return [_Step(float(p), index, k, first + 1 - k) for k, p in enumerate(ordered)]


def _above(curve: Curve, rank: int) -> int | None:
    return rank + 1 if rank < len(curve.losses) else None


def _gain(curve: Curve, rank: int) -> float:
    """Return what the next rank wins for its cost."""
    above = _above(curve, rank)
    return (curve.loss(rank) - curve.loss(above)) / (curve.cost(above) - curve.cost(rank))
