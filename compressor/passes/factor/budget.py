"""Ranks of many layers under one budget.

A layer may stay whole, which loses nothing, or have any rank that is cheaper. The loss of a rank
is minus the logarithm of the energy that it keeps: layers whose weights differ in size compare, no
layer loses nearly all of its energy, and the sum over the layers is least where the product of the
energies is greatest, which is the aim of X. Zhang et al., 2015 (arXiv:1505.06798), section 3.3.

With each rank that goes, the next one costs more loss; so layers give up ranks in the order of
loss for each unit of cost, and at every point of that order no other choice of ranks that costs
as little loses less. To leave the whole layer is the first step of each: it goes at once to the
rank where loss over saving is least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from compressor.errors import SpecError
from compressor.graph.costs import model_macs, model_parameters
from compressor.passes.factor.choice import Candidate, Choice, SizeTarget
from compressor.types.carrier import Carrier

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


_NAMES = {"macs": "multiply-accumulates", "parameters": "weights"}


class Budget:
    """Ranks under a target.

    Args:
        carrier: the model.
        choice: which layers can become two.
        target: what is to remain.
    """

    def __init__(self, carrier: Carrier, choice: Choice, target: SizeTarget):
        self._choice = choice
        self._target = target
        macs = target.kind == "macs"
        self._whole = (model_macs(carrier) if macs else model_parameters(carrier)) or 0
        self._free = [c for c in choice.candidates if c.rank is None]

    def check(self) -> None:
        """Tell early what no ranks can reach.

        Raises:
            SpecError: the target is out of reach, or would leave every layer whole.
        """
        target, name = self._target, _NAMES[self._target.kind]
        least = self._cost({c.layer.name: c.rank or 1 for c in self._choice.candidates})
        if least > target.value * self._whole:
            share = np.ceil(least / self._whole * 1000) / 1000
            raise SpecError(
                target.key,
                f"is {target.value:g}, and {least / self._whole:.3f} of the {name} remain with "
                "every layer at rank 1 that can be factored",
                f"set it to {share:g} or more, or skip fewer layers",
            )

    def proportional(self) -> dict[str, int]:
        """Return ranks that are the same share of the highest that saves, under the target."""
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            if self._cost(self._scaled(middle)) <= self._target.value * self._whole:
                low = middle
            else:
                high = middle
        return self._scaled(low)

    def ranks(self, shares: Mapping[str, Values]) -> dict[str, int | None]:
        """Choose the ranks by the energy that they keep; ``None`` leaves a layer whole.

        Args:
            shares: what the ranks from 1 to the highest that saves keep, by layer.
        """
        fixed: dict[str, int | None] = {
            c.layer.name: c.rank for c in self._choice.candidates if c.rank is not None
        }
        curves = [self._curve(c, shares[c.layer.name]) for c in self._free]
        budget = self._target.value * self._whole - self._cost(dict(fixed)) + self._free_cost()
        found = allocate(curves, budget)
        names = [c.layer.name for c in self._free]
        return {**fixed, **dict(zip(names, found, strict=True))}

    def _scaled(self, share: float) -> dict[str, int]:
        return {
            c.layer.name: c.rank or max(1, int(share * c.most)) for c in self._choice.candidates
        }

    def _curve(self, candidate: Candidate, shares: Values) -> Curve:
        return Curve(log_losses(shares), self._unit(candidate), self._full(candidate))

    def _cost(self, ranks: Mapping[str, int | None]) -> float:
        """Return what the model costs where some layers have become two."""
        cost = float(self._whole)
        for candidate in self._choice.candidates:
            rank = ranks.get(candidate.layer.name)
            if rank is not None:
                cost += rank * self._unit(candidate) - self._full(candidate)
        return cost

    def _free_cost(self) -> float:
        """Return what the layers without a fixed rank cost as they are."""
        return sum(self._full(candidate) for candidate in self._free)

    def _unit(self, candidate: Candidate) -> float:
        layer = candidate.layer
        return float(self._times(candidate) * (layer.rows + layer.columns))

    def _full(self, candidate: Candidate) -> float:
        return float(self._times(candidate) * candidate.layer.parameters)

    def _times(self, candidate: Candidate) -> int:
        return candidate.positions if self._target.kind == "macs" else 1
