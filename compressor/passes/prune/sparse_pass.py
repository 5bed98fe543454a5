"""What ``prune-wanda`` and ``prune-sparsegpt`` have in common: options, survey and application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from pydantic import Field

from compressor.passes.prune.patterns import Pattern
from compressor.passes.prune.sparse_layers import Chosen, choose_layers
from compressor.passes.prune.sparse_options import (
    DEFAULT_SPARSITY,
    SparseRule,
    rule_place,
    sparse_pattern,
)
from compressor.passes.prune.sparse_weights import Criterion, plan_pruning, pruned_outcome
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import Outcome, Pass, PassContext, Survey
from compressor.types.statistics import Blocks


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
