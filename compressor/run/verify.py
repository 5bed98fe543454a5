"""Reopen each artifact in its runtime, and measure it beside the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from compressor.errors import ArtifactError
from compressor.files import scratch
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes
from compressor.models.onnx.module import file_runner
from compressor.models.onnx.ort_runner import lacks_kernels, opener_of
from compressor.models.onnx.saving import save_graph
from compressor.models.threads import on_threads
from compressor.run.anatomy import file_contents
from compressor.run.artifact_file import ONNX, ArtifactFile, Machinery
from compressor.run.artifacts import (
    StoredArtifact,
    artifact_evaluation,
    artifact_runner,
    float_file,
)
from compressor.run.evaluate import Evaluation
from compressor.run.pipeline import Step
from compressor.run.store import result_key
from compressor.run.timing.cold_rounds import cold_starts
from compressor.run.timing.timing import Clock, Opener, measure_sizes
from compressor.run.verdicts.data_doubts import copied_samples, outputs_not_judged
from compressor.run.verdicts.fidelity import Trio
from compressor.run.verdicts.statistics import paired_difference
from compressor.run.verdicts.verdicts import CHECK_SAMPLES
from compressor.run.workspace import Workspace, machine
from compressor.types.carrier import Carrier
from compressor.types.exporter import Check
from compressor.types.tensors import Batch, fixed_batch, samples_in

_COMPARED = 3  # version of what is stored
_TIMED_SAMPLES = 64
_THREADS = 1  # more would measure how many cores are free
_GLANCE = 1.0  # seconds for the time of what is not judged, such as a storage format
BASELINE, _FUSED = "float", "fused"


def verify(
    workspace: Workspace, artifact: StoredArtifact, final: Carrier, fused: Step | None = None
) -> dict[str, Any]:
    """Measure one artifact; the result is its entry in ``report.json``.

    Args:
        final: the model that was exported.
        fused: the float model after fusion, if another pass follows it; the artifact is timed
            beside that, too.

    Raises:
        ArtifactError: it does not open, or gives outputs of other shapes.
        DataError: it gives NaN or infinity.
    """
    reason = artifact.exporter.cannot_run if workspace.runs else workspace.cannot_run
    if reason:
        return _weighed(workspace, artifact, final, reason)
    measured = compared_and_timed(workspace, artifact, final, fused)
    if measured.get("equal"):
        workspace.take_as_equal(artifact.source, artifact.key)
    evaluation = artifact_evaluation(workspace, artifact)
    judged = _judged(workspace, evaluation, measured["max_abs_diff"])
    not_judged = artifact.exporter.not_judged or _two_runtimes(workspace, final)
    return {
        **_facts(workspace, artifact, final, judged),
        **artifact_memory(workspace, artifact),
        "deployed": not artifact.exporter.not_judged,
        "runtime": measured["runtime"],
        **judged,
        "latency_ms": measured["latency"][0]["artifact"],
        "latency_ratio": None if not_judged else measured["latency"][0]["ratio"]["value"],
        "latency_ratio_reason": not_judged or None,
        "latency": measured["latency"],
        "checks": measured["checks"],
    }


def _two_runtimes(workspace: Workspace, final: Carrier) -> str:
    """Return why the times of a model and the float model are not of one runtime, if so."""
    if not lacks_kernels(workspace.baseline.graph()) or lacks_kernels(final.graph()):
        return ""
    return "the float model ran in PyTorch, as ONNX Runtime has no kernels for its type"


def _judged(
    workspace: Workspace, evaluation: Evaluation | None, difference: float | None
) -> dict[str, Any]:
    """Return what the evaluation data say, or why they say nothing.

    Args:
        difference: the largest difference of an output that was found otherwise.
    """
    baseline, metric = workspace.baseline_evaluation, workspace.plan.metric
    if evaluation is None or baseline is None or metric is None:
        return {**_no_metric(workspace.no_metric), "max_abs_diff": difference}
    pair = paired_difference(baseline.per_sample, evaluation.per_sample, metric.scale)
    return {
        **evaluation.as_json(),
        "metric_reason": None,
        "metric_drop": metric.drop(baseline.metric, evaluation.metric),
        "metric_drop_ci95": list(pair.ci95),
    }


def _facts(
    workspace: Workspace, artifact: StoredArtifact, final: Carrier, judged: Mapping[str, Any]
) -> dict[str, Any]:
    float_bytes, name = float_file(workspace, artifact.exporter)
    metric = workspace.plan.metric
    return {
        "format": artifact.exporter.format,
        "path": artifact.path.name,
        "files": list(artifact.files),
        "bytes": artifact.bytes,
        "contents": file_contents(artifact.path, artifact.exporter.format, artifact.bytes),
        "predicted_bytes": artifact.predicted,
        "sha256": artifact.files[0]["sha256"],
        "float_file": name,
        "float_bytes": float_bytes,
        "size_ratio": artifact.bytes / float_bytes,
        "remarks": [
            *artifact.exporter.remarks(final),
            *workspace.plan.doubts,
            *copied_samples(workspace.baseline_evaluation),
            *outputs_not_judged(metric.name if metric else "", judged.get("unread", {})),
        ],
    }


def _no_metric(reason: str) -> dict[str, Any]:
    return {
        "metric": None,
        "metric_reason": reason,
        "metric_drop": None,
        "metric_drop_ci95": None,
        "sqnr_db": None,
        "agreement": None,
        "kl": None,
    }


def _weighed(
    workspace: Workspace, artifact: StoredArtifact, final: Carrier, reason: str
) -> dict[str, Any]:
    """Describe an artifact that cannot be run; its content is checked instead."""
    with workspace.progress.stage(f"check {artifact.path.name}"):
        compared = artifact.exporter.check_written(final, artifact.path)
        proofs = artifact.exporter.prove(final, artifact.path) if workspace.options.proves else ()
    if artifact.exporter.cannot_run:  # what an engine computes is known to no other runtime
        judged = {**_no_metric(reason), "max_abs_diff": None}
    else:
        # The file holds the codes that were just compared with it: it is the model evaluated here.
        workspace.take_as_equal(artifact.key, artifact.source)
        evaluation = workspace.evaluated(
            artifact.source, lambda: workspace.opened(final), artifact.path.name
        )
        judged = _judged(workspace, evaluation, None)
    return {
        **_facts(workspace, artifact, final, judged),
        **artifact_memory(workspace, artifact, reason),
        "deployed": False,
        "runtime": "",
        **judged,
        "latency_ms": None,
        "latency_ms_reason": reason,
        "latency_ratio": None,
        "latency_ratio_reason": artifact.exporter.not_judged or reason,
        "latency": [],
        "checks": [
            {"name": "holds what was exported", "ok": True, "detail": compared},
            *(_proof_entry(proof) for proof in proofs),
        ],
    }


def _proof_entry(proof: Check) -> dict[str, Any]:
    entry = {"name": proof.name, "ok": True, "detail": proof.detail}
    return entry if proof.known else {**entry, "verdict": "unknown"}


def baseline_latency(artifacts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the float model's latencies, timed beside the artifact that is judged.

    Empty if nothing was timed.
    """
    timed = [a for a in artifacts if a["latency"]]
    judged = [a for a in timed if a["deployed"]] or timed
    return [row["float"] for row in judged[0]["latency"]] if judged else []


def compared_and_timed(
    workspace: Workspace, artifact: StoredArtifact, final: Carrier, fused: Step | None
) -> dict[str, Any]:
    """Compare an artifact with its source and time it beside the float model, unless stored.

    The metric has no part in it. For the arguments see :func:`verify`.
    """
    stored_key = result_key(
        "measure",
        artifact.key,
        baseline=workspace.source_key,
        fused=None if fused is None else fused.key,
        batches=_batches(workspace),
        machine=machine(),
        threads=_THREADS,
        data=workspace.looked_at_digest,
        version=_COMPARED,
    )
    earlier: dict[str, Any] | None = workspace.store.read(stored_key)
    if earlier is not None:
        return earlier
    with workspace.progress.stage(f"time {artifact.path.name}"):
        runner = artifact_runner(workspace, artifact)
        source = workspace.runner(artifact.source, final.runner)
        size = min((data.batch for data in workspace.plan.data.values()), default=CHECK_SAMPLES)
        trio = Trio(
            artifact.path.name,
            runner,
            source,
            workspace.baseline_runner,
            final.outputs,
            workspace.output_parts,
        )
        compared = trio.compare(workspace.probes(CHECK_SAMPLES), size)
        opened = {"name": "opens in its runtime", "ok": True, "detail": runner.runtime}
        result = {
            "runtime": runner.runtime,
            "max_abs_diff": compared["max_abs_diff"],
            "equal": compared["equal"],
            "checks": [opened, compared["check"]],
            "latency": _latency(workspace, artifact, final, fused),
        }
    workspace.store.keep(stored_key, result)
    return result


def _latency(
    workspace: Workspace, artifact: StoredArtifact, final: Carrier, fused: Step | None
) -> list[dict[str, Any]]:
    """Time the artifact and the float model in turn, at batch 1 and at the evaluation's batch,
    or as much of that as can be timed in some seconds.

    The float model is the user's own ONNX file, if there is one. The fused one is timed at batch 1
    alone, and so is what is not judged, which is opened once.
    """
    opener: Opener = partial(artifact.exporter.open, artifact.path)
    if artifact.exporter.not_judged:  # an archive is decoded as it is opened, which may take long
        fused, opener = None, cache(opener)
    file = workspace.plan.spec.onnx
    models: dict[str, Opener] = {
        BASELINE: opener_of(workspace.baseline.graph())
        if file is None
        else lambda: file_runner(file, workspace.plan.model.carrier.graph()),
        "artifact": opener,
    }
    if fused is not None:
        models[_FUSED] = opener_of(fused.carrier.graph())
    counts = _batches(workspace)[: 1 if artifact.exporter.not_judged else None]
    sizes = [_timed_inputs(workspace, final, count) for count in counts]
    with on_threads(_THREADS):
        clock: Clock = "wall" if artifact.exporter.on_gpu else "cpu"
        budget = _GLANCE if artifact.exporter.not_judged else None
        measured = measure_sizes(models, sizes, budget, clock=clock, smallest_only=[_FUSED])
    return [
        {
            "batch": times.batch,
            "inputs": times.inputs,
            "float": times.summary(BASELINE),
            "artifact": times.summary("artifact"),
            "ratio": times.ratio("artifact", BASELINE),
            "fused": times.summary(_FUSED) if _FUSED in times.seconds else None,
            "fused_ratio": times.ratio("artifact", _FUSED) if _FUSED in times.seconds else None,
        }
        for times in measured
    ]


def _timed_inputs(workspace: Workspace, final: Carrier, count: int) -> list[Batch]:
    """Return one batch, or single samples if the time may depend on their content or length."""
    data = workspace.evaluation
    branches = any(operator(node).branches for node in all_nodes(final.graph().graph))
    if data is not None and data.feeds:
        feeds = workspace.probes(_TIMED_SAMPLES)
        shapes = {tuple((n, a.shape) for n, a in feed.items()) for feed in feeds}
        return feeds if branches or len(shapes) > 1 else feeds[:1]
    if count > 1 or data is None or not branches:
        return [workspace.sample(count)]
    names = [i.name for i in workspace.plan.model.carrier.inputs]
    samples = data.first(_TIMED_SAMPLES)
    held = range(samples_in(samples))
    return [{name: samples[name][i : i + 1] for name in names} for i in held]


def _batches(workspace: Workspace) -> list[int]:
    data = workspace.evaluation
    fixed = fixed_batch(workspace.plan.model.carrier.inputs)
    if fixed is not None and not (data is not None and data.feeds):
        return [fixed]
    return [1] if data is None or data.batch == 1 else [1, data.batch]


_NOT_ASKED = "not measured: compress run --memory does that, in a process for each model"
_NO_PEAK = "the system does not report a process's peak memory"
_SECONDS = 10.0  # after which no further start begins, once there were three


def artifact_memory(
    workspace: Workspace, artifact: StoredArtifact, reason: str = ""
) -> dict[str, Any]:
    """Return the entries of ``report.json`` on the peak memory of an artifact.

    Args:
        reason: why it cannot be run here, if it cannot.
    """
    if reason or not workspace.options.memory:
        return _no_memory(reason or _NOT_ASKED)
    folder, exporter = artifact.path.parent, artifact.exporter
    options = exporter.model_dump(mode="json")
    files = tuple(folder / str(file["name"]) for file in artifact.files)
    model = ArtifactFile(artifact.path.name, artifact.path, exporter.format, files, options)
    key = result_key("artifact", artifact.digest, run_by=dict(exporter.run_by))
    return _measured_memory(workspace, key, model)


def float_memory(workspace: Workspace) -> dict[str, Any]:
    """Return the same entries for the float model, which is opened as an ONNX file."""
    if not workspace.runs or not workspace.options.memory:
        return _no_memory(_NOT_ASKED if workspace.runs else workspace.cannot_run)
    with scratch() as folder:
        path = folder / "float.onnx"
        save_graph(workspace.plan.model.carrier.graph(), path)
        model = ArtifactFile("float", path, ONNX, tuple(sorted(folder.iterdir())))
        return _measured_memory(workspace, workspace.source_key, model)


def _measured_memory(workspace: Workspace, model_key: str, model: ArtifactFile) -> dict[str, Any]:
    """Start a model several times, unless the store has the result of that."""
    sample = workspace.sample(1)
    shapes = {name: array.shape for name, array in sample.items()}
    key = result_key("memory", model_key, machine=machine(), shapes=shapes)
    stored: dict[str, Any] | None = workspace.store.read(key)
    if stored is not None:
        return stored
    with workspace.progress.stage(f"memory of {model.name}") as advance:
        try:
            (start,) = cold_starts([model], Machinery(), sample, _SECONDS, advance)
        except ArtifactError as error:  # the run's own process has opened it, and goes on
            return _no_memory(f"in a process of its own it {error.problem}")
    if start["memory"] is None:
        entry = _no_memory(_NO_PEAK)
    else:
        peak = start["memory"]["peak"]
        entry = {
            "peak_memory_bytes": round(peak["median"]),
            "peak_memory_range": [round(peak["least"]), round(peak["most"])],
            "peak_memory_bytes_reason": None,
        }
    workspace.store.keep(key, entry)
    return entry


def _no_memory(reason: str) -> dict[str, Any]:
    return {
        "peak_memory_bytes": None,
        "peak_memory_range": None,
        "peak_memory_bytes_reason": reason,
    }
