"""A size that the whole model is to have, and the ranks that give it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compressor.errors import SpecError
from compressor.models.sizes import model_macs, model_parameters
from compressor.passes.factor.allocation import Curve, Values, allocate, log_losses
from compressor.passes.factor.choice import Candidate, Choice
from compressor.passes.factor.options import SizeTarget
from compressor.types.carrier import Carrier

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
