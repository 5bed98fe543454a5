"""``prune-structured``: channels, filters and attention heads removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.channels.analysis import analyse, map_channels
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import size_notes
from compressor.models.threads import on_threads
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.batch_statistics import batch_norms, re_estimated
from compressor.passes.prune.criteria import Queue, Ranking, Scores, normalized
from compressor.passes.prune.maths.least_squares import Fit
from compressor.passes.prune.structured import groups, masking, reconstruction, scores
from compressor.passes.prune.structured.consumers import possible_consumers
from compressor.passes.prune.structured.reconstruction import reconstructed
from compressor.passes.prune.structured.remaining import remaining_scores
from compressor.passes.prune.structured.selection import Selector, search_latency
from compressor.run.timing import already_open, measure
from compressor.types.carrier import Capability, Carrier
from compressor.types.channels import ChannelMap, Flags
from compressor.types.data import Samples, calibration_batch
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import GraphPass, Outcome, PassContext, Survey
from compressor.types.tensors import Batch, samples_in

_PROOF_SAMPLES = 4
_SCAN_SAMPLES = 32
_TIMED_SAMPLES = 32
_TIMING_BUDGET = 1.0  # seconds for each candidate
_TIMING_PRECISION = 0.01


class PruneStructured(GraphPass):
    """Remove channels, filters and attention heads: the result is a smaller dense model.

    Channels that depend on each other, through additions, concatenations and the layers that read
    them, are found in the graph and go together. An operator that is not understood keeps the
    channels that it touches. In every run the smaller model is compared with the model in which
    the same channels are zeroed.
    """

    name: ClassVar[str] = "prune-structured"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS, Capability.GRAPH})
    source: ClassVar[str] = (
        "Fang et al. 2023 (arXiv:2301.12900) for groups; Li et al. 2017 (arXiv:1608.08710), "
        "Liu et al. 2017 (arXiv:1708.06519), Molchanov et al. 2019 (arXiv:1906.10771), Meng et al. "
        "2024 (arXiv:2403.12983) for criteria; Luo et al. 2017 (arXiv:1707.06342), He et al. 2017 "
        "(arXiv:1707.06168) for reconstruction"
    )

    target: groups.Target = Field(description="how much to remove")
    criterion: groups.Criterion = Field(
        default="l2",
        description="how channels are ranked: by the norm of all weights that write and read "
        "them (l2, l1), by the scales of normalizations (batch-norm), by what their removal does "
        "to the outputs to first order (taylor), by mean absolute activations (activation), by "
        "the error that remains once the layers that read them are solved (reconstruction; l2 "
        "where none can be), or at random as a baseline; taylor, activation and reconstruction "
        "read the calibration data",
    )
    scope: groups.Scope | None = Field(
        default=None,
        description="how a target other than ratio is spread over groups: global ranks all "
        "channels by their score over their group's mean; local takes the same share of each "
        "group; sensitivity takes of each until it alone would cost the outputs the same; if left "
        "out, sensitivity where there are calibration data, else global",
    )
    round_to: int = Field(
        default=1, ge=1, description="a layer's remaining channels are a multiple of it"
    )
    minimum: groups.Minimum = Field(
        default=0.1,
        description="least that remains of each group: a share (0.1) or a number (8) of channels",
    )
    reconstruct: bool | None = Field(
        default=None,
        description="solve the layers that read removed channels by least squares on the "
        "calibration data, so that they give what they gave; if left out, where there are such",
    )
    re_estimate: bool = Field(
        default=False,
        description="estimate batch-norm statistics anew on the calibration data afterwards; "
        "without effect where layers are reconstructed, for their biases are solved with them",
    )
    sensitivity: bool = Field(
        default=False,
        description="report what pruning each group alone costs, measured on calibration data",
    )
    layers: tuple[groups.StructuredRule, ...] = Field(
        default=(),
        description="rules for the channels that single layers write; the first that matches wins",
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What needs data needs a model that runs."""
        runs = self.replays or self.criterion == "activation" or self.target.kind == "latency"
        return self.needs | ({Capability.RUN} if runs else set())

    @property
    def replays(self) -> str:
        """What calibration data are run for."""
        purposes = {
            f"to score by {self.criterion}": self.criterion in ("taylor", "reconstruction"),
            "to measure sensitivity": self.sensitivity or self.scope == "sensitivity",
            "to re-estimate batch-norm statistics": self.re_estimate,
            "to reconstruct layers": self.reconstruct is True,
        }
        return " and ".join(purpose for purpose, needed in purposes.items() if needed)

    @property
    def replays_given(self) -> str:
        """What is better with data."""
        ranked = self.scope is not None or self.target.kind == "ratio"
        return "" if self.reconstruct is False and ranked else "to lose less"

    @property
    def estimated(self) -> bool:
        """Scores decide what each group loses, unless all groups lose the same share."""
        same_share = self.target.kind == "ratio" or self.scope == "local"
        return not same_share or self.target.kind == "latency"

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the channels that can go; exact counts where all groups lose the same share."""
        graph = carrier.graph()
        self._check(graph)
        selector = self.selector(carrier, map_channels(graph))
        choice = selector.choice
        actions: dict[str, str] = {}
        reasons = {layer.name: choice.kept_reason(layer) for layer in carrier.layers()}
        exact = not self.estimated
        planned = selector.planned() if exact and choice.prunable else selector.nothing
        for layer in carrier.layers():
            actions[layer.name] = "prune"
            if exact and not reasons[layer.name]:
                before, after = groups.layer_change(choice.channels, layer, planned)["channels"]
                actions[layer.name] = f"{after} of {before} channels"
                if after == before:
                    reasons[layer.name] = f"the target leaves its {before} channels whole"
        rows = plan_layers(self.name, actions, reasons)
        selector.check()
        removable = [p.group for p in choice.prunable]
        requests = (
            scores.activation_requests(choice.channels, removable)
            if self.criterion == "activation"
            else ()
        )
        notes = (
            *groups.frozen_notes(choice.channels),
            *groups.layout_notes(self.target, carrier, context),
        )
        if self.reconstruct is False or not context.shapes:
            return Survey(rows, requests, notes)
        consumers, kept = possible_consumers(carrier, removable)
        notes += reconstruction.unsolved_notes(kept)
        return Survey(rows, requests, notes, reconstruction.memory(graph, consumers))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Prune; with samples, prove that what was removed did nothing else.

        Raises:
            SpecError: an option needs a model that runs, or a latency cannot be reached.
            ModelError: the smaller model is not the same function as the masked one.
        """
        samples = context.samples if Capability.RUN in carrier.offers else None
        if samples is None and self.required != self.needs and self.criterion != "activation":
            raise SpecError(
                f"pass {self.name!r}", "has options that need calibration data", "give it samples"
            )
        return _Pruning(self, carrier, context.seed, statistics, samples).outcome()

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Remove as many channels, though not the same: no weight is looked at."""
        graph = carrier.graph()
        analysis = analyse(graph)
        planned = self.selector(carrier, analysis.channels).planned()
        smaller, kept = remove_channels(graph, analysis, planned)
        return carrier.with_channels(smaller, kept, planned=True)

    def _check(self, graph: ir.Model) -> None:
        if self.scope is not None and self.target.kind == "ratio":
            raise SpecError(
                "scope",
                f"is {self.scope}, but a ratio applies to each group by itself",
                "remove scope, or set target macs, parameters or latency",
            )
        if self.re_estimate and next(batch_norms(graph), None) is None:
            raise SpecError(
                "re-estimate",
                "is true, but the model has no batch normalization",
                "remove it, or put this pass before fuse",
            )

    def selector(self, carrier: Carrier, channels: ChannelMap) -> Selector:
        """Return what may be removed of a model, and what chooses among it.

        Raises:
            SpecError: a rule matches no layer.
        """
        layers, limits = carrier.layers(), (self.criterion, self.minimum, self.round_to)
        choice = groups.choose(channels, layers, self.layers, *limits)
        tensors = groups.tensors_of(carrier.graph(), channels)
        return Selector(choice, self.target, tensors, self.minimum)


@dataclass(eq=False)
class _Pruning:
    """One application of the pass to one model."""

    _options: PruneStructured
    _carrier: Carrier
    _seed: int
    _statistics: Mapping[str, Any]
    _samples: Samples | None

    def __post_init__(self) -> None:
        self._graph = self._carrier.graph()
        self._analysis = analyse(self._graph)
        self._channels = self._analysis.channels
        self._selector = self._options.selector(self._carrier, self._channels)
        self._notes: list[str] = []

    def outcome(self) -> Outcome:
        queues = self._selector.queues(self._scores())
        sensitivities = self._sensitivities(queues)
        removed = self._removed(queues, sensitivities)
        smaller, kept = remove_channels(self._graph, self._analysis, removed)
        probe = calibration_batch(self._samples, _PROOF_SAMPLES)
        after = self._carrier.with_channels(smaller, kept, probe=probe)
        self._describe(after)
        self._prove(removed, smaller)
        fits: Mapping[str, Fit] = {}
        if self._fed and self._options.reconstruct is not False:
            assert self._samples is not None
            graphs = (self._graph, smaller)
            after, solved = reconstructed(after, graphs, kept, self._samples.batches())
            fits = solved.fits
            self._notes.append(solved.note())
        elif self._options.re_estimate and self._samples is not None:
            after = re_estimated(after, self._samples.batches())
            self._notes.append("batch-norm statistics were estimated anew on the calibration data")
        if sensitivities:
            self._notes.append(scores.ranking_note(sensitivities))
        details: dict[str, dict[str, Any]] = {
            name: {"reconstruction": [fit.before, fit.after]} for name, fit in fits.items()
        }
        for cost in sensitivities:
            details.setdefault(cost.name, {})["sensitivity_db"] = list(cost.sqnr_db)
        layers = groups.outcomes(self._channels, self._carrier.layers(), removed, details)
        return Outcome(after, layers, tuple(self._notes))

    @property
    def _fed(self) -> bool:
        """Whether there are calibration data."""
        return self._samples is not None and not self._samples.made_up

    @property
    def _scope(self) -> groups.Scope:
        if self._options.scope is not None:
            return self._options.scope
        if self._options.target.kind == "ratio" or not self._fed or self._masked.unfed:
            return "global"
        return "sensitivity"

    def _scores(self) -> list[Scores]:
        graph, channels = self._graph, self._channels
        removable = [p.group for p in self._selector.prunable]
        weighed = scores.weighed_members(graph, removable)
        match self._options.criterion:
            case "l1" | "l2" as norm:
                return scores.magnitude_scores(graph, channels, removable, weighed, int(norm[1]))
            case "reconstruction":
                assert self._samples is not None
                batches = self._samples.batches
                left = remaining_scores(self._carrier, channels, removable, batches)
                plain = scores.magnitude_scores(graph, channels, removable, weighed, 2)
                return [p if x is None else x for x, p in zip(left, plain, strict=True)]
            case "batch-norm":
                scales = scores.norm_scales(removable)
                return scores.magnitude_scores(graph, channels, removable, scales, 1)
            case "activation":
                return scores.activation_scores(channels, removable, self._statistics)
            case "random":
                return scores.random_scores(channels, removable, self._seed)
        assert self._samples is not None
        distinct = list(dict.fromkeys(member for members in weighed for member in members))
        # What the outputs lose compares across groups by itself.
        data = self._samples.batches()
        whole = normalized(scores.taylor_scores(graph, channels, distinct, data, self._seed))
        return [whole[group.units] for group in removable]

    def _sensitivities(self, queues: Sequence[Queue]) -> tuple[scores.Sensitivity, ...]:
        options = self._options
        if self._samples is None or not (options.sensitivity or self._scope == "sensitivity"):
            return ()
        batch = self._samples.probe(_SCAN_SAMPLES)
        named = [
            (p.group.name, queue) for p, queue in zip(self._selector.prunable, queues, strict=True)
        ]
        return scores.scan(
            lambda flags: self._masked.run(batch, flags), named, self._channels.count
        )

    @cached_property
    def _masked(self) -> masking.MaskedModel:
        return masking.MaskedModel(self._carrier, self._channels)

    def _removed(self, queues: list[Queue], sensitivities: tuple[scores.Sensitivity, ...]) -> Flags:
        selector, kind = self._selector, self._options.target.kind
        if kind == "ratio":
            return selector.by_ratio(queues)
        ranking = selector.ranking(queues, self._scope, sensitivities)
        if kind != "latency":
            return selector.cut(ranking)
        with on_threads(1):  # more would measure how many cores are free
            return self._fast_enough(ranking)

    def _fast_enough(self, ranking: Ranking) -> Flags:
        assert self._samples is not None
        batch = self._samples.probe(_TIMED_SAMPLES)
        whole = self._carrier.runner()

        def measured(flags: Flags) -> float:
            smaller = self._carrier.with_graph(self._smaller(flags)).runner()
            runners = {"whole": whole, "smaller": smaller}
            times = measure(already_open(runners), [batch], _TIMING_BUDGET, _TIMING_PRECISION)
            return float(times.ratio("smaller", "whole")["value"])

        target = self._options.target.value
        length, ratio = search_latency(ranking, self._channels.macs, measured, target)
        samples = samples_in(batch)
        self._notes.append(
            f"latency at batch {samples}, measured beside the model before pruning: "
            f"{ratio:.2f} of its time; the target is {target:g}"
        )
        return ranking.removed(length)

    def _smaller(self, flags: Flags) -> ir.Model:
        return remove_channels(self._graph, self._analysis, flags)[0]

    def _prove(self, removed: Flags, smaller: ir.Model) -> None:
        if self._samples is None:
            self._notes.append("no removal was proved: the model was not run")
            return
        unfed = self._masked.unfed
        if unfed:
            self._notes.append(f"no removal was proved: {unfed}")
            return
        batch = self._samples.probe(_PROOF_SAMPLES)

        def sliced(flags: Flags) -> ir.Model:
            return smaller if (flags == removed).all() else self._smaller(flags)

        def compared(flags: Flags) -> tuple[Batch, Batch]:
            runner = self._carrier.with_graph(sliced(flags)).runner()
            return self._masked.run(batch, flags), runner.run(batch)

        def exactly(flags: Flags) -> tuple[Batch, Batch]:
            masked = self._masked.run_in_doubles(batch, flags)
            return masked, masking.in_doubles(sliced(flags), batch)

        proof = masking.prove(compared, exactly, self._channels, removed)
        self._notes.append(proof.note(self._samples.made_up))

    def _describe(self, after: Carrier) -> None:
        before = self._carrier
        rebuilt = [isinstance(c, TorchCarrier) and c.executes_graph for c in (before, after)]
        if after.kind != before.kind:
            self._notes.append(
                "no sizes of the module make it compute what its graph does: the graph takes its "
                "place, and cannot be trained"
            )
        elif rebuilt == [False, True]:
            self._notes.append(
                "no sizes of the module make it compute what its graph does, such as where its "
                "forward has sizes written into it or computes weights of its parameters: a module "
                "that executes the graph takes its place"
            )
        self._notes += size_notes(before, after)
