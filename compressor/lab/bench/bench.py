"""Measure artifacts side by side; the result is one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compressor.errors import ArtifactError, ModelError, SpecError
from compressor.lab.bench.device import Device, timed_on
from compressor.lab.bench.energy import energy_counters, measure_energy
from compressor.lab.bench.feeds import feeds_of_runs
from compressor.lab.bench.finding import find_artifacts
from compressor.lab.bench.inputs import (
    Declared,
    agreed,
    batch_sizes,
    declared,
    fixed_shapes,
    partly_fixed,
    random_inputs,
    stored_feed,
    stored_inputs,
    undeclared,
)
from compressor.models.threads import on_threads
from compressor.progress import Progress
from compressor.run.artifact_file import ArtifactFile, Machinery
from compressor.run.timing.cold_rounds import ROUNDS, cold_starts
from compressor.run.timing.timing import PRECISION, Latencies, measure
from compressor.run.workspace import environment
from compressor.types.tensors import Batch, TensorSpec, unstackable

SCHEMA = 1
_NOT_ASKED = "--no-cold"


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        batches: sizes; none for 1, or for the one that the artifacts have.
        precision: half the width of a ratio's interval, as a share of it, that is enough.
        seconds: that one batch size may take.
        cold: take cold starts apart, too.
        shapes: of inputs, by name.
        data: an ``.npz`` file with samples, or with a whole feed. Without one, the feeds of a run
            are used if it has any, and random values otherwise.
        device: where the artifacts are run, if not here.
    """

    batches: Sequence[int] = ()
    machinery: Machinery = field(default_factory=Machinery)
    precision: float = 0.01
    seconds: float = 20.0
    cold: bool = True
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    data: Path | None = None
    device: Device | None = None


@dataclass(frozen=True)
class _Work:
    """What is measured.

    Attributes:
        running: those that can be run here.
        reasons: why others cannot, by name.
        runtimes: what runs them, by name; empty if a device does.
        batches: for each size, what they are run on.
        data: where that is from; ``None`` for random values.
    """

    artifacts: Sequence[ArtifactFile]
    running: Sequence[ArtifactFile]
    reasons: Mapping[str, str]
    runtimes: Mapping[str, str]
    inputs: Sequence[TensorSpec]
    batches: Mapping[int, Sequence[Batch]]
    data: str | None


def bench(paths: Sequence[Path], options: BenchOptions, progress: Progress) -> dict[str, Any]:
    """Measure the artifacts at some paths; the others are compared with the first that can be run.

    Raises:
        SpecError: a path or an option is wrong, the artifacts take different inputs, or none of
            them can be run here.
        InputError: a file cannot be used.
        ArtifactError: an artifact cannot be opened.
    """
    work = _work(paths, options)
    machinery = options.machinery
    rows: dict[str, dict[str, Any]] = {a.name: _facts(a, work) for a in work.artifacts}
    models = {a.name: a for a in work.running}
    if options.device is not None:
        _on_device(rows, work, options, options.device, progress)
        return _document(rows, work, options)
    with on_threads(machinery.threads):
        for artifact in work.running:
            rows[artifact.name]["runtime"] = work.runtimes[artifact.name]
            rows[artifact.name]["runtime_reason"] = artifact.elsewhere(machinery) or None
        for size, inputs in work.batches.items():
            with progress.stage(f"time batches of {size}"):
                times = in_turn(models, machinery, inputs, options.seconds, options.precision)
            times = replace(times, batch=size)  # where a feed is timed, its batch is an axis inside
            for name in models:
                rows[name]["latency"].append(_latency(times, name, next(iter(models))))
        _add_energy(rows, work, machinery, progress)
    _add_cold(rows, work, options, progress)
    return _document(rows, work, options)


def _on_device(
    rows: Mapping[str, dict[str, Any]],
    work: _Work,
    options: BenchOptions,
    device: Device,
    progress: Progress,
) -> None:
    """Add what a device measures of the artifacts."""
    with progress.stage(f"time on {device.name}"):
        times = timed_on(
            device,
            work.running,
            {size: inputs[0] for size, inputs in work.batches.items()},
            threads=options.machinery.threads,
            seconds=options.seconds,
            precision=options.precision,
        )
    reason = f"it is not read over {device.kind}"
    for name, row in rows.items():
        row["runtime"] = times.runtimes.get(name)
        row |= {"cold_reason": reason, "energy_reason": reason}
        base = work.running[0].name
        row["latency"] += [_latency(each, name, base) for each in times.sizes.values()]


def _document(
    rows: Mapping[str, dict[str, Any]], work: _Work, options: BenchOptions
) -> dict[str, Any]:
    machinery, device = options.machinery, options.device
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "device": None if device is None else f"{device.kind} {device.name}",
        "provider": machinery.provider,
        "threads": machinery.threads,
        "precision": options.precision,
        "seconds": options.seconds,
        "base": work.running[0].name,
        "inputs": [{"name": i.name, "shape": list(i.shape), "dtype": i.dtype} for i in work.inputs],
        "data": work.data,
        "artifacts": list(rows.values()),
    }


def in_turn(
    artifacts: Mapping[str, ArtifactFile],
    machinery: Machinery,
    inputs: Sequence[Batch],
    seconds: float | None = None,
    precision: float = PRECISION,
) -> Latencies:
    """Time artifacts in turn; see :func:`measure`.

    Raises:
        CompressorError: an artifact cannot be opened or run.
    """
    models = {name: artifact.opener(machinery) for name, artifact in artifacts.items()}
    here = all(artifact.provider(machinery) == "cpu" for artifact in artifacts.values())
    with on_threads(machinery.threads):
        return measure(models, inputs, seconds, precision, "cpu" if here else "wall")


def _work(paths: Sequence[Path], options: BenchOptions) -> _Work:
    artifacts = find_artifacts(paths)
    reasons = {a.name: a.cannot_run for a in artifacts if a.cannot_run}
    inputs_of: dict[str, Declared] = {}
    runtimes: dict[str, str] = {}
    failed: list[ModelError | ArtifactError | SpecError] = []
    for artifact in artifacts:
        if artifact.name in reasons:
            continue
        try:
            inputs_of[artifact.name] = declared(artifact)
            if options.device is None:
                with on_threads(options.machinery.threads):
                    runtimes[artifact.name] = artifact.opener(options.machinery)().runtime
        except (ModelError, ArtifactError, SpecError) as error:
            failed.append(error)
            inputs_of.pop(artifact.name, None)
            reasons[artifact.name] = f"{error.problem}; {error.remedy}"
    running = [a for a in artifacts if a.name not in reasons]
    if not running:
        if failed:
            raise failed[0]
        first = artifacts[0]
        raise SpecError(
            f"artifact {first.name!r}",
            f"cannot be run here: {first.cannot_run}",
            "name an artifact that can, or run this where it can",
        )
    branches = any(d.branches for d in inputs_of.values())
    taken = _inputs(inputs_of, options.shapes)
    inputs, batches, data = _batches(paths, options, taken, branches=branches)
    return _Work(artifacts, running, reasons, runtimes, inputs, batches, data)


def _batches(
    paths: Sequence[Path], options: BenchOptions, taken: tuple[TensorSpec, ...], *, branches: bool
) -> tuple[tuple[TensorSpec, ...], Mapping[int, Sequence[Batch]], str | None]:
    """Return the inputs with the lengths they have, what is run by batch size, and its origin."""
    feeds: list[Batch] = []
    if options.data is None and not options.shapes and not options.batches:
        feeds = feeds_of_runs(paths, taken, branches=branches)
    if feeds:
        return _as_fed(taken, feeds), {1: feeds}, "feeds of the run"
    if options.data is None:
        inputs = fixed_shapes(taken, options.shapes)
        sizes = batch_sizes(inputs, options.batches)
        return inputs, {size: random_inputs(inputs, size) for size in sizes}, None
    data, inputs = options.data, partly_fixed(taken, options.shapes)
    sizes = batch_sizes(inputs, options.batches)
    if unstackable(inputs) is not None:
        asked = options.batches or (None,)
        fed = {s or 1: [stored_feed(data, inputs, s)] for s in asked}
        return _as_fed(inputs, next(iter(fed.values()))), fed, data.name
    stored = {s: stored_inputs(data, inputs, s, several=branches) for s in sizes}
    shown = _as_fed(inputs, stored[sizes[0]])
    free = tuple(
        replace(s, shape=s.shape if isinstance(i.shape[0], int) else ("batch", *s.shape[1:]))
        for i, s in zip(inputs, shown, strict=True)
    )
    return free, stored, data.name


def _as_fed(inputs: Sequence[TensorSpec], feeds: Sequence[Batch]) -> tuple[TensorSpec, ...]:
    """Return the inputs with the lengths that all feeds have."""

    def common(spec: TensorSpec, axis: int) -> int | str | None:
        lengths = {feed[spec.name].shape[axis] for feed in feeds}
        return lengths.pop() if len(lengths) == 1 else (spec.shape[axis] or "any")

    return tuple(
        replace(i, shape=tuple(common(i, axis) for axis in range(len(i.shape)))) for i in inputs
    )


def _inputs(
    inputs_of: Mapping[str, Declared], shapes: Mapping[str, Sequence[int]]
) -> tuple[TensorSpec, ...]:
    declared_inputs = {name: d.inputs for name, d in inputs_of.items() if d.inputs is not None}
    return agreed(declared_inputs) if declared_inputs else undeclared(next(iter(inputs_of)), shapes)


def _facts(artifact: ArtifactFile, work: _Work) -> dict[str, Any]:
    reason = work.reasons.get(artifact.name)
    return {
        "name": artifact.name,
        "path": str(artifact.path),
        "format": artifact.format,
        "bytes": artifact.bytes,
        "size_ratio": artifact.bytes / work.running[0].bytes,
        "runtime": None,
        "runtime_reason": None,
        "reason": reason,
        "latency": [],
        "cold": None,
        "cold_reason": reason,
        "energy": None,
        "energy_reason": reason,
    }


def _latency(times: Latencies, name: str, base: str) -> dict[str, Any]:
    summary = times.summary(name)
    low, high = summary["ci95"]
    per_second = times.batch * 1e3
    return {
        **summary,
        "throughput": {
            "value": per_second / summary["mean"],
            "ci95": [per_second / high, per_second / low],
        },
        "ratio": None if name == base else times.ratio(name, base),
    }


def _add_energy(
    rows: Mapping[str, dict[str, Any]], work: _Work, machinery: Machinery, progress: Progress
) -> None:
    counted = []
    for artifact in work.running:
        counters, reason = energy_counters(artifact.provider(machinery))
        rows[artifact.name]["energy_reason"] = reason or None
        if counters:
            counted.append((artifact, counters))
    if not counted:
        return
    size, inputs = next(iter(work.batches.items()))
    with progress.stage("measure energy"):
        models = [(a.opener(machinery)(), counters) for a, counters in counted]
        energies = measure_energy(models, inputs[0])
    for (artifact, _), energy in zip(counted, energies, strict=True):
        rows[artifact.name]["energy"] = {"batch": size, **energy}


def _add_cold(
    rows: Mapping[str, dict[str, Any]], work: _Work, options: BenchOptions, progress: Progress
) -> None:
    if not options.cold:
        for artifact in work.running:
            rows[artifact.name]["cold_reason"] = _NOT_ASKED
        return
    size, inputs = next(iter(work.batches.items()))
    with progress.stage("start cold", ROUNDS * len(work.running)) as advance:
        starts = cold_starts(work.running, options.machinery, inputs[0], options.seconds, advance)
    for artifact, cold in zip(work.running, starts, strict=True):
        rows[artifact.name]["cold"] = {"batch": size, **cold}


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes by the input's name, from texts such as ``image=1,3,224,224``.

    Raises:
        SpecError: a text is of another form.
    """
    shapes = {}
    for text in texts:
        name, _, lengths = text.rpartition("=")
        parts = lengths.split(",")
        if not name or not all(part.strip().isdecimal() and int(part) for part in parts):
            raise SpecError(
                f"--shape {text}",
                "is not a name followed by lengths of at least 1",
                "write it as in --shape image=1,3,224,224",
            )
        shapes[name] = tuple(int(part) for part in parts)
    return shapes
