"""Ranks of many layers under one budget.

A layer may stay whole, which loses nothing, or have any rank that is cheaper. The loss of a rank
is minus the logarithm of the energy that it keeps: layers whose weights differ in size compare, no
layer loses nearly all of its energy, and the sum over the layers is least where the product of the
energies is greatest, which is the aim of X. Zhang et al., 2015 (arXiv:1505.06798), section 3.3.

Each further rank that a layer gives up costs more loss than the one before. So ranks are given up
in the order of loss per unit of cost, and at every point of that order no other choice of ranks
that costs as little loses less. A layer's first step leaves the whole layer: it goes at once to
the rank where loss over saving is least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.costs import model_macs, model_parameters
from compressor.passes.factor.factored_graph import Candidate, Choice
from compressor.types.carrier import Carrier
from compressor.types.options import OneOf

Values = NDArray[np.float64]

_COUNTED = {"macs": "multiply-accumulates", "parameters": "weights"}
_TOLERANCE = 1e-9  # of the budget


class SizeTarget(OneOf):
    """How much of the model is to remain; exactly one of them."""

    macs: float | None = Field(
        default=None, gt=0, lt=1, description="multiply-accumulates that remain, as a share"
    )
    parameters: float | None = Field(
        default=None, gt=0, lt=1, description="weights that remain, as a share"
    )


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss and cost of a layer at each of its ranks."""

    losses: Values  # at rank 1, 2, ... up to the highest that is cheaper than the whole layer
    unit: float  # cost of a rank
    whole: float  # cost of the layer as it is, at which it loses nothing

    def cost(self, rank: int | None) -> float:
        """Return the cost of a rank; ``None`` is the whole layer."""
        return self.whole if rank is None else rank * self.unit

    def loss(self, rank: int | None) -> float:
        """Return the loss at a rank; ``None`` is the whole layer."""
        return 0.0 if rank is None else float(self.losses[rank - 1])

    def above(self, rank: int) -> int | None:
        """Return the next higher rank; after the highest comes the whole layer."""
        return rank + 1 if rank < len(self.losses) else None

    def gain(self, rank: int) -> float:
        """Return the loss that the next higher rank avoids, per unit of its cost."""
        above = self.above(rank)
        return (self.loss(rank) - self.loss(above)) / (self.cost(above) - self.cost(rank))


def log_losses(shares: Values) -> Values:
    """Return the loss of ranks from the shares of the energy that they keep, all positive."""
    return np.maximum(-np.log(np.minimum(shares, 1.0)), 0.0)


def allocate(curves: Sequence[Curve], budget: float) -> list[int | None]:
    """Choose a rank for each layer, with one budget for all; ``None`` leaves it whole.

    If even rank 1 everywhere costs more, every layer gets rank 1.
    """
    return refilled(curves, reduced(curves, budget), budget)


def reduced(curves: Sequence[Curve], budget: float) -> list[int | None]:
    """Take the steps that save most for their loss, until the budget is met."""
    ranks: list[int | None] = [None] * len(curves)
    cost = sum(curve.whole for curve in curves)
    steps = sorted(step for index, curve in enumerate(curves) for step in _steps(index, curve))
    for _, index, _, rank in steps:
        if cost <= budget * (1 + _TOLERANCE):
            break
        cost += curves[index].cost(rank) - curves[index].cost(ranks[index])
        ranks[index] = rank
    return ranks


def refilled(
    curves: Sequence[Curve], ranks: Sequence[int | None], budget: float
) -> list[int | None]:
    """Spend what the last step saved beyond need on the ranks that gain most for their cost."""
    result = list(ranks)
    cost = sum(curve.cost(rank) for curve, rank in zip(curves, result, strict=True))
    slack = budget * (1 + _TOLERANCE) - cost
    offers = [(-c.gain(r), i) for i, (c, r) in enumerate(zip(curves, result, strict=True)) if r]
    heapify(offers)
    while offers:
        _, index = heappop(offers)
        curve, rank = curves[index], result[index]
        assert rank is not None
        above = curve.above(rank)
        price = curve.cost(above) - curve.cost(rank)
        if price > slack:
            continue
        result[index] = above
        slack -= price
        if above is not None:
            heappush(offers, (-curve.gain(above), index))
    return result


def _steps(index: int, curve: Curve) -> list[tuple[float, int, int, int]]:
    """Return a layer's steps as loss per saving, ``index``, position, and the rank it goes to."""
    ranks = np.arange(1, len(curve.losses) + 1)
    if not len(ranks):
        return []
    prices = curve.losses / (curve.whole - ranks * curve.unit)
    first = len(ranks) - 1 - int(prices[::-1].argmin())
    later = -np.diff(curve.losses[: first + 1])[::-1] / curve.unit
    # Rounding must not let a step come before the one that it follows.
    ordered = np.maximum.accumulate([prices[first], *later])
    return [(float(price), index, k, first + 1 - k) for k, price in enumerate(ordered)]


class Budget:
    """Ranks under a target."""

    def __init__(self, carrier: Carrier, choice: Choice, target: SizeTarget):
        self._candidates = choice.candidates
        self._left = {name: reason for name, reason in choice.reasons.items() if reason}
        self._target = target
        self._macs = target.kind == "macs"
        self._whole = (
            model_macs(carrier, choice.sample) if self._macs else model_parameters(carrier)
        ) or 0

    def check(self) -> None:
        """Check before any work is done that some ranks meet the target.

        Raises:
            SpecError: the target is out of reach, or would leave every layer whole.
        """
        value, kind = self._target.value, self._target.kind
        least = self._cost({c.layer.name: c.rank or 1 for c in self._candidates})
        if least > value * self._whole:
            share = np.ceil(least / self._whole * 1000) / 1000
            name, reason = next(iter(self._left.items()), ("", ""))
            others = f", and {len(self._left) - 1} more" if len(self._left) > 1 else ""
            left = f"; {name!r} stays whole ({reason}){others}" if name else ""
            raise SpecError(
                f"target.{kind}",
                f"is {value:g}, and {least / self._whole:.3f} of the {_COUNTED[kind]} remain with "
                f"every layer at rank 1 that can be factored{left}",
                f"set it to {share:g} or more"
                if share < 1
                else "prune or quantize this model instead, for no lower target can be met",
            )

    def proportional(self) -> dict[str, int]:
        """Return ranks under the target that are the same share of each layer's highest."""
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

        ``shares`` are what the ranks from 1 to the highest that saves keep, by layer.
        """
        fixed = {c.layer.name: c.rank for c in self._candidates if c.rank is not None}
        free = [c for c in self._candidates if c.rank is None]
        curves = [Curve(log_losses(shares[c.layer.name]), *self._costs(c)) for c in free]
        budget = self._target.value * self._whole - self._cost(fixed)
        allocated = allocate(curves, budget + sum(curve.whole for curve in curves))
        names = [c.layer.name for c in free]
        return {**fixed, **dict(zip(names, allocated, strict=True))}

    def _scaled(self, share: float) -> dict[str, int]:
        return {c.layer.name: c.rank or max(1, int(share * c.most)) for c in self._candidates}

    def _cost(self, ranks: Mapping[str, int | None]) -> float:
        """Return the cost of the model with some layers split in two."""
        cost = float(self._whole)
        for candidate in self._candidates:
            rank = ranks.get(candidate.layer.name)
            if rank is not None:
                unit, whole = self._costs(candidate)
                cost += rank * unit - whole
        return cost

    def _costs(self, candidate: Candidate) -> tuple[float, float]:
        """Return the cost of a layer for each unit of its rank, and as it is."""
        layer, times = candidate.layer, candidate.positions if self._macs else 1
        return float(times * (layer.rows + layer.columns)), float(times * layer.parameters)
