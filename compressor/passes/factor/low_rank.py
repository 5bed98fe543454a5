"""``low-rank``: layers as products of two smaller ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

from pydantic import Field, model_validator

from compressor.errors import SpecError, listed
from compressor.passes.factor.budget import Budget
from compressor.passes.factor.choice import Candidate, Choice, LowRankRule, Rank, SizeTarget, choose
from compressor.passes.factor.factored_graph import factor_names
from compressor.passes.factor.factoring import Factoring, planned, seen_inputs
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import GraphPass, Outcome, PassContext, Survey

_GOALS = ("rank", "energy", "target")


class LowRank(GraphPass):
    """Replace layers by products of two smaller ones: a truncated singular value decomposition.

    A linear layer `fc` becomes `fc.down` and `fc.up`, which has the bias; a convolution becomes
    one with fewer filters and a 1x1 convolution. Rules of later passes find them under these
    names. A layer stays whole where two would not be smaller. The result can be trained where the
    model could: a PyTorch module is replaced by one that executes the graph.
    """

    name: ClassVar[str] = "low-rank"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS, Capability.GRAPH})
    source: ClassVar[str] = (
        "Denton et al. 2014 (arXiv:1404.0736) and Zhang et al. 2015 (arXiv:1505.06798) for "
        "convolutions and ranks, Wang et al. 2024 (arXiv:2403.07378) for weighted"
    )

    rank: Rank | None = Field(
        default=None,
        description="the rank of all layers: a number (16), or a share (0.25) of the full rank",
    )
    energy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="in place of rank: each layer has the least rank that keeps this share of its "
        "squared singular values",
    )
    target: SizeTarget | None = Field(
        default=None,
        description="in place of rank: what remains of the model; layers give up ranks in the "
        "order of the energy that they lose for what is saved",
    )
    weighted: bool = Field(
        default=False,
        description="change what layers compute from the calibration data least, rather than "
        "their weights; energy is then that of their outputs",
    )
    layers: tuple[LowRankRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @model_validator(mode="after")
    def _one_goal(self) -> LowRank:
        given = [name for name in _GOALS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(given or _GOALS)}")
        return self

    @property
    def required(self) -> frozenset[Capability]:
        """What looks at inputs needs a model that runs."""
        return self.needs | ({Capability.RUN} if self.weighted else set())

    @property
    def by_block(self) -> bool:
        """Whether ranks depend on what flows into each block once those before are factored."""
        return self.weighted

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:  # noqa: ARG002
        """Find the layers that can become two, and at which ranks."""
        choice = self._choice(carrier)
        actions = {c.layer.name: self._action(c) for c in choice.candidates}
        taken = carrier.graph().graph.initializers
        rows = tuple(
            replace(row, parts=factor_names(row.name, taken)) if row.touched else row
            for row in plan_layers(self.name, actions, choice.reasons)
        )
        if self.target is not None:
            Budget(carrier, choice, self.target).check()
        if not self.weighted:
            return Survey(rows)
        requests = seen_inputs(choice)
        if not requests:
            raise SpecError(
                "weighted",
                "is true, and calibration sees the input of no layer that can be factored",
                "leave it out",
            )
        blind = [c.layer.name for c in choice.candidates if c.layer.name not in requests]
        note = f"not weighted, since calibration does not see their inputs: {listed(blind)}"
        every = tuple({request.key: request for request in requests.values()}.values())
        return Survey(rows, every, (note,) if blind else ())

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Factor layers by their weights, or by what they do to the inputs of their block.

        Raises:
            SpecError: no layer becomes smaller, or weighted is asked for without data.
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        work = Factoring(carrier, self._choice(carrier), self.energy)
        if not self.weighted:
            work.by_weights(context.progress)
        elif context.blocks is None:
            raise SpecError("weighted", "needs calibration data", "give it the model's blocks")
        else:
            work.by_inputs(context.blocks)
        if self.target is not None:
            work.choose_ranks(Budget(carrier, self._choice(carrier), self.target))
        return work.outcome()

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model with factors that mean nothing, of about the right sizes.

        Exact for a rank. For a target all ranks are taken to shrink alike, and for an energy they
        are at most those of weights whose singular values are all the same.
        """
        choice = self._choice(carrier)
        if self.target is not None:
            ranks = Budget(carrier, choice, self.target).proportional()
        else:
            ranks = {c.layer.name: c.rank or self._energy_rank(c) for c in choice.candidates}
        return planned(carrier, choice, ranks)

    def _choice(self, carrier: Carrier) -> Choice:
        counted = self.target is not None and self.target.kind == "macs"
        return choose(carrier, self.rank, self.layers, counted=counted)

    def _action(self, candidate: Candidate) -> str:
        if candidate.rank is not None:
            return f"rank {candidate.rank} of {candidate.full}"
        least = f"energy {self.energy:g}, " if self.energy is not None else ""
        return f"{least}rank up to {candidate.most} of {candidate.full}"

    def _energy_rank(self, candidate: Candidate) -> int:
        assert self.energy is not None
        return min(candidate.most, ceil(self.energy * candidate.full))
