"""Run the passes in order, each at most once for the same content."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compressor.calibration.collect import collect_statistics
from compressor.errors import CompressorError
from compressor.graph.costs import model_bytes
from compressor.models.resident_memory import return_freed_memory
from compressor.run.blocks.blockwise import block_run
from compressor.run.blocks.streamed import apply_streamed
from compressor.run.evaluate import RunSamples, layer_signals
from compressor.run.noise.histograms import layer_histograms
from compressor.run.noise.references import Reference, save_reference
from compressor.run.pass_layers import layer_entries
from compressor.run.plan import PassPlan
from compressor.run.store import compute_versions, result_key
from compressor.run.training import References, begin, end, make_training, training_parts
from compressor.run.weight_pass import WeightPass
from compressor.run.workspace import KeptNumbers, Workspace
from compressor.types.carrier import Carrier
from compressor.types.data import share
from compressor.types.passes import GraphPass, Outcome, Pass, PassContext, Survey, TrainPass
from compressor.types.statistics import Request

FUSE = "fuse"
"""The pass after which the model still is the float model."""

_MODEL = "model"
_SIGNAL_SAMPLES = 64
_UNTRAINED, _REFERENCE = "untrained", "reference"


@dataclass(frozen=True)
class Step:
    """A finished pass.

    Attributes:
        key: key of the model after it.
        result: seconds, bytes, layers and notes, as JSON.
        cached: it was finished by an earlier run.
        untrained: the model that the pass would have given without training, where it kept that.
        reference: what its layers are compared with, where passes have scaled channels.
    """

    name: str
    key: str
    carrier: Carrier
    result: Mapping[str, Any]
    cached: bool
    untrained: Carrier | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class _Task:
    """A pass that is to be done.

    Attributes:
        carrier: the model before it, in the form that the pass works on.
        exact: the last model before that one that lost nothing; ``None`` where that one is it.
        reference: what the layers before it are compared with.
    """

    index: int
    declared: Pass
    planned: PassPlan
    parts: Mapping[str, Any]
    key: str
    carrier: Carrier
    exact: Carrier | None
    reference: Reference | None


def run_passes(workspace: Workspace) -> list[Step]:
    """Run every pass, or take its result from the store.

    Raises:
        CompressorError: a pass fails; what finished before it is kept.
    """
    steps: list[Step] = []
    plan = workspace.plan
    key, carrier = workspace.source_key, plan.model.carrier
    exact, reference = carrier, None
    for index, (declared, planned) in enumerate(zip(plan.spec.passes, plan.passes, strict=True)):
        workspace.begin_step()
        try:
            parts = pass_parts(workspace, index, planned)
            upstream, key = key, result_key("pass", key, **parts)
            decides = {"upstream": upstream, "versions": dict(compute_versions()), **parts}
            adapted = declared.adapted(carrier, plan.context)
            lossy = None if exact is carrier else exact
            task = _Task(index, declared, planned, decides, key, adapted, lossy, reference)
            step = _step(workspace, task)
        except CompressorError as error:
            raise error.at(plan.spec.where("passes", index)) from error.__cause__
        steps.append(step)
        if planned.trains or (step.name == FUSE and exact is carrier):
            exact = step.carrier
        elif step.reference is not None and step.reference is not reference:
            exact = step.reference.carrier
        carrier, reference = step.carrier, step.reference
    return steps


def pass_parts(workspace: Workspace, index: int, planned: PassPlan) -> dict[str, Any]:
    """Return what determines a pass's result, beside the model before it."""
    plan = workspace.plan
    declared = plan.spec.passes[index]
    calibration = plan.data["calibration"] if planned.reads_data else None
    return {
        "name": declared.name,
        "version": declared.version,
        "options": declared.model_dump(mode="json", exclude=set(declared.neutral)),
        "data": None if calibration is None else calibration.digest,
        "batch": None if calibration is None else calibration.batch,
        # Of the first sample, by which passes that read no data count work.
        "shapes": {}
        if planned.reads_data
        else {n: list(s) for n, s in plan.context.shapes.items()},
        "metric": plan.context.metric if declared.by_metric else None,
        "seed": plan.spec.seed,
        "targets": sorted(plan.context.targets),
        **References(workspace, index).parts(),
        **(training_parts(workspace) if planned.trains else {}),
    }


def on_own_samples(workspace: Workspace, steps: Sequence[Step]) -> list[Step]:
    """Return steps whose layers are compared on the samples of this run.

    A pass has the same result whatever the evaluation data are, so what the store has of its layers
    may have been seen on others.
    """
    own, found = workspace.looked_at_digest, list[Step]()
    carrier = workspace.plan.model.carrier
    for declared, step in zip(workspace.plan.spec.passes, steps, strict=True):
        before = declared.adapted(carrier, workspace.plan.context)
        carrier, result = step.carrier, step.result
        if workspace.runs and result.get("looked_at") != own:
            key = result_key("layers", step.key, data=own, baseline=workspace.source_key)
            measured = workspace.store.read(key) or _measured(workspace, step, before, key)
            step = replace(step, result={**result, **measured})
        found.append(step)
    return found


def _measured(workspace: Workspace, step: Step, before: Carrier, key: str) -> Mapping[str, Any]:
    """Compare layers after a pass on this run's samples; of what else is told, nothing changes."""
    batches = workspace.looked_at(_SIGNAL_SAMPLES)
    reference = workspace.baseline if step.reference is None else step.reference.carrier
    with (
        workspace.progress.stage("compare layers with the float model's"),
        workspace.store.write(key) as (_, result),
    ):
        signals = layer_signals(step.carrier, reference, batches)
        rows = step.result["layers"]
        layers = [{**row, "sqnr_db": signals.get(row["name"])} for row in rows]
        scaled, histograms = step.result["reference"], list[dict[str, Any]]()
        if scaled is None or scaled["given"]:  # else the model before, scaled alike, is gone
            before = before if scaled is None else reference
            histograms = layer_histograms(before, step.carrier, batches, layers)
        result.update(layers=layers, histograms=histograms)
    return {"layers": layers, "histograms": histograms}


def _step(workspace: Workspace, task: _Task) -> Step:
    if not workspace.runs:
        # The model is streamed: what the pass says is done when tensors are written.
        survey = task.declared.survey(task.carrier, workspace.plan.context)
        start = time.perf_counter()
        given = (_direct(task.declared), task.carrier, survey, _watched(workspace), task.key)
        outcome = apply_streamed(workspace, *given)
        result = {
            "seconds": time.perf_counter() - start,
            "bytes": model_bytes(outcome.carrier),
            "layers": layer_entries(workspace, outcome, outcome.carrier, None, task.carrier),
            "notes": list(dict.fromkeys([*survey.notes, *outcome.notes, *_weight_notes(outcome)])),
        }
        return Step(task.declared.name, task.key, outcome.carrier, result, cached=False)
    key, declared = task.key, task.declared
    cached = workspace.store.read(key)
    workspace.ranks.wait()  # all have looked before the first writes
    if cached is None:
        _compute(workspace, task)
        workspace.ranks.wait()
    if task.planned.trains and workspace.first:
        end(workspace.store, key)
    source, folder = workspace.plan.model.carrier, workspace.store.folder(key)
    restored = source.restore(folder / _MODEL)
    stored = cached if cached is not None else workspace.store.read(key)
    assert stored is not None
    untrained = source.restore(folder / _UNTRAINED) if stored.get("untrained") else None
    reference = task.reference
    if stored["reference"] is not None:
        scaled, given = source.restore(folder / _REFERENCE), stored["reference"]["given"]
        reference = Reference(result_key("reference", key), scaled, given)
    return Step(declared.name, key, restored, stored, cached is not None, untrained, reference)


def _compute(workspace: Workspace, task: _Task) -> None:
    workspace.load()
    start = time.perf_counter()
    torch.manual_seed(workspace.plan.spec.seed)
    survey = task.declared.survey(task.carrier, workspace.plan.context)
    if isinstance(task.declared, TrainPass):
        outcome = _trained(workspace, task, task.declared, survey)
    else:
        outcome = apply_pass(workspace, task.declared, task.carrier, survey, task.parts["upstream"])
    seconds = time.perf_counter() - start
    if not workspace.first:
        return
    return_freed_memory()
    with workspace.store.write(task.key) as (folder, result):
        (folder / _MODEL).mkdir()
        outcome.carrier.save(folder / _MODEL)
        restored = workspace.plan.model.carrier.restore(folder / _MODEL)
        keeps_untrained = outcome.untrained is not None
        if outcome.untrained is not None:
            (folder / _UNTRAINED).mkdir()
            outcome.untrained.save(folder / _UNTRAINED)
        outcome = replace(outcome, carrier=restored, untrained=None)
        gc.collect()  # a graph refers to itself, and so all that a pass has made would stay
        return_freed_memory()
        batches = workspace.looked_at(_SIGNAL_SAMPLES)
        made, before, reference = _scaled(workspace, task, outcome, folder / _REFERENCE)
        with workspace.progress.stage("compare layers with the float model's"):
            layers = layer_entries(workspace, outcome, restored, batches, reference)
            histograms = layer_histograms(before, restored, batches, layers)
        result.update(
            seconds=seconds,
            bytes=model_bytes(restored),
            looked_at=workspace.looked_at_digest,
            layers=layers,
            histograms=histograms,
            notes=list(dict.fromkeys([*survey.notes, *outcome.notes])),
            training=outcome.training,
            untrained=keeps_untrained,
            reference=made,
        )


def _scaled(
    workspace: Workspace, task: _Task, outcome: Outcome, folder: Path
) -> tuple[dict[str, bool] | None, Carrier, Carrier]:
    """Scale the float model's channels as a pass has scaled those of its model.

    Returns:
        What the result says of it, ``None`` where the pass scaled nothing; the model before the
        pass, scaled alike; and what layers are compared with.
    """
    if outcome.rescale is None:
        reference = workspace.baseline if task.reference is None else task.reference.carrier
        return None, task.carrier, reference
    declared, context, exact = task.declared, workspace.plan.context, task.exact
    exact = task.carrier if exact is None else declared.adapted(exact, context)
    given = save_reference(outcome.rescale, task.carrier, exact, folder)
    reference = workspace.plan.model.carrier.restore(folder)
    gc.collect()
    return_freed_memory()
    return {"given": given}, reference if given else outcome.rescale(task.carrier), reference


def _weight_notes(outcome: Outcome) -> list[str]:
    """Return which weight lost most, where no output can be looked at."""
    measured = [(x.weight_sqnr_db, x.name) for x in outcome.layers if x.weight_sqnr_db is not None]
    if not measured:
        return []
    (least, name), (most, _) = min(measured), max(measured)
    return [
        f"signal to noise of the weights, found on a sample of their rows: {least:.1f} dB "
        f"(layer {name!r}) to {most:.1f} dB"
    ]


def apply_pass(
    workspace: Workspace,
    declared: Pass,
    carrier: Carrier,
    survey: Survey,
    upstream: str,
) -> Outcome:
    """Apply a pass that does not train, with the run's data.

    Args:
        survey: what the pass found in that model.
        upstream: key of that model; what was gathered of it before is not gathered again.
    """
    direct, context = _direct(declared), _watched(workspace)
    data = workspace.plan.data.get("calibration")
    if declared.by_block and survey.requests:
        samples = RunSamples(carrier.inputs, data, context.seed, carrier=carrier)
        with block_run(workspace, declared.name, carrier, survey.requests) as blocks:
            return direct.apply(carrier, replace(context, blocks=blocks, samples=samples), {})
    collect = partial(calibrate, workspace, declared.name, carrier)
    statistics = workspace.collected.of((upstream, declared.name), survey.requests, collect)
    replays = declared.replays or declared.replays_given
    total = data.runs if data is not None and replays else None
    with workspace.progress.stage(declared.name, total) as advance:
        samples = RunSamples(carrier.inputs, data, context.seed, advance, carrier)
        kept = KeptNumbers(workspace.store)
        context = replace(context, samples=samples, kept=kept)
        return direct.apply(carrier, context, statistics)


def _direct(declared: Pass) -> GraphPass | WeightPass:
    """Return a pass that does not train as what it is."""
    assert isinstance(declared, GraphPass | WeightPass)
    return declared


def _trained(workspace: Workspace, task: _Task, declared: TrainPass, survey: Survey) -> Outcome:
    """Let a pass train, in every process; its state is kept until its result is stored."""
    notes: tuple[str, ...] = ()
    if workspace.first:
        notes = begin(workspace.store, task.key, task.parts, workspace.plan.spec.folder)
        for note in notes:
            workspace.progress.note(note)
    workspace.ranks.wait()
    carrier = task.carrier
    statistics = calibrate(workspace, declared.name, carrier, survey.requests)
    references = References(workspace, task.index)
    folder = workspace.store.training(task.key)
    training = make_training(workspace, references, folder, carrier)
    outcome = declared.apply_training(carrier, _watched(workspace), statistics, training)
    return replace(outcome, notes=(*notes, *outcome.notes))


def _watched(workspace: Workspace) -> PassContext:
    """Return what passes know of the spec, with whoever watches the run."""
    return replace(workspace.plan.context, progress=workspace.progress)


def calibrate(
    workspace: Workspace, label: str, carrier: Carrier, requests: Sequence[Request]
) -> dict[str, Any]:
    """Gather the statistics that a pass asked for, in one pass over the calibration data."""
    if not requests:
        return {}
    data, ranks = workspace.plan.data["calibration"], workspace.ranks
    with workspace.progress.stage(f"{label}: calibrate", data.runs) as advance:
        batches = data.unrolled(carrier, share(data.batches(), ranks))
        statistics = collect_statistics(carrier, batches, requests, advance, ranks)
    return_freed_memory()
    return statistics
