"""Measure a model and the machine, and say what bounds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.doctor import usable_cores
from compressor.graph.channels.lengths import with_shapes
from compressor.graph.values import all_nodes
from compressor.progress import Progress, Silent
from compressor.report import formats
from compressor.roofline.kernels import nodes_of_kernels, time_kernels, undisturbed
from compressor.roofline.kinds import Prospect, prospects
from compressor.roofline.measured_model import (
    MeasuredModel,
    inputs_for,
    measured_model,
)
from compressor.roofline.peaks import Peaks, measure_peaks
from compressor.roofline.work import Work, timed, total_traffic, work_of_nodes
from compressor.types.tensors import Batch

LENGTH = 128


@dataclass(frozen=True)
class Roofline:
    """What a model does, how long it takes, and what the machine allows.

    Attributes:
        path: the model.
        runtime: what executed it.
        batch: samples in a run.
        inputs: shapes of what it was run on.
        peaks: of the machine.
        seconds: of one run from end to end, the mean of the fastest quarter; so are those of the
            operators.
        latency: percentiles over all runs, in milliseconds.
        works: layers in the order of execution, then other operators, the longest first.
        prospects: what kinds of compression could bring.
        notes: how to read it, one sentence each.
    """

    path: str
    runtime: str
    batch: int
    inputs: Mapping[str, tuple[int, ...]]
    peaks: Peaks
    seconds: float
    latency: Mapping[str, Any]
    works: tuple[Work, ...]
    prospects: tuple[Prospect, ...]
    notes: tuple[str, ...]

    @property
    def outside(self) -> float:
        """Seconds that no operator takes: the runtime itself, and copies of inputs and outputs."""
        return max(0.0, self.seconds - sum(work.seconds or 0.0 for work in self.works))

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``compress inspect --roofline --json``."""
        traffic = total_traffic(work.traffic for work in self.works)
        flops = sum(work.flops for work in self.works)
        return {
            "schema": 1,
            "path": self.path,
            "runtime": self.runtime,
            "batch": self.batch,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "machine": {
                "threads": self.peaks.threads,
                "flops_per_second": dict(self.peaks.flops),
                "bytes_per_second": self.peaks.bandwidth,
                "measured_on_bytes": self.peaks.bandwidth_bytes,
            },
            "latency_ms": dict(self.latency),
            "seconds": self.seconds,
            "flops": flops,
            "bytes": traffic.bytes,
            "intensity": flops / traffic.bytes if traffic.bytes else None,
            "operators": [self._operator(work) for work in self.works],
            "outside_seconds": self.outside,
            "prospects": [
                {
                    "kind": found.kind.name,
                    "time_share": found.share,
                    "best_speedup": found.speedup,
                    "limit": found.limit,
                    "assumption": found.kind.assumption,
                }
                for found in self.prospects
            ],
            "notes": list(self.notes),
        }

    def _operator(self, work: Work) -> dict[str, Any]:
        return {
            "name": work.name,
            "operator": work.op,
            "layer": work.layer,
            "count": work.count,
            "type": work.type,
            "kernels": list(work.kernels),
            "flops": work.flops,
            **asdict(work.traffic),
            "bytes": work.traffic.bytes,
            "intensity": work.intensity,
            "bound": work.bound(self.peaks) or None,
            "seconds": work.seconds,
            "time_share": None if work.seconds is None else 100 * work.seconds / self.seconds,
            "of_roof": work.reach(self.peaks),
        }


def measure_roofline(
    path: Path,
    batch: int | None = None,
    threads: int | None = None,
    length: int = LENGTH,
    progress: Progress | None = None,
) -> Roofline:
    """Time a model's operators in ONNX Runtime on the CPU, and the machine's peaks.

    Args:
        path: an ONNX file, a run's output folder, or a spec for its float model.
        batch: samples in a run; ``None`` for one, or what the model fixes.
        threads: that compute; ``None`` for as many as the process has cores.
        length: of dynamic axes other than the batch's.
        progress: shows how far it is.

    Raises:
        CompressorError: the model has no graph, or does not run.
    """
    progress = progress or Silent()
    with measured_model(path) as model:
        return _measured(path, model, inputs_for(model, batch, length), threads, progress)


def _measured(
    path: Path, model: MeasuredModel, given: Batch, threads: int | None, progress: Progress
) -> Roofline:
    count = threads or usable_cores()
    with progress.stage("time the model and its operators"):
        done = time_kernels(model.file, given, count, model.subject)
    graph = with_shapes(model.graph, {n: a.shape for n, a in given.items()})
    works, unknown = work_of_nodes(all_nodes(graph.graph))
    joined = timed(works, done.kernels, nodes_of_kernels(graph, done.kernels))
    with progress.stage("measure the machine"):
        peaks = measure_peaks(count, total_traffic(work.traffic for work in joined).bytes)
    seconds = undisturbed(done.seconds)
    p50, p90 = (float(p) for p in np.percentile(done.seconds * 1e3, [50, 90]))
    scaled, notes = _scaled(joined, seconds)
    return Roofline(
        path=str(path),
        runtime=done.runtime,
        batch=_samples(given),
        inputs={name: array.shape for name, array in given.items()},
        peaks=peaks,
        seconds=seconds,
        latency={"p50": p50, "p90": p90, "rounds": done.seconds.size},
        works=_ordered(scaled),
        prospects=prospects(scaled, seconds, peaks),
        notes=(*notes, *_notes(scaled, unknown, peaks)),
    )


def _samples(batch: Batch) -> int:
    shape = next(iter(batch.values())).shape
    return int(shape[0]) if shape else 1


def _scaled(works: list[Work], seconds: float) -> tuple[list[Work], list[str]]:
    """Let operators take no longer than the whole: the profiler itself takes time.

    It takes about as much for each operator; nothing loses more than half of its time to that,
    and what is still too much is taken from all in proportion.
    """
    taken = sum(work.seconds or 0.0 for work in works)
    if taken <= seconds:
        return works, []
    each = (taken - seconds) / sum(work.count for work in works if work.seconds)
    less = [max((w.seconds or 0.0) - each * w.count, (w.seconds or 0.0) / 2) for w in works]
    factor = seconds / sum(less)
    note = (
        f"with the profiler on, the operators take {taken / seconds:.2f} times what the whole run "
        "takes without; the difference is taken off them, as much from each as far as that goes"
    )
    return [
        replace(work, seconds=None if work.seconds is None else own * factor)
        for work, own in zip(works, less, strict=True)
    ], [note]


def _ordered(works: list[Work]) -> tuple[Work, ...]:
    others = sorted((w for w in works if not w.layer), key=lambda w: -(w.seconds or 0.0))
    return (*(work for work in works if work.layer), *others)


def _notes(works: list[Work], unknown: list[str], peaks: Peaks) -> list[str]:
    notes = []
    if unknown:
        shown, count = ", ".join(unknown[:3]), formats.plural(len(unknown), "operator")
        notes.append(f"no shape is known for {count}, counted as nothing: {shown}")
    lost = [work.name for work in works if work.layer and work.seconds is None]
    if lost:
        shown, count = ", ".join(lost[:3]), formats.plural(len(lost), "layer")
        notes.append(f"no time is known for {count}, which the runtime changed: {shown}")
    slow = [w for w in works if w.layer and (reach := w.reach(peaks)) is not None and reach < 10]
    if slow:
        notes.append(
            f"{formats.plural(len(slow), 'layer')} below 10 % of the roof: too small for the "
            "machine; what a larger batch, fewer operators or another kernel gives is not in the "
            "table"
        )
    return notes
