"""The roofline of a model: open it, time its operators, and hold them against the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import InputError, SpecError
from compressor.files import scratch
from compressor.graph.module_names import name_by_modules
from compressor.graph.plain import with_shapes
from compressor.graph.values import all_nodes, tensor_spec
from compressor.lab.doctor import usable_cores
from compressor.lab.roofline.measuring import (
    Peaks,
    measure_peaks,
    nodes_of_kernels,
    time_kernels,
    undisturbed,
)
from compressor.lab.roofline.work import (
    Prospect,
    Work,
    prospects,
    timed,
    total_traffic,
    work_of_nodes,
)
from compressor.lab.verify.manifests import MANIFEST, check_unchanged, unchanged_run
from compressor.models.onnx.file import external_files, read_onnx
from compressor.models.onnx.saving import save_graph
from compressor.progress import SILENT, Progress
from compressor.report import formats
from compressor.run.evaluate import made_up_batch
from compressor.run.model import open_model
from compressor.spec.load import load_spec
from compressor.types.carrier import Capability
from compressor.types.tensors import Batch, TensorSpec

_SPECS = (".yaml", ".yml")
_IMAGE_RANK, _FIRST_SPATIAL = 4, 2
_SEED = 0


@dataclass(frozen=True)
class MeasuredModel:
    """A model that can be timed.

    Attributes:
        file: the same as an ONNX file.
    """

    subject: str
    graph: ir.Model
    file: Path
    inputs: tuple[TensorSpec, ...]


@contextmanager
def measured_model(path: Path) -> Iterator[MeasuredModel]:
    """Open an ONNX file, the ONNX file of a run's output folder, or the model of a spec.

    Raises:
        SpecError: there is nothing, or no graph.
        InputError: a file of a run was changed since.
        ModelError: a file is unusable.
    """
    subject = f"path {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if path.suffix in _SPECS:
        with scratch() as folder:
            yield _of_spec(path, folder)
        return
    if path.is_dir() and (path / MANIFEST).is_file():
        unchanged_run(path, f"run {str(path)!r}", SILENT)
        files = sorted(path.glob("*.onnx"))
        if not files:
            raise SpecError(
                subject,
                "holds no ONNX file, and a roofline needs a graph that is run",
                "add the export onnx to the spec, or name the spec for its float model",
            )
        path = files[0]
    if path.suffix != ".onnx":
        raise SpecError(
            subject,
            "has no graph that says how its weights are used",
            "name an ONNX file, a run's output folder, or a spec with model.factory",
        )
    check_unchanged(path.parent, [path], subject)
    check_unchanged(path.parent, external_files(path), subject)
    graph = read_onnx(path)
    inputs = tuple(tensor_spec(v) for v in graph.graph.inputs if not v.is_initializer())
    subject = f"model {str(path)!r}"
    if all(node.name for node in all_nodes(graph.graph)):
        yield MeasuredModel(subject, graph, path, inputs)
        return
    with scratch() as folder:  # what has no name cannot be found in a profile
        common.NameFixPass()(graph)
        yield MeasuredModel(subject, graph, _saved(graph, folder), inputs)


def _saved(graph: ir.Model, folder: Path) -> Path:
    file = folder / "model.onnx"
    save_graph(graph, file)
    return file


def _of_spec(path: Path, folder: Path) -> MeasuredModel:
    spec = load_spec(path)
    opened = open_model(spec)
    if not {Capability.GRAPH, Capability.RUN} <= opened.carrier.offers:
        raise SpecError(
            f"spec {str(path)!r}",
            "names a bare checkpoint, which does not say how its weights are used",
            "set model.factory or model.onnx",
            where=spec.where("model"),
        )
    opened.load()
    graph = opened.carrier.graph()
    subject = f"the model of {str(path)!r}"
    return MeasuredModel(subject, graph, _saved(graph, folder), opened.carrier.inputs)


def inputs_for(model: MeasuredModel, batch: int | None, length: int) -> Batch:
    """Make inputs up; times of the usual operators do not depend on what is in them.

    Args:
        batch: samples; ``None`` for one, or what the model fixes.
        length: of other dynamic axes.

    Raises:
        SpecError: the model takes another number of samples.
    """
    specs = [_fixed(spec, model.inputs, batch or 1, length) for spec in model.inputs]
    if not specs:
        raise InputError(model.subject, "takes no input", "name a model that does")
    fixed = model.inputs[0].shape[0] if model.inputs[0].shape else None
    if batch is not None and isinstance(fixed, int) and fixed != batch:
        raise SpecError("--batch", f"is {batch}, and the model takes {fixed}", "leave it out")
    return made_up_batch(specs, batch or 1, _SEED)


def _fixed(spec: TensorSpec, inputs: Sequence[TensorSpec], batch: int, length: int) -> TensorSpec:
    first = inputs[0].shape[0] if inputs[0].shape else None
    shape = []
    for axis, dimension in enumerate(spec.shape):
        image = len(spec.shape) >= _IMAGE_RANK and axis >= _FIRST_SPATIAL
        if isinstance(dimension, int):
            shape.append(dimension)
        elif (axis == 0 and dimension is None) or (dimension is not None and dimension == first):
            shape.append(batch)
        else:
            shape.append(max(length, 224) if image else length)
    return replace(spec, shape=tuple(shape))


LENGTH = 128


@dataclass(frozen=True)
class Roofline:
    """What a model does, how long it takes, and what the machine allows.

    Attributes:
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
                    "kind": prospect.kind.name,
                    "time_share": prospect.share,
                    "best_speedup": prospect.speedup,
                    "limit": prospect.limit,
                    "assumption": prospect.kind.assumption,
                }
                for prospect in self.prospects
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
    progress: Progress = SILENT,
) -> Roofline:
    """Time a model's operators in ONNX Runtime on the CPU, and the machine's peaks.

    Args:
        path: an ONNX file, a run's output folder, or a spec for its float model.
        batch: samples in a run; ``None`` for one, or what the model fixes.
        threads: that compute; ``None`` for as many as the process has cores.
        length: of dynamic axes other than the batch's.

    Raises:
        CompressorError: the model has no graph, or does not run.
    """
    with measured_model(path) as model:
        return _measured(path, model, inputs_for(model, batch, length), threads, progress)


def _measured(
    path: Path, model: MeasuredModel, batch: Batch, threads: int | None, progress: Progress
) -> Roofline:
    count = threads or usable_cores()
    with progress.stage("time the model and its operators"):
        done = time_kernels(model.file, batch, count, model.subject)
    graph = with_shapes(model.graph, {n: a.shape for n, a in batch.items()})
    members = nodes_of_kernels(graph, done.kernels)
    name_by_modules(graph)  # as in a plan; kernels are known by the names in the file
    works, unknown = work_of_nodes(all_nodes(graph.graph))
    joined = timed(works, done.kernels, members)
    with progress.stage("measure the machine"):
        peaks = measure_peaks(count, total_traffic(work.traffic for work in joined).bytes)
    seconds = undisturbed(done.seconds)
    p50, p90 = (float(p) for p in np.percentile(done.seconds * 1e3, [50, 90]))
    scaled, notes = _scaled(joined, seconds)
    shape = next(iter(batch.values())).shape
    return Roofline(
        path=str(path),
        runtime=done.runtime,
        batch=int(shape[0]) if shape else 1,
        inputs={name: array.shape for name, array in batch.items()},
        peaks=peaks,
        seconds=seconds,
        latency={"p50": p50, "p90": p90, "rounds": done.seconds.size},
        works=_ordered(scaled),
        prospects=prospects(scaled, seconds, peaks),
        notes=(*notes, *_notes(scaled, unknown, peaks)),
    )


def _scaled(works: list[Work], seconds: float) -> tuple[list[Work], list[str]]:
    """Correct for the time of the profiler, so that operators take no longer than the whole run.

    It takes about as long for each operator. No operator loses more than half of its time, and
    what remains is subtracted from all in proportion.
    """
    taken = sum(work.seconds or 0.0 for work in works)
    if taken <= seconds:
        return works, []
    each = (taken - seconds) / sum(work.count for work in works if work.seconds)
    less = [max((w.seconds or 0.0) - each * w.count, (w.seconds or 0.0) / 2) for w in works]
    factor = seconds / sum(less)
    note = (
        f"with the profiler on, the operators take {taken / seconds:.2f} times what the whole run "
        "takes without it; the difference is subtracted from them, evenly where possible"
    )
    return [
        replace(work, seconds=None if work.seconds is None else seconds_ * factor)
        for work, seconds_ in zip(works, less, strict=True)
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
        notes.append(f"no time is known for {count}, because the runtime changed them: {shown}")
    slow = [w for w in works if w.layer and (reach := w.reach(peaks)) is not None and reach < 10]
    if slow:
        notes.append(
            f"{formats.plural(len(slow), 'layer')} below 10 % of the roof: too small for the "
            "machine; the table leaves out what a larger batch, fewer operators or another kernel "
            "would gain"
        )
    return notes
