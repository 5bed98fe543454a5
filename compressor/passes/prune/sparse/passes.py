"""Options that passes share which set single weights to zero, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from pydantic import Field

from compressor.errors import SpecError
from compressor.passes.prune.sparse.layers import Chosen, choose_layers
from compressor.passes.prune.sparse.patterns import Pattern, n_of_m
from compressor.passes.prune.sparse.pruning import (
    Criterion,
    Pruning,
    plan_pruning,
    pruned_outcome,
    streamed_outcome,
)
from compressor.passes.prune.sparse.reordering import find_orders, plan_orders
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import LayerRule, Outcome, Pass, PassContext, Survey
from compressor.types.statistics import Blocks

DEFAULT_SPARSITY = 0.5


class NmRule(LayerRule):
    """A per-layer rule of ``prune-nm``."""

    n: int | None = Field(default=None, ge=1, description="in place of the pass's n")
    m: int | None = Field(default=None, ge=2, description="in place of the pass's m")


class SparseRule(LayerRule):
    """A per-layer rule of a pass that prunes single weights or N of M."""

    sparsity: float | None = Field(
        default=None, gt=0, lt=1, description="in place of what the pass says"
    )
    n: int | None = Field(default=None, ge=1, description="in place of what the pass says")
    m: int | None = Field(default=None, ge=2, description="in place of what the pass says")


def nm_pattern(n: int, m: int, place: str = "") -> Pattern:
    """Return the pattern in which ``n`` of ``m`` weights stay.

    Args:
        n: how many stay.
        m: weights in a group.
        place: the rule that says so, for the message.

    Raises:
        SpecError: all or none would stay.
    """
    if n >= m:
        raise SpecError(
            f"{place}n: {n}, m: {m}",
            f"keeps all of every {m} weights" if n == m else f"{m} weights hold no {n}",
            "give an n below m, such as n: 2, m: 4",
        )
    return n_of_m(n, m)


def sparse_pattern(
    sparsity: float | None, n: int | None, m: int | None, place: str = ""
) -> Pattern | None:
    """Return the pattern that options say; ``None`` if they say nothing.

    Args:
        sparsity: share of the weights that becomes zero.
        n: of ``m`` weights, how many stay.
        m: weights in a group.
        place: the rule that says so, for the message.

    Raises:
        SpecError: they contradict each other, or one of ``n`` and ``m`` is missing.
    """
    if n is None and m is None:
        return None if sparsity is None else Pattern(sparsity)
    if n is None or m is None:
        given, missing = ("m", "n") if n is None else ("n", "m")
        raise SpecError(
            f"{place}{given}: {m if n is None else n}",
            f"is given without {missing}",
            "give both, such as n: 2, m: 4, or give sparsity",
        )
    if sparsity is not None:
        raise SpecError(
            f"{place}sparsity: {sparsity:g}",
            f"is given together with n: {n}, m: {m}, which is a sparsity of {1 - n / m:g}",
            "give one of them",
        )
    return nm_pattern(n, m, place)


def rule_place(rule: LayerRule) -> str:
    """Name a rule in front of one of its options, for messages."""
    return f"layer rule {rule.match!r}: "


class PruneNm(Pass):
    """Keep at most N of every M weights that follow each other along the input channels.

    GPUs multiply with 2:4 weights at up to twice the speed. Groups are counted as TensorRT's
    sparse kernels want it: in a linear layer along its input features; in a convolution along its
    input channels, at each output channel and position of the kernel. Layers whose input channels
    do not divide into groups are kept, and so are tables and a language model's output layer.
    TensorRT has sparse kernels for 2:4 alone, and uses them where they are faster: in float16 or
    int8, with hundreds of channels.

    `magnitude` keeps the largest weights and needs nothing else. `wanda` counts each weight times
    the norm of its input; `sparsegpt` also changes the weights that stay, to make up for those
    that go. Both need calibration data and a model that runs, and work through it block by block.

    With `permute` channels change places first, in everything that writes, normalizes and reads
    them, so that the largest weights are spread over the groups. The plan says which layers'
    channels must stay where they are.
    """

    name: ClassVar[str] = "prune-nm"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})
    source: ClassVar[str] = (
        "Mishra et al. 2021 (arXiv:2104.08378); TensorRT Developer Guide, Structured Sparsity; "
        "wanda: Sun et al. 2023 (arXiv:2306.11695); sparsegpt: Frantar & Alistarh 2023 "
        "(arXiv:2301.00774); permute: Pool & Yu 2021 (NeurIPS)"
    )

    n: int = Field(default=2, ge=1, description="of every m weights, so many stay")
    m: int = Field(default=4, ge=2, description="weights in a group")
    criterion: Criterion = Field(default="magnitude", description="which weights of a group stay")
    permute: bool = Field(
        default=False,
        description="first reorder channels, so that groups keep more magnitude; the function is "
        "the same. Needs a graph",
    )
    layers: tuple[NmRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer for the criterion, and to reorder channels."""
        graph = {Capability.GRAPH} if self.permute else set()
        if self.criterion != "magnitude":
            graph = {Capability.RUN, Capability.GRAPH}
        return self.needs | graph

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers, and ask for what the criterion has to know of their inputs."""
        chosen = self._chosen(carrier)
        rows = plan_layers(
            self.name, {k: str(v) for k, v in chosen.patterns.items()}, chosen.reasons
        )
        work = plan_pruning(carrier, chosen.patterns, self.criterion)
        stay = plan_orders(carrier, chosen.patterns).reasons if self.permute else {}
        remarks = {
            name: "; ".join(filter(None, (work.remarks.get(name), stay.get(name))))
            for name in chosen.patterns
        }
        rows = tuple(replace(row, reason=remarks.get(row.name, row.reason)) for row in rows)
        notes = _target_notes(chosen, context)
        return Survey(rows, work.requests, notes, blockwise=bool(work.requests))

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Prune by magnitude."""
        work = self._work(carrier)
        if Capability.RUN not in carrier.offers:
            return streamed_outcome(work)
        return pruned_outcome(carrier, work.by_weights(), work.reordered)

    def apply_blockwise(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        blocks: Blocks,
    ) -> Outcome:
        """Prune block by block, each with what flows into it."""
        work = self._work(carrier)
        return pruned_outcome(carrier, work.by_blocks(blocks), work.reordered)

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is: zeros are stored like other values."""
        return carrier

    def _chosen(self, carrier: Carrier) -> Chosen:
        return choose_layers(carrier, nm_pattern(self.n, self.m), self.layers, self._of_rule)

    def _of_rule(self, rule: NmRule) -> Pattern | None:
        if rule.n is None and rule.m is None:
            return None
        return nm_pattern(rule.n or self.n, rule.m or self.m, rule_place(rule))

    def _work(self, carrier: Carrier) -> Pruning:
        patterns = self._chosen(carrier).patterns
        work = plan_pruning(carrier, patterns, self.criterion)
        if not self.permute:
            return work
        return replace(work, reordered=find_orders(carrier, plan_orders(carrier, patterns)))


def _target_notes(chosen: Chosen, context: PassContext) -> tuple[str, ...]:
    others = sorted({str(p) for p in chosen.patterns.values() if (p.n, p.m) != (2, 4)})
    if "tensorrt" not in context.targets or not others:
        return ()
    return (f"TensorRT has sparse kernels for 2:4 only; it computes {', '.join(others)} densely",)


class CalibratedPruning(Pass):
    """Prune single weights, or N of M, by what flows into each layer of a model.

    Class attributes:
        criterion: how weights are chosen.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.WEIGHTS, Capability.RUN, Capability.GRAPH}
    )
    criterion: ClassVar[Criterion]

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of a layer's weights that becomes zero; 0.5 unless n and m are given",
    )
    n: int | None = Field(
        default=None, ge=1, description="in place of sparsity: of every m weights, so many stay"
    )
    m: int | None = Field(
        default=None,
        ge=2,
        description="weights in a group; they follow each other along the input channels",
    )
    layers: tuple[SparseRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:  # noqa: ARG002
        """Choose the layers, and ask for what has to be known of their inputs."""
        chosen = self._chosen(carrier)
        rows = plan_layers(
            self.name, {k: str(v) for k, v in chosen.patterns.items()}, chosen.reasons
        )
        work = plan_pruning(carrier, chosen.patterns, self.criterion)
        rows = tuple(replace(row, reason=work.remarks.get(row.name, row.reason)) for row in rows)
        return Survey(rows, work.requests, blockwise=True)

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
    ) -> NoReturn:
        """Raise ``NotImplementedError``: the pass works by blocks."""
        raise NotImplementedError(f"pass {self.name!r} works by blocks")

    def apply_blockwise(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        blocks: Blocks,
    ) -> Outcome:
        """Prune block by block, each with what flows into it."""
        patterns = self._chosen(carrier).patterns
        work = plan_pruning(carrier, patterns, self.criterion)
        return pruned_outcome(carrier, work.by_blocks(blocks))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is: zeros are stored like other values."""
        return carrier

    def _chosen(self, carrier: Carrier) -> Chosen:
        everywhere = sparse_pattern(self.sparsity, self.n, self.m) or Pattern(DEFAULT_SPARSITY)
        return choose_layers(carrier, everywhere, self.layers, _of_rule)


def _of_rule(rule: SparseRule) -> Pattern | None:
    return sparse_pattern(rule.sparsity, rule.n, rule.m, rule_place(rule))


class PruneWanda(CalibratedPruning):
    """Prune the weights that are least in size times the norm of their input.

    They are compared within each output row, or with n and m within each group. Weights that stay
    are not changed. It takes calibration data and a model that runs, which it works through block
    by block, so that each layer sees what it will see once those before it are pruned. Of each
    layer's input it holds one number a column, so it serves where `prune-sparsegpt` wants too much
    memory or time. Tables and a language model's output layer are kept; a layer whose input
    calibration does not see is pruned by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-wanda"
    source: ClassVar[str] = "Sun et al. 2023 (arXiv:2306.11695)"
    criterion: ClassVar[Criterion] = "wanda"


class PruneSparsegpt(CalibratedPruning):
    """Prune the weights that change a layer's output least, and let the others make up for them.

    What a weight costs, and how the others change, follows from the second moment of the layer's
    inputs. Without n and m the cheapest of 128 columns at a time go, so that rows may keep unlike
    numbers of weights. It takes calibration data and a model that runs, which it works through
    block by block, so that each layer sees what it will see once those before it are pruned.
    Tables and a language model's output layer are kept; a layer whose input calibration does not
    see is pruned by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-sparsegpt"
    source: ClassVar[str] = "Frantar & Alistarh 2023 (arXiv:2301.00774)"
    criterion: ClassVar[Criterion] = "sparsegpt"
