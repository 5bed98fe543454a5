"""``prune-magnitude``: the smallest weights become zero, single ones or whole blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.graph.sparse_kernels import sparse_notes
from compressor.passes.prune.magnitude.cuts import Chosen, Ranked, cut_each, cut_together
from compressor.passes.prune.magnitude.ranking import Criterion, Norm, value_of, without
from compressor.run.weight_pass import FLOATS, Changes, Choice, Treatment, WeightPass, WeightRows
from compressor.types.carrier import Capability, Carrier, WeightChange
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer, sqnr_db
from compressor.types.passes import LayerOutcome, LayerRule, PassContext
from compressor.types.statistics import Block


class MagnitudeRule(LayerRule):
    """Per-layer settings of ``prune-magnitude``."""

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of these layers' weights that become zero; scope layer only",
    )


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
) -> dict[str, tuple[float, str]]:
    """Return the share that each layer loses, and why it is kept, empty where it is not; by name.

    The share is each layer's own, or where not ``each`` that of all together.

    Raises:
        SpecError: a rule matches no layer, or asks for what its layer cannot have.
    """
    layers = carrier.layers()
    by_layer = resolve_rules(rules, layers)
    graph = carrier.graph() if Capability.GRAPH in carrier.offers else None
    pairs = () if graph is None else layers_with_nodes(graph)
    tables = {layer.weight for layer, _ in pairs if layer.is_table}
    height, width = block
    chosen = {}
    for layer in layers:
        rule = by_layer[layer.name]
        ruled = None if rule is None else rule.sparsity
        share = sparsity if ruled is None else ruled
        reason = skip_reason(rule) or _unfit(layer, tables, graph)
        if not reason and (layer.rows % height or layer.columns % width):
            reason = (
                f"{layer.rows} rows of {layer.columns} columns do not divide into blocks of "
                f"{height}x{width}"
            )
        units = layer.parameters // (height * width)
        if not reason and each and not number_of(share, units):
            kind = "weights" if block == (1, 1) else "blocks"
            reason = f"{share:g} of its {units} {kind} rounds down to none"
        if reason and rule is not None and ruled is not None and not rule.skip:
            raise SpecError(
                f"layer {layer.name!r}",
                f"cannot have the sparsity of the rule {rule.match!r}: {reason}",
                "narrow the rule's match, or change the block or the sparsity",
            )
        chosen[layer.name] = (share, reason)
    return chosen


def _unfit(layer: Layer, tables: set[str], graph: ir.Model | None) -> str:
    """Return why a layer cannot lose weights, whatever the options; empty if it can."""
    if layer.is_table:
        return "a table is looked up, not multiplied"
    if layer.is_recurrent:
        return "the weight of a recurrent layer"
    if layer.weight in tables:
        return "its weight is shared with a table"
    if graph is not None and layer.weight not in graph.graph.initializers:
        return "its weight lies in a subgraph"
    if layer.dtype not in FLOATS:
        return f"its weight is {layer.dtype}: prune before quantizing"
    return ""


_Length = Annotated[int, Field(ge=1)]


class PruneMagnitude(WeightPass):
    """Make the smallest weights zero: single ones, or whole blocks.

    The share is met exactly, rounded down. Units that are zero already are removed first; ties are
    broken by the layer's name, then by row, then by column. A block's score is the mean of its
    weights. Blocks lie on the weight as a matrix of output channels by everything that is summed
    over; a layer that does not divide into them is kept. Embedding tables are kept, and output
    layers that share their weight with one; other output layers are pruned. Checkpoints larger than
    memory are read once for weights of 16 bits, and twice for others and for blocks, before they
    are written.
    """

    name: ClassVar[str] = "prune-magnitude"
    source: ClassVar[str] = (
        "Han et al. 2015 (arXiv:1506.02626); blocks: Narang et al. 2017 (arXiv:1711.02782)"
    )

    sparsity: float = Field(gt=0, lt=1, description="share of the weights that become zero")
    granularity: Literal["weight", "block"] = Field(
        default="weight", description="what is removed as a whole: single weights or blocks of them"
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
        description="layer: the share of each layer; global: the share of all layers, ranked "
        "together",
    )
    layers: tuple[MagnitudeRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:
        """Return how much each layer is asked to lose.

        Raises:
            SpecError: an option or a rule does not fit the model, or nothing would be lost.
        """
        self._check()
        block, each = self.block or (1, 1), self.scope == "layer"
        chosen = choose_layers(carrier, self.sparsity, block, self.layers, each=each)
        treatments = {
            name: Treatment(kept=reason) if reason else Treatment(self._action(s), setting=s)
            for name, (s, reason) in chosen.items()
        }
        ranked = [
            Ranked(layer, Criterion(self.norm, block, _key(context.seed, layer.name)))
            for layer in carrier.layers()
            if not treatments[layer.name].kept
        ]
        if self.scope == "global" and ranked and not self._number(ranked):
            raise SpecError(
                f"pass {self.name!r}",
                f"sparsity {self.sparsity:g} of {sum(r.units for r in ranked)} "
                f"{'weights' if self.block is None else 'blocks'} rounds down to none",
                "raise sparsity, or remove the pass",
            )
        notes = sparse_notes(context.targets, [""] if ranked else [])
        return Choice(treatments, notes, (ranked, context.progress))

    def change(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return rows without the units that go."""
        criterion, cut = treatment.setting
        return without(rows.matrix, criterion, cut, rows.start)

    def change_layers(
        self, carrier: Carrier, choice: Choice, layers: Sequence[Layer], block: Block
    ) -> Changes:
        """Rank the units of all layers, and make the smallest zero when weights are read."""
        ranked, progress = choice.work
        if self.scope == "global":
            cuts = cut_together(carrier, ranked, self._number(ranked), progress)
        else:
            shares = [choice.treatments[item.layer.name].setting for item in ranked]
            numbers = [number_of(s, r.units) for s, r in zip(shares, ranked, strict=True)]
            cuts = cut_each(carrier, ranked, numbers, progress)
        changes = Changes(notes=self._notes(ranked, cuts))
        for item, chosen in zip(ranked, cuts, strict=True):
            layer, loss = item.layer, None
            if chosen.gone:
                treatment = Treatment(setting=(item.criterion, chosen.cut))
                change = WeightChange(
                    layer, partial(self._rows, layer, treatment), item.criterion.block[0]
                )
                changes.weights[layer.weight] = change
                if Capability.RUN in carrier.offers:
                    weight = carrier.weight(layer)
                    loss = sqnr_db(weight, change.stored(weight))
            changes.outcomes[layer.name] = self._outcome(item, chosen, loss)
        return changes

    def _rows(
        self, layer: Layer, treatment: Treatment, matrix: torch.Tensor, start: int
    ) -> torch.Tensor:
        return self.change(WeightRows(layer, matrix, start), treatment, {})

    def _check(self) -> None:
        if self.granularity == "block" and self.block is None:
            raise SpecError(
                "granularity 'block'", "needs a block", "set one, such as block: [1, 4]"
            )
        if self.granularity == "weight" and self.block is not None:
            raise SpecError(
                f"block {list(self.block)}",
                "is set, but granularity is weight",
                "set granularity: block, or remove block",
            )
        sparser = next((rule for rule in self.layers if rule.sparsity is not None), None)
        if sparser is not None and (self.scope == "global" or sparser.skip):
            raise SpecError(
                f"layer rule {sparser.match!r}",
                f"sets sparsity {sparser.sparsity:g}, but "
                + ("also skips its layers" if sparser.skip else "scope is global"),
                "remove its sparsity" + ("" if sparser.skip else ", or set scope: layer"),
            )

    def _action(self, share: float) -> str:
        parts = [f"{100 * share:.4g} % zero"]
        parts += [] if self.block is None else ["{}x{}".format(*self.block)]
        parts += [] if self.norm != "random" else ["random"]
        return ", ".join([*parts, *(["global"] if self.scope == "global" else [])])

    def _number(self, ranked: Sequence[Ranked]) -> int:
        return number_of(self.sparsity, sum(item.units for item in ranked))

    def _outcome(self, item: Ranked, chosen: Chosen, loss: float | None) -> LayerOutcome:
        percent = 100 * chosen.zero / item.units
        details: dict[str, Any] = {"zero_percent": round(percent, 4)}
        if self.norm != "random":
            details["threshold"] = value_of(chosen.cut.score)
        scheme = f"{item.layer.dtype}, {percent:.1f} % zero"
        return LayerOutcome(item.layer.name, scheme, loss, details)

    def _notes(self, ranked: Sequence[Ranked], chosen: Sequence[Chosen]) -> tuple[str, ...]:
        height, width = self.block or (1, 1)
        zero = height * width * sum(one.zero for one in chosen)
        weights = sum(item.layer.parameters for item in ranked)
        notes = [
            f"{100 * zero / weights:.1f} % of {weights:,} weights in {len(ranked)} layers are zero"
        ]
        empty = [
            item.layer.name
            for item, one in zip(ranked, chosen, strict=True)
            if one.zero == item.units
        ]
        if empty:
            notes.append(
                f"nothing is left of {len(empty)} layers, such as {empty[0]!r}: skip them by a "
                "rule, lower sparsity, or set scope: layer"
            )
        return tuple(notes)


def _key(seed: int, layer: str) -> int:
    """Return 64 bits that differ from layer to layer and from seed to seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{layer}".encode()).digest()[:8], "little")
