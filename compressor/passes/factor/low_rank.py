"""``low-rank``: layers as products of two smaller ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator

from compressor.errors import SpecError, listed
from compressor.graph.costs import size_notes
from compressor.graph.layers import moment_request
from compressor.graph.stored_weights import is_quantized
from compressor.models.element_types import TORCH_DTYPES
from compressor.passes.factor.budget import Budget, SizeTarget
from compressor.passes.factor.decomposition import Decomposition, decompose, rank_for, shares
from compressor.passes.factor.factored_graph import (
    Candidate,
    Choice,
    Factors,
    LowRankRule,
    Rank,
    choose,
    factor_names,
    factored,
    full_rank,
)
from compressor.progress import Progress
from compressor.types.carrier import Capability, Carrier
from compressor.types.data import calibration_batch
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import check_finite, sqnr_db
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey
from compressor.types.statistics import Blocks, Moments, Request, found_about
from compressor.types.tensors import Batch

_GOALS = ("rank", "energy", "target")
_LAYOUT = "compressed-tensors"
_PROOF_SAMPLES = 4
_ROWS_PER_COLUMN = 16  # input vectors per column of the weight from which moments are computed


class LowRank(GraphPass):
    """Replace layers by products of two smaller ones: a truncated singular value decomposition.

    A linear layer `fc` becomes `fc.down` and `fc.up`, which has the bias; a convolution becomes
    one with fewer filters and a 1x1 convolution. Rules of later passes find them under these
    names. A layer stays whole where two would not be smaller. The result can be trained where the
    model could: a PyTorch module is replaced by one that executes the graph.
    """

    name: ClassVar[str] = "low-rank"
    version: ClassVar[int] = 3
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
        description="in place of rank: each layer gets the lowest rank that keeps this share of "
        "its squared singular values",
    )
    target: SizeTarget | None = Field(
        default=None,
        description="in place of rank: how much of the model remains; ranks that lose least "
        "energy for their savings are removed first",
    )
    weighted: bool = Field(
        default=False,
        description="keep what layers compute from the calibration data as close as possible, "
        "rather than their weights; energy is then that of their outputs",
    )
    layers: tuple[LowRankRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @model_validator(mode="after")
    def _one_goal(self) -> LowRank:
        goals = [name for name in _GOALS if getattr(self, name) is not None]
        if len(goals) != 1:
            raise ValueError(f"give one of {', '.join(goals or _GOALS)}")
        return self

    @property
    def required(self) -> frozenset[Capability]:
        """Weighting by inputs needs a model that runs."""
        return self.needs | ({Capability.RUN} if self.weighted else set())

    @property
    def estimated(self) -> bool:
        """Ranks that are not given follow from singular values."""
        return self.rank is None

    @property
    def by_block(self) -> bool:
        """Whether ranks depend on what flows into each block once those before are factored."""
        return self.weighted

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers that can become two, and at which ranks.

        Raises:
            SpecError: an option does not fit the model, or an export states layers in a
                configuration.
        """
        if _LAYOUT in context.targets and carrier.folder is not None:
            raise SpecError(
                f"layout {_LAYOUT}",
                f"cannot hold what {self.name} makes: it splits layers, which no configuration of "
                "transformers states",
                "use layout: graph",
            )
        choice = self._choice(carrier, context)
        actions = {c.layer.name: self._action(c) for c in choice.candidates}
        taken = carrier.graph().graph.initializers
        rows = tuple(
            replace(row, parts=factor_names(row.name, taken)) if row.touched else row
            for row in plan_layers(
                self.name, actions, choice.reasons, quantized=is_quantized(carrier.graph())
            )
        )
        if self.target is not None:
            Budget(carrier, choice, self.target).check()
        if not self.weighted:
            return Survey(rows)
        requests = seen_inputs(choice)
        if not requests:
            raise SpecError(
                "weighted",
                "is true, but calibration sees the input of no layer that can be factored",
                "leave it out",
            )
        blind = [c.layer.name for c in choice.candidates if c.layer.name not in requests]
        note = f"not weighted, since calibration does not see their inputs: {listed(blind)}"
        every = tuple({request.key: request for request in requests.values()}.values())
        return Survey(rows, every, (note,) if blind else ())

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Factor layers by their weights, or by what they do to the inputs of their block.

        Raises:
            SpecError: no layer becomes smaller, or weighted is asked for without data.
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        choice = self._choice(carrier, context)
        work = Factoring(carrier, choice, self.energy)
        if not self.weighted:
            work.by_weights(context.progress)
        elif context.blocks is None:
            raise SpecError("weighted", "needs calibration data", "add data.calibration")
        else:
            work.by_inputs(context.blocks)
        if self.target is not None:
            work.choose_ranks(Budget(carrier, choice, self.target))
        return work.outcome(calibration_batch(context.samples, _PROOF_SAMPLES))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with factors that mean nothing, of about the right sizes.

        Exact for a rank. For a target all ranks are taken to shrink alike, and for an energy they
        are at most those of weights whose singular values are all the same.
        """
        choice = self._choice(carrier, context)
        if self.target is not None:
            ranks = Budget(carrier, choice, self.target).proportional()
        else:
            energy = self.energy or 0.0
            ranks = {
                c.layer.name: c.rank or min(c.most, ceil(energy * full_rank(c.layer)))
                for c in choice.candidates
            }
        factors = []
        for candidate in choice.candidates:
            layer, rank = candidate.layer, ranks[candidate.layer.name]
            tensor = carrier.graph().graph.initializers[layer.weight].const_value
            assert tensor is not None
            nothing = torch.zeros((), dtype=TORCH_DTYPES[tensor.dtype])
            down, up = nothing.expand(rank, layer.columns), nothing.expand(layer.rows, rank)
            factors.append(Factors(layer, down, up))
        graph, names = factored(carrier.graph(), factors)
        return carrier.with_trainable_graph(graph, names, planned=True)

    def _choice(self, carrier: Carrier, context: PassContext) -> Choice:
        counted = self.target is not None and self.target.kind == "macs"
        return choose(carrier, self.rank, self.layers, context.shapes, counted=counted)

    def _action(self, candidate: Candidate) -> str:
        if candidate.rank is not None:
            return f"rank {candidate.rank} of {full_rank(candidate.layer)}"
        least = f"energy {self.energy:g}, " if self.energy is not None else ""
        return f"{least}rank up to {candidate.most} of {full_rank(candidate.layer)}"


def seen_inputs(choice: Choice) -> dict[str, Request]:
    """Return the request for what flows into each layer, by its name, where there is one."""
    requests = {
        c.layer.name: moment_request(c.layer, c.node, _ROWS_PER_COLUMN) for c in choice.candidates
    }
    return {name: request for name, request in requests.items() if request is not None}


class Factoring:
    """Decompositions of a model's layers, and the model that ranks make of them.

    ``energy`` is the share of it that layers without a rank keep; with ``None``,
    :meth:`choose_ranks` chooses their ranks together.
    """

    def __init__(self, carrier: Carrier, choice: Choice, energy: float | None):
        self._carrier = carrier
        self._choice = choice
        self._energy = energy
        self._decompositions: dict[str, Decomposition] = {}
        self._ranks: dict[str, int | None] = {}
        self._notes: list[str] = []

    def by_weights(self, progress: Progress) -> None:
        """Decompose all layers by their weights alone."""
        candidates = self._choice.candidates
        with progress.stage("low-rank: decompose", len(candidates)) as advance:
            for done, candidate in enumerate(candidates, start=1):
                self._decompose(candidate, None)
                advance(done)

    def by_inputs(self, blocks: Blocks) -> None:
        """Decompose layers by what they do to the inputs that blocks show, the rest by weights."""
        requests = seen_inputs(self._choice)
        waiting = {c.layer.name: c for c in self._choice.candidates}
        for block in blocks:
            for candidate in [c for c in waiting.values() if c.layer.weight in block.weights]:
                request = requests.get(candidate.layer.name)
                moment = None if request is None else _moment(candidate, request, block.statistics)
                self._decompose(candidate, moment)
                del waiting[candidate.layer.name]
        assert not waiting, "every weight is read in some block"

    def choose_ranks(self, budget: Budget) -> None:
        """Choose the ranks that no option sets."""
        self._ranks |= budget.ranks(
            {
                c.layer.name: shares(self._decompositions[c.layer.name].energies)[: c.most].numpy()
                for c in self._choice.candidates
            }
        )

    def outcome(self, probe: Batch | None) -> Outcome:
        """Put the factors in place of the layers.

        Args:
            probe: what a module is compared with the graph on; made-up values if ``None``.

        Raises:
            SpecError: all layers stay whole.
        """
        factors = []
        for candidate in self._choice.candidates:
            rank = self._ranks[candidate.layer.name]
            if rank is not None:
                up, down = self._decompositions[candidate.layer.name].factors(rank)
                factors.append(Factors(candidate.layer, down.contiguous(), up.contiguous()))
        if not factors:
            raise SpecError(
                "pass 'low-rank'",
                f"touches no layer: {self._notes[0] if self._notes else 'the target is met'}",
                "lower energy, or remove the pass",
            )
        graph, names = factored(self._carrier.graph(), factors)
        after = self._carrier.with_trainable_graph(graph, names, probe=probe)
        taken = self._carrier.graph().graph.initializers
        rows = tuple(row for one in factors for row in self._described(one, taken))
        whole = [name for name, rank in self._ranks.items() if rank is None]
        if whole and self._energy is None:
            self._notes.append(f"the target leaves whole: {', '.join(whole)}")
        self._notes += size_notes(self._carrier, after, self._choice.sample)
        if Capability.TRAIN in self._carrier.offers - after.offers:
            self._notes.append("the result cannot be trained: PyTorch has no form of its graph")
        return Outcome(after, rows, tuple(self._notes))

    def _decompose(self, candidate: Candidate, moment: torch.Tensor | None) -> None:
        layer = candidate.layer
        matrix = layer.canonical(self._carrier.weight(layer))
        check_finite(layer, matrix)
        rank = candidate.rank
        decomposition = decompose(matrix, rank or candidate.most, moment)
        self._decompositions[layer.name] = decomposition
        if rank is None and self._energy is not None:
            needed = rank_for(decomposition.energies, self._energy)
            rank = needed if needed <= candidate.most else None
            if rank is None:
                self._notes.append(
                    f"layer {layer.name!r} stays whole: energy {self._energy:g} takes rank "
                    f"{needed} of {full_rank(layer)}, and up to {candidate.most} two are smaller"
                )
        self._ranks[layer.name] = rank

    def _described(self, factors: Factors, taken: Mapping[str, Any]) -> tuple[LayerOutcome, ...]:
        layer, rank = factors.layer, len(factors.down)
        decomposition = self._decompositions[layer.name]
        full = len(decomposition.energies)
        matrix = layer.canonical(self._carrier.weight(layer)).to(torch.float32)
        product = factors.up.to(torch.float32) @ factors.down.to(torch.float32)
        details = {"rank": rank, "full_rank": full, "energy": decomposition.kept(rank)}
        down, up = factor_names(layer.name, taken)
        scheme = f"{layer.dtype}, rank {rank} of {full}"
        return (
            LayerOutcome(down, scheme, details={"rank": rank}),
            LayerOutcome(up, scheme, sqnr_db(matrix, product), details),
        )


def _moment(candidate: Candidate, request: Request, statistics: Mapping[str, Any]) -> torch.Tensor:
    name = candidate.layer.name
    return found_about(name, request, statistics, Moments, "leave weighted out").second[0]
