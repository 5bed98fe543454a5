"""``prune-nm``: of every M weights that follow each other, N stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from compressor.passes.prune.patterns import Pattern
from compressor.passes.prune.reordering import find_orders, plan_orders
from compressor.passes.prune.sparse_layers import Chosen, choose_layers
from compressor.passes.prune.sparse_options import NmRule, nm_pattern, rule_place
from compressor.passes.prune.sparse_weights import (
    Criterion,
    Pruning,
    plan_pruning,
    pruned_outcome,
    streamed_outcome,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import Outcome, Pass, PassContext, Survey
from compressor.types.statistics import Blocks


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
