"""Which layers ``prune-magnitude`` thins out, by how much, and why it keeps the others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import log10
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.passes.prune.magnitude.cuts import Chosen, Ranked, cut_each, cut_together
from compressor.passes.prune.magnitude.ranking import Criterion, Cut, Norm, value_of, without
from compressor.types.carrier import Capability, Carrier, WeightChange
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.passes import LayerOutcome, LayerRule, Outcome, Pass, PassContext, Survey

_FLOATS = ("float16", "bfloat16", "float32", "float64")


class MagnitudeRule(LayerRule):
    """Per-layer settings of ``prune-magnitude``."""

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of these layers' weights that become zero; scope layer only",
    )


@dataclass(frozen=True)
class Thinning:
    """What is done to the layers of a model.

    Attributes:
        sparsity: of the layers that lose weights, by name: the share each is asked to lose.
        reasons: why a layer is kept, for every layer in order; empty where it is not.
    """

    sparsity: Mapping[str, float]
    reasons: Mapping[str, str]


def number_of(sparsity: float, units: int) -> int:
    """Return how many units a share is: whole ones, never more than the share as it is written.

    In decimals: in binary, 0.29 of 100 would be 28.
    """
    return int(Decimal(repr(sparsity)) * units)


def choose_layers(
    carrier: Carrier,
    sparsity: float,
    block: tuple[int, int],
    rules: Sequence[MagnitudeRule],
    *,
    each: bool,
) -> Thinning:
    """Choose the layers that lose weights, or say why one is kept.

    Args:
        carrier: the model; its structure is read.
        sparsity: for layers without one of their own.
        block: rows and columns of what goes as a whole.
        rules: for single layers.
        each: the share is each layer's own, rather than of all together.

    Raises:
        SpecError: a rule matches no layer, or asks for what its layer cannot have.
    """
    layers = carrier.layers()
    found = resolve_rules(rules, [layer.name for layer in layers])
    graph = carrier.graph() if Capability.GRAPH in carrier.offers else None
    shared = _read_as_tables(graph)
    wanted: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for layer in layers:
        rule = found[layer.name]
        own = sparsity if rule is None or rule.sparsity is None else rule.sparsity
        reason = skip_reason(rule) or _unfit(layer, shared, graph) or _misfit(layer, block)
        if not reason and each and not number_of(own, _units(layer, block)):
            units = _units(layer, block)
            reason = f"{own:g} of its {units} {'weights' if block == (1, 1) else 'blocks'} is none"
        if reason and rule is not None and rule.sparsity is not None and not rule.skip:
            raise SpecError(
                f"layer {layer.name!r}",
                f"is given a sparsity by the rule {rule.match!r}, and cannot have it: {reason}",
                "narrow the rule's match, or change the block or the sparsity",
            )
        reasons[layer.name] = reason
        if not reason:
            wanted[layer.name] = own
    return Thinning(wanted, reasons)


def _units(layer: Layer, block: tuple[int, int]) -> int:
    return layer.parameters // (block[0] * block[1])


def _unfit(layer: Layer, shared: frozenset[str], graph: ir.Model | None) -> str:
    """Say why a layer's weights stay as they are, whatever the options; empty if they need not."""
    if layer.kind == "Gather":
        return "a table is looked up, not multiplied"
    if layer.weight in shared:
        return "its weight is shared with a table"
    if graph is not None and layer.weight not in graph.graph.initializers:
        return "its weight lies in a subgraph"
    if layer.dtype not in _FLOATS:
        return f"its weight is {layer.dtype}: prune before quantizing"
    return ""


def _misfit(layer: Layer, block: tuple[int, int]) -> str:
    height, width = block
    if layer.rows % height == 0 and layer.columns % width == 0:
        return ""
    return (
        f"{layer.rows} rows of {layer.columns} columns do not divide into blocks of "
        f"{height}x{width}"
    )


def _read_as_tables(graph: ir.Model | None) -> frozenset[str]:
    """Return the weights that are looked up somewhere in a graph."""
    if graph is None:
        return frozenset()
    return frozenset(x.weight for x, _ in layers_with_nodes(graph) if x.kind == "Gather")


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
