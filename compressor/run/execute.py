"""Execute a plan: passes, exports, verification and limits, up to the content of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from compressor.models.garbage import objects_frozen
from compressor.models.onnx.ort_session import exact_products
from compressor.progress import SILENT, Steps
from compressor.run.anatomy import layer_graph
from compressor.run.artifacts import (
    StoredArtifact,
    artifact_evaluation,
    given_objects,
    identity,
    per_sample_entry,
    write_artifacts,
)
from compressor.run.evaluate import CachingRunner, Evaluation
from compressor.run.noise.attribution import attribution
from compressor.run.options import RunOptions
from compressor.run.pass_layers import weakest_layer
from compressor.run.pipeline import FUSE, Step, on_own_samples, run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store, result_key, store_of
from compressor.run.verdicts.data_doubts import no_evidence
from compressor.run.verdicts.decisions import class_entries, flipped_entry
from compressor.run.verdicts.fidelity import Trio
from compressor.run.verdicts.verdicts import CHECK_SAMPLES, check_expected, judge, overall
from compressor.run.verify import baseline_latency, float_memory, verify
from compressor.run.workspace import Workspace, environment
from compressor.spec.keys import MetricKeys
from compressor.spec.load import Spec
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import Exporter


def help_run(spec: Spec, options: RunOptions) -> None:
    """Run this process's share of a run that the first process writes.

    Raises:
        CompressorError: as :func:`run_spec`, or another process is gone.
    """
    store = Store(store_of(spec.output))
    workspace = Workspace(make_plan(spec, fresh=options.fresh), store, SILENT, options)
    options.ranks.wait()  # until the store is locked
    _compress(workspace)


def _compress(workspace: Workspace) -> tuple[list[Step], Carrier, list[StoredArtifact]]:
    """Run passes and exports, the part of a run that processes share."""
    steps = run_passes(workspace)
    key = steps[-1].key if steps else workspace.source_key
    if not steps:
        workspace.load()
    final = steps[-1].carrier if steps else workspace.plan.model.carrier
    return steps, final, write_artifacts(workspace, key, final)


@contextmanager
def computing_for(exports: Sequence[Exporter]) -> Iterator[None]:
    """Let quantized graphs compute as the exports' targets do, if none of these saturates."""
    exact = [exporter.exact for exporter in exports if exporter.targets]
    with exact_products(bool(exact) and all(exact)):
        yield


def execute(workspace: Workspace) -> tuple[dict[str, Any], list[StoredArtifact]]:
    """Run everything up to the report; the output folder is not touched yet."""
    with objects_frozen(), computing_for(workspace.plan.spec.exports):
        return _executed(workspace)


def _executed(workspace: Workspace) -> tuple[dict[str, Any], list[StoredArtifact]]:
    plan = workspace.plan
    workspace.progress = Steps(workspace.progress, 1 + 2 * (len(plan.passes) + len(plan.exports)))
    workspace.begin_step()
    # First, so that errors in the data or the metric show before any long work.
    evaluation = workspace.baseline_evaluation
    keys = plan.spec.metric
    if evaluation is not None and isinstance(keys, MetricKeys) and keys.expect is not None:
        check_expected(evaluation.metric, keys.expect, plan.spec.where("metric"))
    steps, final, written = _compress(workspace)
    fused = steps[0] if len(steps) > 1 and steps[0].name == FUSE else None
    artifacts = []
    for artifact in written:
        workspace.begin_step()
        artifacts.append(verify(workspace, artifact, final, fused))
    steps = on_own_samples(workspace, steps)
    metric = None if evaluation is None else evaluation.metric
    constant = None
    if evaluation is not None and plan.metric is not None:
        constant = evaluation.constant_drop(plan.metric)
    limits = judge(
        plan.spec.limits,
        artifacts,
        metric,
        shrinks=plan.shrinks,
        constant=constant,
        zeros=None if evaluation is None else evaluation.zeros,
        no_evidence=no_evidence(plan.spec, evaluation),
    )
    verdict = overall(limits, artifacts)
    latency = baseline_latency(artifacts)
    no_graph = "a bare checkpoint does not say how its weights are used"
    report = {
        "schema": 1,
        "name": plan.spec.name,
        "identity": identity(workspace),
        "objects": given_objects(plan.spec),
        "ok": verdict != "failed",
        "verdict": verdict,
        "baseline": {
            "metric": metric,
            "metric_reason": None if evaluation else workspace.no_metric,
            "bytes": plan.bytes,
            "parameters": plan.parameters,
            "macs": plan.macs,
            "macs_reason": no_graph if plan.macs is None else None,
            "latency_ms": latency[0] if latency else None,
            "latency_ms_reason": None if latency else _not_timed(workspace, artifacts),
            "latency": latency,
            **float_memory(workspace),
        },
        "artifacts": artifacts,
        "passes": _pass_entries(workspace, steps),
        "limits": limits,
        **_decided(workspace, written, artifacts),
        "graph": layer_graph(final, plan.context.shapes),
        "per_sample": per_sample_entry(workspace),
        "environment": environment(),
    }
    return report, written


def _decided(
    workspace: Workspace, written: Sequence[StoredArtifact], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the entries on single decisions of the first artifact that is deployed, or is any."""
    main = next((i for i, entry in enumerate(entries) if entry["deployed"]), 0)
    evaluation = None
    if entries and entries[main]["metric"] is not None:
        evaluation = artifact_evaluation(workspace, written[main])
    decisions = None if evaluation is None else evaluation.decisions
    return {
        "flipped": flipped_entry(decisions, entries[main]["path"]) if entries else None,
        "classes": class_entries(decisions),
    }


def _not_timed(workspace: Workspace, artifacts: Sequence[Mapping[str, Any]]) -> str:
    if not workspace.runs:
        return workspace.cannot_run
    return f"it is timed beside an artifact, and none is run: {artifacts[0]['latency_ms_reason']}"


def _pass_entries(workspace: Workspace, steps: Sequence[Step]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    before = workspace.baseline_evaluation
    for index, step in enumerate(steps):
        workspace.begin_step()
        runner: Callable[[], Runner] = partial(workspace.opened, step.carrier)
        if step is steps[-1]:  # its outputs for some samples are known: artifacts were compared
            runner = partial(workspace.runner, step.key, runner)
        fused = not index and step.name == FUSE and step is not steps[-1]
        after = _as_float(workspace, step) if fused else None
        after = after or workspace.evaluated(step.key, runner, f"after {step.name}")
        trained = any(planned.trains for planned in workspace.plan.passes[: index + 1])
        metric, baseline = workspace.plan.metric, workspace.baseline_evaluation
        drop = None
        if after is not None and baseline is not None and metric is not None:
            drop = metric.drop(baseline.metric, after.metric)
        entries.append(
            {
                "pass": step.name,
                "seconds": step.result["seconds"],
                "cached": step.cached,
                "metric": None if after is None else after.metric,
                "metric_drop": drop,
                "sqnr_db": None if after is None else after.sqnr_db,
                "bytes": step.result["bytes"],
                # What training has moved is not lost.
                "weakest": None if trained else weakest_layer(list(step.result["layers"])),
                "notes": step.result["notes"],
                "training": step.result.get("training"),
                "layers": step.result["layers"],
                "histograms": step.result.get("histograms", []),
                "untrained": _untrained(workspace, step, before, after),
                "attribution": attribution(workspace, index, steps),
            }
        )
        before = after
    return entries


def _as_float(workspace: Workspace, step: Step) -> Evaluation | None:
    """Return the float model's results for a fused model that computes the same.

    Fusing changes the order of sums. Where check samples show no more than that, the fused model is
    not run on all evaluation data.
    """
    baseline, data = workspace.baseline_evaluation, workspace.evaluation
    if baseline is None or data is None or data.recurrence is not None:
        return None
    key = result_key("as-float", step.key, baseline=workspace.source_key, data=data.digest)
    found: Mapping[str, Any] | None = workspace.store.read(key)
    if found is None:
        fused = CachingRunner(partial(workspace.opened, step.carrier))
        floats = workspace.baseline_runner
        outputs, parts = step.carrier.outputs, workspace.output_parts
        trio = Trio(f"after {step.name}", fused, floats, floats, outputs, parts)
        with workspace.progress.stage(f"evaluate after {step.name}"):
            found = trio.compare(workspace.looked_at(CHECK_SAMPLES), data.batch)
        with workspace.store.write(key) as (_, result):
            result.update(found)
    if not found["equal"]:
        return None
    return replace(baseline, sqnr_db=found["sqnr_db"], max_abs_diff=found["max_abs_diff"])


def _untrained(
    workspace: Workspace, step: Step, before: Evaluation | None, after: Evaluation | None
) -> dict[str, Any] | None:
    metric = workspace.plan.metric
    if step.untrained is None or metric is None or before is None or after is None:
        return None
    key = result_key("untrained", step.key)
    evaluation = workspace.evaluated(key, step.untrained.runner, f"{step.name} without training")
    assert evaluation is not None
    lost = metric.drop(before.metric, evaluation.metric)
    left = metric.drop(before.metric, after.metric)
    reason = None if lost > 0 else "nothing was lost without training"
    if lost > 0 and left < 0:  # a share of more than all of it says nothing
        reason = "the model is better after training than before the pass"
    return {
        "metric": evaluation.metric,
        "metric_drop": lost,
        "won_back": 100 * (lost - left) / lost if reason is None else None,
        "won_back_reason": reason,
    }
