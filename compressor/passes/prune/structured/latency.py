"""Reach a latency: measured times and measured losses of one model, and what they decide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from compressor.errors import SpecError, listed
from compressor.files import scratch
from compressor.graph.channels.analysis import Analysis
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import macs
from compressor.graph.output_parts import named_parts, output_parts
from compressor.graph.residuals import ResidualBlock, drop_blocks, residual_blocks
from compressor.models.onnx.ort_runner import runner_of
from compressor.models.onnx.runtimes import OpenVinoRunner, why_elsewhere
from compressor.models.onnx.saving import save_graph
from compressor.passes.prune.criteria import Queue
from compressor.passes.prune.structured.choices import Network
from compressor.passes.prune.structured.clock import MOST_TIMINGS, SECONDS, TimingTable
from compressor.passes.prune.structured.dropped import WithoutBlocks
from compressor.passes.prune.structured.fastest import Found, Search
from compressor.passes.prune.structured.moments import Moments
from compressor.passes.prune.structured.removal import GatedModel
from compressor.passes.prune.structured.segments import Segments, Variant
from compressor.passes.prune.structured.selection import Selector
from compressor.passes.prune.structured.solved import (
    OutputLoss,
    SolvedModel,
    first_batches,
    loss_samples,
)
from compressor.types.carrier import Carrier, Runner
from compressor.types.data import Samples
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, samples_in

THREADS = 1  # more would measure how many cores are free
_TIMED_SAMPLES = 1  # a fixed batch counts instead; limits of latency are judged at that, too
_SOLVED_ON = 4  # times the samples of a loss; layers are solved on them for each block
_SHOWN = 12


def droppable_blocks(graph: ir.Model, kept_layers: Collection[str]) -> tuple[ResidualBlock, ...]:
    """Return the blocks of a graph that can go: none of their layers has to be kept."""
    return tuple(b for b in residual_blocks(graph) if not {*b.layers} & {*kept_layers})


@dataclass(eq=False)
class LatencyTarget:
    """What reaching a latency takes of one model.

    Attributes:
        blocks: those that may be dropped.
        queues: the order in which the units of each prunable group go.
        statistics: losses are those of a model whose batch statistics are estimated anew.
        moments: losses are those of a model whose layers that read removed units are solved by
            these sums over what they read; ``None`` if they are not.
    """

    carrier: Carrier
    analysis: Analysis
    selector: Selector
    blocks: tuple[ResidualBlock, ...]
    queues: Sequence[Queue]
    samples: Samples
    context: PassContext
    statistics: bool = False
    moments: Moments | None = None

    @cached_property
    def _batch(self) -> Batch:
        return self.samples.probe(_TIMED_SAMPLES)

    @cached_property
    def table(self) -> TimingTable:
        """The times of the model's segments."""
        segments = Segments(self.carrier, self.analysis, self.blocks, self._batch)
        openvino = runs_in_openvino(self.context)
        identity = {"timings": "openvino" if openvino else "onnxruntime", "threads": THREADS}
        return TimingTable(segments, opener(openvino), self.context.kept, identity)

    @cached_property
    def network(self) -> Network:
        """What can be chosen; groups with a ratio of their own lose that in any case."""
        gone, free = self.selector.nothing, list[Queue]()
        groups = []
        for prunable, queue in zip(self.selector.prunable, self.queues, strict=True):
            if prunable.ratio is None:
                free.append(queue)
                groups.append(prunable.group)
            else:
                gone[queue.nearest(prunable.ratio)] = True
        inside = {
            index: tuple(
                i
                for i, group in enumerate(groups)
                if all(m.parameter in block.parameters for m in group.members)
            )
            for index, block in enumerate(self.blocks)
        }
        count = self.analysis.channels.count
        return Network(self.table.segments.all, tuple(free), inside, count, gone)

    @cached_property
    def _loss(self) -> Callable[[Variant], float]:
        channels, statistics = self.analysis.channels, self.statistics and self.moments is None

        def gated(others: Sequence[str]) -> GatedModel:
            return GatedModel(
                self.carrier, channels, self.blocks, statistics=statistics, others=others
            )

        model: GatedModel | SolvedModel = gated(())
        if self.moments is not None:
            groups = [p.group for p in self.selector.prunable]
            given = first_batches(self.samples, _SOLVED_ON * loss_samples(channels))
            without = WithoutBlocks(self.carrier, self.blocks, given)
            model = SolvedModel(self.carrier, channels, groups, gated, self.moments, without)
        batches = first_batches(self.samples, loss_samples(channels))
        runner, parts = self.carrier.runner(), output_parts(self.carrier.graph())
        loss = OutputLoss([named_parts(runner.run(batch), parts) for batch in batches])
        return lambda variant: loss(
            named_parts(model.run(batch, variant), parts) for batch in batches
        )

    def chosen(self, target: float) -> tuple[Variant, list[str]]:
        """Return what is taken away, and a sentence each on what was measured.

        Raises:
            SpecError: the target is out of reach.
        """
        search = Search(
            self.network, self.table.times, self.table.share, self._loss, self.selector.way_out
        )
        found = search.find(target)
        return self.network.variant(found.state), self.notes(found, target)

    def notes(self, found: Found, target: float) -> list[str]:
        """Describe a choice: what was predicted and measured, rounded, and dropped."""
        runtime = "OpenVINO" if runs_in_openvino(self.context) else "ONNX Runtime"
        notes = [
            f"latency at batch {samples_in(self._batch)} in {runtime} on {THREADS} thread: "
            f"{found.predicted:.2f} of the time before pruning by the table of its parts, "
            f"{found.measured:.2f} measured; the target is {target:g}"
        ]
        groups = [p.group for p in self.selector.prunable if p.ratio is None]
        choices = zip(groups, found.state.widths, found.widths, strict=True)
        lines = [
            f"{group.name} {width} ({'/'.join(map(str, line))})"
            for group, width, line in choices
            if len(line) > 1
        ]
        if lines:
            shown, more = lines[:_SHOWN], len(lines) - _SHOWN
            notes.append(
                "channels and heads remain in the numbers that the kernels tell apart (in brackets;"
                f" any other takes as long as the next of them): {', '.join(shown)}"
                + (f" and {more} more" if more > 0 else "")
            )
        if found.state.dropped:
            names = [self.blocks[i].name for i in sorted(found.state.dropped)]
            notes.append(
                f"{len(names)} of {len(self.blocks)} residual blocks were dropped, those that "
                f"begin with {listed(names, _SHOWN)}: their additions are their skips"
            )
        return notes


def runs_in_openvino(context: PassContext) -> bool:
    """Whether the model is exported for OpenVINO, not for ONNX Runtime, and that is here."""
    return (
        "openvino" in context.targets
        and "ort-cpu" not in context.targets
        and not why_elsewhere("openvino")
    )


def opener(openvino: bool) -> Callable[[ir.Model], Runner]:
    """Return what starts the runtime that an export is meant for."""

    def open_in_openvino(model: ir.Model) -> Runner:
        with scratch() as folder:
            path = folder / "model.onnx"
            save_graph(model, path)
            return OpenVinoRunner(path, "a part of the model")

    return open_in_openvino if openvino else lambda model: runner_of(model, ())


def check_reachable(selector: Selector, graph: ir.Model, blocks: Sequence[ResidualBlock]) -> None:
    """Check a target against the multiply-accumulates that remain if everything goes that can.

    Time falls no faster than these, since the rest of the network stays.

    Raises:
        SpecError: the target is below them.
    """
    channels = selector.choice.channels
    whole = channels.macs(selector.nothing)
    if whole <= 0:
        return
    ranking = selector.ranking(selector.plain())
    smallest, _ = remove_channels(graph, channels, ranking.removed(len(ranking)))
    least = macs(drop_blocks(smallest, blocks)) / whole
    if least > selector.target.value:
        dropped = f" and the {len(blocks)} residual blocks" if blocks else ""
        raise SpecError(
            selector.target.key,
            f"is {selector.target.value:g}, and {least:.3f} of the multiply-accumulates remain "
            f"with every removable channel but the minimum ({selector.minimum}){dropped} gone; "
            "time falls no faster",
            selector.way_out(least),
        )


def plan_notes(
    blocks: Sequence[ResidualBlock], context: PassContext, scope: str | None, *, untimed: bool
) -> tuple[str, ...]:
    """Describe what a run will measure for a latency."""
    runtime = "OpenVINO" if runs_in_openvino(context) else "ONNX Runtime"
    names = listed([block.name for block in blocks], _SHOWN)
    which = "blocks may be dropped, those that begin"
    if len(blocks) == 1:
        which = "block may be dropped, the one that begins"
    notes = [
        f"sizes are an estimate until parts of the network are timed in {runtime} on {THREADS} "
        f"thread, at most {MOST_TIMINGS} timings of about {SECONDS * 1e3:.0f} ms, and losses "
        "measured on the calibration data",
        f"{len(blocks)} residual {which} with {names}"
        if blocks
        else "no residual block may be dropped",
    ]
    if untimed:
        notes.append(
            "a TensorRT engine is not timed here: ONNX Runtime's times are used instead, and "
            "channels remain in multiples of 8, for its float16 kernels"
        )
    if scope in ("global", "local"):
        notes.append(f"scope {scope} has no say: a latency weighs losses that are measured")
    return tuple(notes)
