"""``prune-magnitude``: the smallest weights, or blocks of them, become zero."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.passes.prune.magnitude_cuts import Chosen, Ranked, cut_each, cut_together
from compressor.passes.prune.magnitude_layers import (
    MagnitudeRule,
    Thinning,
    choose_layers,
    number_of,
)
from compressor.passes.prune.magnitude_scores import Criterion, Norm, value_of
from compressor.passes.prune.ranking import Cut, without
from compressor.types.carrier import Capability, Carrier, WeightChange
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import LayerOutcome, Outcome, Pass, PassContext, Survey

_PART = 1 << 22  # elements looked at together
_Length = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class _Zeroed:
    """What :attr:`WeightChange.compute` is for a layer that loses units."""

    criterion: Criterion
    cut: Cut

    def __call__(self, matrix: torch.Tensor, row: int) -> torch.Tensor:
        """Return some rows without the units that go."""
        return without(matrix, self.criterion, self.cut, row)


class PruneMagnitude(Pass):
    """Make the smallest weights zero: single ones, or whole blocks.

    Exactly as many units go as the share says, rounded down; those that are zero already go
    first, and of units that score the same those that come first: by the layer's name, then by
    row, then by column. A block's score is the mean of its weights, so that scores can be
    compared. Blocks lie on the weight as a matrix of output channels by everything that is summed
    over; a layer that does not divide into them is kept. Tables of embeddings are kept, and
    output layers that share their weight with one; other output layers are pruned. Checkpoints
    that are larger than memory are read once for weights of 16 bits, and twice for others and for
    blocks, before they are written.
    """

    name: ClassVar[str] = "prune-magnitude"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})
    source: ClassVar[str] = (
        "Han et al. 2015 (arXiv:1506.02626); blocks: Narang et al. 2017 (arXiv:1711.02782)"
    )

    sparsity: float = Field(gt=0, lt=1, description="share of the weights that become zero")
    granularity: Literal["weight", "block"] = Field(
        default="weight", description="what goes as a whole: single weights, or blocks of them"
    )
    block: tuple[_Length, _Length] | None = Field(
        default=None,
        description="rows (output channels) and columns (inputs) of a block, such as [1, 4], "
        "[4, 1] or [16, 16]; granularity block needs it",
    )
    norm: Norm = Field(
        default="l1",
        description="l1: mean magnitude; l2: root mean square, which is the same for single "
        "weights; random: chance (from the spec's seed), a baseline to compare with",
    )
    scope: Literal["layer", "global"] = Field(
        default="layer",
        description="layer: the share is each layer's; global: of all layers together, ranked "
        "against each other",
    )
    layers: tuple[MagnitudeRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:  # noqa: ARG002
        """Choose the layers that lose weights; structure is all that is read."""
        chosen = self._chosen(carrier)
        actions = {name: self._action(share) for name, share in chosen.sparsity.items()}
        rows = plan_layers(self.name, actions, chosen.reasons)
        ranked = self._ranked(carrier, chosen, 0)
        if self.scope == "global" and not self._number(ranked):
            raise SpecError(
                f"pass {self.name!r}",
                f"sparsity {self.sparsity:g} of {sum(r.units for r in ranked)} "
                f"{'weights' if self.block is None else 'blocks'} is none",
                "raise sparsity, or remove the pass",
            )
        return Survey(rows)

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Rank the units and make the smallest zero; a streamed model's when they are read."""
        chosen = self._chosen(carrier)
        ranked = self._ranked(carrier, chosen, context.seed)
        if self.scope == "global":
            found = cut_together(carrier, ranked, self._number(ranked), context.progress)
        else:
            numbers = [number_of(chosen.sparsity[r.layer.name], r.units) for r in ranked]
            found = cut_each(carrier, ranked, numbers, context.progress)
        changes = {
            item.layer.weight: WeightChange(
                item.layer, _Zeroed(item.criterion, own.cut), item.criterion.block[0]
            )
            for item, own in zip(ranked, found, strict=True)
            if own.gone
        }
        after = carrier.with_changes(changes)
        outcomes = []
        for item, own in zip(ranked, found, strict=True):
            loss = None
            if Capability.RUN in carrier.offers and item.layer.weight in changes:
                loss = _sqnr_db(carrier.weight(item.layer), after.weight(item.layer))
            outcomes.append(self._outcome(item, own, loss))
        return Outcome(after, tuple(outcomes), self._notes(ranked, found))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is: zeros take the same room, and no weight is read."""
        return carrier

    def _chosen(self, carrier: Carrier) -> Thinning:
        if self.granularity == "block" and self.block is None:
            raise SpecError("granularity 'block'", "has no block", "give one, such as [1, 4]")
        if self.granularity == "weight" and self.block is not None:
            raise SpecError(
                f"block {list(self.block)}",
                "is given, and granularity is weight",
                "set granularity: block, or leave block out",
            )
        own = next((rule for rule in self.layers if rule.sparsity is not None), None)
        if own is not None and (self.scope == "global" or own.skip):
            raise SpecError(
                f"layer rule {own.match!r}",
                f"has sparsity {own.sparsity:g}, and "
                + ("also skips its layers" if own.skip else "scope is global"),
                "leave its sparsity out" + ("" if own.skip else ", or set scope: layer"),
            )
        shape = self.block or (1, 1)
        each = self.scope == "layer"
        return choose_layers(carrier, self.sparsity, shape, self.layers, each=each)

    def _action(self, share: float) -> str:
        parts = [f"{_percent(share)} % zero"]
        parts += [] if self.block is None else ["{}x{}".format(*self.block)]
        parts += [] if self.norm != "random" else ["random"]
        return ", ".join([*parts, *(["global"] if self.scope == "global" else [])])

    def _ranked(self, carrier: Carrier, chosen: Thinning, seed: int) -> list[Ranked]:
        block = self.block or (1, 1)
        return [
            Ranked(layer, Criterion(self.norm, block, _key(seed, layer.name)))
            for layer in carrier.layers()
            if layer.name in chosen.sparsity
        ]

    def _number(self, ranked: Sequence[Ranked]) -> int:
        return number_of(self.sparsity, sum(item.units for item in ranked))

    def _outcome(self, item: Ranked, own: Chosen, loss: float | None) -> LayerOutcome:
        percent = 100 * own.zero / item.units
        details: dict[str, Any] = {"zero_percent": round(percent, 4)}
        if self.norm != "random":
            details["threshold"] = value_of(own.cut.score)
        scheme = f"{item.layer.dtype}, {percent:.1f} % zero"
        return LayerOutcome(item.layer.name, scheme, loss, details)

    def _notes(self, ranked: Sequence[Ranked], found: Sequence[Chosen]) -> tuple[str, ...]:
        height, width = self.block or (1, 1)
        zero = height * width * sum(own.zero for own in found)
        weights = sum(item.layer.parameters for item in ranked)
        notes = [
            f"{100 * zero / weights:.1f} % of {weights:,} weights in {len(ranked)} layers are zero"
        ]
        empty = [
            item.layer.name
            for item, own in zip(ranked, found, strict=True)
            if own.zero == item.units
        ]
        if empty:
            notes.append(
                f"nothing is left of {len(empty)} layers, such as {empty[0]!r}: skip them by a "
                "rule, lower sparsity, or set scope: layer"
            )
        return tuple(notes)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}"


def _key(seed: int, layer: str) -> int:
    """Return 64 bits that differ from layer to layer and from seed to seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{layer}".encode()).digest()[:8], "little")


def _sqnr_db(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Signal to noise of a weight that lost some values; ``None`` where none or all are lost."""
    signal = noise = 0.0
    old, new = before.reshape(-1), after.reshape(-1)
    for start in range(0, len(old), _PART):
        wide = old[start : start + _PART].to(torch.float64)
        signal += float(wide.square().sum())
        noise += float((wide - new[start : start + _PART].to(torch.float64)).square().sum())
    return 10 * log10(signal / noise) if signal and noise else None
