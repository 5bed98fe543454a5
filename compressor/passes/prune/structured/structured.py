"""``prune-structured``: channels, filters and attention heads removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, lcm
from typing import Any, ClassVar

from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.residuals import ResidualBlock
from compressor.graph.stored_weights import is_quantized
from compressor.models.threads import on_threads
from compressor.passes.prune.batch_statistics import check_normalized, re_estimated
from compressor.passes.prune.criteria import Queue, Scores
from compressor.passes.prune.structured import groups, latency, memory, principal, scores
from compressor.passes.prune.structured.blocks import block_readers
from compressor.passes.prune.structured.consumers import possible_consumers
from compressor.passes.prune.structured.moments import Moments
from compressor.passes.prune.structured.reconstruction import reconstructed
from compressor.passes.prune.structured.remaining import QUICK, remaining_scores
from compressor.passes.prune.structured.removal import PROOF_SAMPLES, Removal
from compressor.passes.prune.structured.segments import Variant
from compressor.passes.prune.structured.selection import Selector, advising_fuse
from compressor.passes.prune.structured.shuffled import with_shuffled
from compressor.passes.prune.structured.solved import first_batches, solved_losses
from compressor.passes.prune.structured.stated import in_step
from compressor.types.carrier import Capability, Carrier
from compressor.types.channels import ChannelMap
from compressor.types.data import Samples, calibration_batch
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import GraphPass, Outcome, PassContext, Survey

_SCAN_SAMPLES = 32
_FROM_DATA = ("taylor", "reconstruction", "principal-components")
_ANY = PassContext()
_TENSORRT_MULTIPLE = 8  # of channels that its kernels for float16 are made for


class PruneStructured(GraphPass):
    """Remove channels, filters and attention heads: the result is a smaller dense model.

    Channels that depend on each other, through additions, concatenations and the layers that read
    them, are found in the graph and removed together. An unknown operator keeps the channels that
    it touches. In every run the smaller model is compared with the model in which the same channels
    are zeroed.
    """

    name: ClassVar[str] = "prune-structured"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS, Capability.GRAPH})
    version: ClassVar[int] = 20
    source: ClassVar[str] = (
        "Fang et al. 2023 (arXiv:2301.12900) for groups; Li et al. 2017 (arXiv:1608.08710), "
        "Liu et al. 2017 (arXiv:1708.06519), Molchanov et al. 2019 (arXiv:1906.10771), Meng et al. "
        "2024 (arXiv:2403.12983), Ashkboos et al. 2024 (arXiv:2401.15024) for criteria; Luo et al. "
        "2017 (arXiv:1707.06342), He et al. 2017 (arXiv:1707.06168), Zhang et al. 2015 "
        "(arXiv:1505.06798) for reconstruction"
    )

    target: groups.Target = Field(description="how much to remove")
    criterion: groups.Criterion | None = Field(
        default=None,
        description="how channels are ranked: by the norm of all weights that write and read "
        "them (l2, l1), by the scales of normalizations (batch-norm), by what their removal does "
        "to the outputs to first order (taylor), by mean absolute activations (activation), by "
        "the error that remains once the layers that read them are solved (reconstruction; l2 "
        "where none can be), by their power once the residual stream is turned to its principal "
        "components (principal-components; l2 for all other channels), or at random as a "
        "baseline; l2, l1, batch-norm and random need no calibration data; if left out, "
        "reconstruction where layers can be solved, scope is sensitivity or the target a "
        "latency, and few channels are read at once, else l2",
    )
    scope: groups.Scope | None = Field(
        default=None,
        description="how a target other than ratio is spread over groups: global ranks all "
        "channels by their score over their group's mean; local takes the same share of each "
        "group; sensitivity takes from each until it alone would cost the outputs the same or, "
        "with criterion reconstruction, where solved layers lose least for the savings; default: "
        "sensitivity with calibration data, else global; latency weighs measured losses and times",
    )
    drop_blocks: bool = Field(
        default=True,
        description="let a target of latency drop residual blocks: branches added to their input",
    )
    round_to: int | None = Field(
        default=None,
        ge=1,
        description="a layer's remaining channels are a multiple of this; default: 1 or, where "
        "convolutions in ort-cpu read them, up to 7 or a multiple of 8",
    )
    minimum: groups.Minimum = Field(
        default=0.1,
        description="minimum that remains of each group: a share (0.1) or a number (8) of channels",
    )
    reconstruct: bool | None = Field(
        default=None,
        description="solve the layers that a removal changes by least squares on the calibration "
        "data, so that they reproduce their outputs; default: if there are such data",
    )
    re_estimate: bool = Field(
        default=False,
        description="re-estimate batch-norm statistics on the calibration data afterwards; "
        "without effect where layers are reconstructed, because their biases are solved too",
    )
    sensitivity: bool = Field(
        default=False,
        description="report what pruning each group alone costs, measured on calibration data",
    )
    layers: tuple[groups.StructuredRule, ...] = Field(
        default=(),
        description="rules for the output channels of single layers; the first that matches wins",
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What needs data needs a model that runs."""
        runs = {Capability.RUN} if self.replays or self.criterion == "activation" else set()
        return self.needs | runs

    @property
    def replays(self) -> str:
        """What calibration data are run for."""
        purposes = {
            f"to score by {self.criterion}": self.criterion in _FROM_DATA,
            "to measure sensitivity": self.sensitivity or self.scope == "sensitivity",
            "to weigh what is lost against the time": self.target.kind == "latency",
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
        return self.target.kind == "latency" or (self.target.ranked and self.scope != "local")

    @property
    def trades(self) -> bool:
        """Whether what solved layers lose may be traded for what is saved, given data."""
        solved = self.criterion in (None, "reconstruction") and self.reconstruct is not False
        spread = self.target.ranked and self.scope in (None, "sensitivity")
        return solved and (spread or self.target.kind == "latency")

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the channels that can go; exact counts where all groups lose the same share."""
        graph, actions = carrier.graph(), dict[str, str]()
        self.target.check(self.scope)
        if self.re_estimate:
            check_normalized(graph)
        selector = self.selector(carrier, analyse(graph, context.shapes).channels, context)
        choice, exact = selector.choice, not self.estimated
        reasons = {layer.name: choice.kept_reason(layer) for layer in carrier.layers()}
        planned = selector.planned() if exact and choice.prunable else selector.nothing
        for layer in carrier.layers():
            actions[layer.name] = "prune"
            if exact and not reasons[layer.name]:
                before, after = groups.layer_change(choice.channels, layer, planned)["channels"]
                actions[layer.name] = f"{after} of {before} channels"
                if after == before:
                    reasons[layer.name] = f"the target leaves its {before} channels whole"
        actions |= (others := choice.unnamed(planned if exact else None))
        reasons |= dict.fromkeys(others, "")
        with advising_fuse(graph):
            rows = plan_layers(self.name, actions, reasons, quantized=is_quantized(graph))
            selector.check()
        if self.criterion == "principal-components":
            principal.check(carrier, choice)
        observed = selector.removable if self.criterion == "activation" else ()
        requests = scores.activation_requests(choice.channels, observed)
        notes = (
            *groups.frozen_notes(choice.channels),
            *groups.layout_notes(self.target, carrier, context),
            *self._latency_notes(carrier, selector, context),
            *selector.notes(planned),
        )
        if self.reconstruct is False or not context.shapes:
            return Survey(rows, requests, notes)
        drops, removable = bool(self.blocks(carrier, choice)), selector.removable
        unsolved, taken = memory.planned(carrier, removable, scored=self.trades, dropping=drops)
        return Survey(rows, requests, (*notes, *unsolved), taken)

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
        return _Pruning(self, carrier, context, statistics, samples).outcome()

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Remove as many channels, though not the same: no weight is looked at."""
        graph, analysis = carrier.graph(), analyse(carrier.graph(), context.shapes)
        planned = self.selector(carrier, analysis.channels, context).planned()
        smaller, kept = remove_channels(graph, analysis, planned)
        return carrier.with_channels(smaller, kept, planned=True)

    def _untimed(self, context: PassContext) -> bool:
        """Whether a latency is wanted in TensorRT, which is not timed here."""
        return self.target.kind == "latency" and context.targets - {"tensorrt-rtx"} == {"tensorrt"}

    def blocks(self, carrier: Carrier, choice: groups.Choice) -> tuple[ResidualBlock, ...]:
        """Return the residual blocks that the target may drop."""
        if self.target.kind != "latency" or not self.drop_blocks:
            return ()
        return latency.droppable_blocks(carrier.graph(), choice.ruled)

    def _latency_notes(
        self, carrier: Carrier, selector: Selector, context: PassContext
    ) -> tuple[str, ...]:
        if self.target.kind != "latency":
            return ()
        blocks = self.blocks(carrier, selector.choice)
        with advising_fuse(carrier.graph()):
            latency.check_reachable(selector, carrier.graph(), blocks)
        return latency.plan_notes(blocks, context, self.scope, untimed=self._untimed(context))

    def selector(
        self, carrier: Carrier, channels: ChannelMap, context: PassContext = _ANY
    ) -> Selector:
        """Return what may be removed of a model, and what chooses among it.

        Raises:
            SpecError: a rule matches no layer.
        """
        multiple = lcm(self.round_to or 1, _TENSORRT_MULTIPLE if self._untimed(context) else 1)
        layers, limits = carrier.layers(), (self.criterion, self.minimum, multiple)
        chosen = self.round_to is None and self.target.kind != "latency"  # whose widths are timed
        readers = block_readers(layers, context.targets if chosen else ())
        choice = groups.choose(channels, layers, self.layers, *limits, readers)
        given = (choice, self.target, groups.tensors_of(carrier.graph(), channels), self.minimum)
        return in_step(carrier, Selector(*given), context, self.criterion)


@dataclass(eq=False)
class _Pruning:
    """One application of the pass to one model."""

    _options: PruneStructured
    _carrier: Carrier
    _context: PassContext
    _statistics: Mapping[str, Any]
    _samples: Samples | None

    def __post_init__(self) -> None:
        options = self._options
        self._fed = self._samples is not None and not self._samples.made_up
        self._turned: principal.Turned | None = None
        if options.criterion == "principal-components":
            assert self._samples is not None
            self._turned = principal.to_components(self._carrier, self._samples)
            self._carrier = self._turned.carrier
        self._graph = self._carrier.graph()
        self._analysis = analyse(self._graph, self._context.shapes)
        self._channels = self._analysis.channels
        self._selector = options.selector(self._carrier, self._channels, self._context)
        self._blocks = options.blocks(self._carrier, self._selector.choice)
        self._removal = Removal(self._carrier, self._analysis, self._blocks, self._context.shapes)
        self._notes: list[str] = []

    def outcome(self) -> Outcome:
        found = self._scores()
        if self._solves and self._moments.few:
            assert self._samples is not None
            self._samples, added = with_shuffled(self._samples, self._context.seed)
            self._notes.append(self._moments.note(added=added))
            del self._moments  # of the samples alone
            found = self._scores()
        queues = self._selector.queues(found)
        sensitivities = self._sensitivities(queues)
        variant = self._chosen(queues, sensitivities)
        smaller, kept = self._removal.smaller(variant)
        probe = calibration_batch(self._samples, PROOF_SAMPLES)
        if variant.dropped:
            after = self._carrier.with_trainable_graph(smaller, (), probe=probe)
        else:
            after = self._carrier.with_channels(smaller, kept, probe=probe)
        if self._turned is not None:
            after = self._turned.restored(after, self._channels, variant.removed)
            self._notes.append(self._turned.note(variant.removed))
        done, details = self._removal.proof(variant, smaller, self._samples), dict[str, Any]()
        if self._solves:
            assert self._samples is not None
            graphs, data = (self._graph, after.graph()), self._samples.batches()
            dropped = [self._blocks[i] for i in sorted(variant.dropped)]
            after, solved = reconstructed(
                after, graphs, kept, dropped, data, required=self._options.reconstruct is True
            )
            details = solved.details()
            done.append(solved.note())
        elif self._options.re_estimate and self._samples is not None:
            after = re_estimated(after, self._samples.batches())
            done.append("batch-norm statistics were re-estimated on the calibration data")
        # Weights that are solved may need another module.
        self._notes += self._removal.became(after, kept, dropped=bool(variant.dropped))
        self._notes += [*done, *([scores.ranking_note(sensitivities)] if sensitivities else [])]
        for cost in sensitivities:
            details.setdefault(cost.name, {})["sensitivity_db"] = list(cost.sqnr_db)
        gone = {name for i in variant.dropped for name in self._blocks[i].layers}
        left = [layer for layer in self._carrier.layers() if layer.name not in gone]
        layers = groups.outcomes(self._channels, left, variant.removed, details)
        return Outcome(after, layers, (*self._notes, *self._selector.notes(variant.removed)))

    @property
    def _solves(self) -> bool:
        """Whether the layers that read what is removed are solved."""
        return self._fed and self._options.reconstruct is not False

    @property
    def _scope(self) -> groups.Scope:
        measured = self._options.target.ranked and self._fed and not self._removal.masked.unfed
        return self._options.scope or ("sensitivity" if measured else "global")

    @cached_property
    def _trades(self) -> bool:
        measured = self._scope == "sensitivity" or self._options.target.kind == "latency"
        trades = self._options.trades and self._solves and measured
        return trades and bool(possible_consumers(self._carrier, self._selector.removable)[0])

    @cached_property
    def _moments(self) -> Moments:
        """Of what layers read."""
        assert self._samples is not None
        return Moments(self._carrier, self._samples.batches)

    def _scores(self) -> list[Scores]:
        graph, channels, removable = self._graph, self._channels, self._selector.removable
        weighed = scores.weighed_members(graph, removable)
        sized = partial(scores.magnitude_scores, graph, channels, removable)
        match self._options.criterion or ("reconstruction" if self._trades else "l2"):
            case "l1" | "l2" as norm:
                return sized(weighed, int(norm[1]))
            case "reconstruction":
                plain, most = sized(weighed, 2), inf if self._options.criterion else QUICK
                given = (self._carrier, channels, removable, self._moments)
                return remaining_scores(*given, plain, most)
            case "principal-components":
                assert self._turned is not None
                return self._turned.scores(removable, sized(weighed, 2))
            case "batch-norm":
                return sized(scores.norm_scales(removable), 1)
            case "activation":
                return scores.activation_scores(channels, removable, self._statistics)
            case "random":
                return scores.random_scores(channels, removable, self._context.seed)
        assert self._samples is not None
        data = (self._samples.batches(), self._context.seed)
        return scores.output_scores(graph, channels, removable, weighed, *data)

    def _sensitivities(self, queues: Sequence[Queue]) -> tuple[scores.Sensitivity, ...]:
        wanted = self._options.sensitivity or self._scope == "sensitivity"
        if self._samples is None or not wanted:
            return ()
        searched = self._selector.removable
        if self._trades:
            given = (self._carrier, self._channels, searched, queues, self._samples)
            return solved_losses(*given, self._moments)
        batches = first_batches(self._samples, _SCAN_SAMPLES)
        named = zip((group.name for group in searched), queues, strict=True)
        return scores.scan(self._removal.zeroed(batches), list(named), self._channels.count)

    def _chosen(self, queues: list[Queue], costs: tuple[scores.Sensitivity, ...]) -> Variant:
        selector, kind = self._selector, self._options.target.kind
        if kind == "ratio":
            return Variant(selector.by_ratio(queues))
        if kind == "latency":
            return self._fast_enough(queues)
        return Variant(selector.cut(selector.ranking(queues, self._scope, costs)))

    def _fast_enough(self, queues: list[Queue]) -> Variant:
        assert self._samples is not None
        model = (self._carrier, self._analysis, self._selector, self._blocks)
        given = (*model, queues, self._samples, self._context)
        moments = self._moments if self._solves else None
        wanted = latency.LatencyTarget(*given, self._options.re_estimate, moments)
        with on_threads(latency.THREADS):
            variant, notes = wanted.chosen(self._options.target.value)
        self._notes += notes
        return variant
