"""Artifacts in the store and the output folder, their per-sample results, and the manifest."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.errors import ArtifactError, ModelError, SpecError, located
from compressor.files import (
    copy,
    file_sha256,
    json_sha256,
    scratch,
)
from compressor.graph.costs import model_bytes
from compressor.models.checkpoint.folder import companions
from compressor.run.evaluate import CachingRunner, Evaluation
from compressor.run.store import compute_versions, result_key
from compressor.run.workspace import Workspace, metric_code
from compressor.spec.load import Spec
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.tensors import Array

_FILES = "files"


@dataclass(frozen=True)
class StoredArtifact:
    """An exported artifact in the store of its run.

    Attributes:
        source: key of the model that was exported.
        exporter: the exporter that wrote it and can open it.
        path: the main file, in the store.
        files: name, bytes and sha256 of every file, the main one first.
        tensors: checksums of the tensors in each file, unless a file of the artifact has them.
        predicted: the bytes that were predicted: by the plan, or where that was an estimate, once
            the passes had been done.
    """

    source: str
    exporter: Exporter
    path: Path
    files: Sequence[Mapping[str, Any]]
    tensors: Mapping[str, Mapping[str, str]]
    predicted: int

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(int(f["bytes"]) for f in self.files)

    @property
    def digest(self) -> str:
        """Hash of all files."""
        return json_sha256([[f["name"], f["sha256"]] for f in self.files])

    @property
    def key(self) -> str:
        """Key of the artifact as its runtime executes it."""
        exporter = self.exporter
        return result_key(
            "artifact", self.digest, format=exporter.format, run_by=dict(exporter.run_by)
        )


def write_artifacts(workspace: Workspace, key: str, carrier: Carrier) -> list[StoredArtifact]:
    """Export the model with this key, unless an earlier run did.

    Raises:
        CompressorError: an exporter fails; nothing of its artifact is left behind.
    """
    spec = workspace.plan.spec
    decides = {k: v for k, v in spec.resolved.items() if k not in ("output", "limits", "exports")}
    context = ExportContext(spec.name, json_sha256(decides), workspace.ranks, folder=spec.folder)
    beside = {} if carrier.folder is None else companions(carrier.folder)  # tokenizers, templates
    copied = {place: file_sha256(path) for place, path in beside.items()}
    made = []
    for index, (exporter, planned) in enumerate(
        zip(spec.exports, workspace.plan.exports, strict=True)
    ):
        artifact_key = result_key(
            "export",
            key,
            format=exporter.format,
            version=exporter.version,
            options=exporter.model_dump(mode="json"),
            name=context.name,
            spec=context.spec_digest,
            tools=dict(exporter.tools),
            beside=copied,
        )
        workspace.begin_step()
        with located(spec.where("exports", index)):
            folder, stored = _written(workspace, artifact_key, exporter, carrier, context)
            again = planned.estimate and not exporter.estimated  # now that the sizes are known
            predicted = exporter.predict(carrier) if again else planned.bytes
        files, tensors = stored["files"], stored.get("tensors", {})
        path = (
            folder / str(files[0]["name"]).partition("/")[0]
        )  # or the folder that is one artifact
        made.append(StoredArtifact(key, exporter, path, files, tensors, predicted))
    return made


def _written(
    workspace: Workspace, key: str, exporter: Exporter, carrier: Carrier, context: ExportContext
) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder in the store that holds the artifact's files, and what is noted of them."""
    folder = workspace.store.folder(key) / _FILES
    stored_result = workspace.store.read(key)
    if all(workspace.ranks.gathered(stored_result is not None)) and stored_result is not None:
        return folder, stored_result
    workspace.load()
    if workspace.first:
        label = f"export {exporter.format}"
        total = model_bytes(workspace.plan.model.carrier) if exporter.resumes else None
        hashes: dict[str, str] = {}
        write = workspace.store.write(key, resumable=exporter.resumes, hashes=hashes)
        with workspace.progress.stage(label, total) as advance, write as (staged, result):
            (staged / _FILES).mkdir(exist_ok=True)
            streamed: dict[str, str] = {}
            tensors: dict[str, Mapping[str, str]] = {}
            result["tensors"] = tensors
            reporting = replace(
                context,
                advance=advance,
                hashed=streamed.__setitem__,
                summed=tensors.__setitem__,
            )
            paths = exporter.write(carrier, staged / _FILES, reporting)
            result["files"] = files = [_described(p, staged / _FILES, streamed) for p in paths]
            hashes |= {f"{_FILES}/{file['name']}": file["sha256"] for file in files}
    elif exporter.resumes:
        partial = workspace.store.partial(key) / _FILES
        partial.mkdir(parents=True, exist_ok=True)
        exporter.write(carrier, partial, context)
    workspace.ranks.wait()
    stored = workspace.store.read(key)
    assert stored is not None
    return folder, stored


def _described(path: Path, folder: Path, hashes: Mapping[str, str]) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    return {
        "name": name,
        "bytes": path.stat().st_size,
        "sha256": hashes.get(name) or file_sha256(path),
    }


def float_file(workspace: Workspace, exporter: Exporter) -> tuple[int, str]:
    """Return the bytes of the float model's file that an artifact is compared with, and its name.

    That is the user's own file where it is of the same format, or where the model is not run but
    streamed. Otherwise the float model is written by the same exporter. Its tensors alone count
    if that cannot write it.
    """
    model = workspace.plan.model
    own = model.own_bytes(exporter.format)
    if own is not None:
        return own, model.files[0].name
    options = exporter.model_dump(mode="json")
    key = result_key(
        "float-file",
        workspace.source_key,
        format=exporter.format,
        version=exporter.version,
        options=options,
        tools=dict(exporter.tools),
    )
    stored: dict[str, Any] | None = workspace.store.read(key)
    if stored is None:
        spec, carrier = workspace.plan.spec, workspace.baseline
        with workspace.progress.stage(f"write the float model as {exporter.format}"):
            try:
                with scratch() as folder:
                    exporter.check(carrier)
                    context = ExportContext(spec.name, "", folder=spec.folder)
                    paths = exporter.write(carrier, folder, context)
                    size, name = sum(p.stat().st_size for p in paths), paths[0].name
            # Options may be such that only a compressed model can be written with them.
            except (SpecError, ModelError, ArtifactError) as error:
                size, name = workspace.plan.bytes, f"its tensors alone ({error.problem})"
        stored = {"bytes": size, "name": name}
        workspace.store.keep(key, stored)
    return int(stored["bytes"]), str(stored["name"])


def stage_artifacts(artifacts: Sequence[StoredArtifact], output: Path, staged: Path) -> None:
    """Put verified artifacts into a folder, but for files that the output has already.

    Raises:
        InputError: the disk is full.
        SpecError: the folder cannot be written.
    """
    for artifact in artifacts:
        for file in artifact.files:
            if _intact(output, file):
                continue
            name = str(file["name"])
            alone = artifact.exporter.one_name and name != artifact.path.name
            copy(artifact.path.parent / name, staged / name, link=not alone)


def _intact(folder: Path, file: Mapping[str, Any]) -> bool:
    path = folder / file["name"]
    return path.is_file() and file_sha256(path) == str(file["sha256"])


def manifest(
    workspace: Workspace, artifacts: Sequence[StoredArtifact], reports: Sequence[Path]
) -> dict[str, Any]:
    """Return a description of a run by which it can be repeated and its files recognised.

    Args:
        reports: the other files that the run leaves, wherever they are now.
    """
    plan = workspace.plan
    spec = plan.spec
    named = _named if workspace.options.identify_by_headers else _file
    inputs = [named(f, spec.folder) for f in plan.model.files]
    path = spec.document.path.resolve()
    if path.is_file():  # a command may have made it up
        inputs.insert(0, _file(path, spec.folder))
    data = [{"role": role, "sha256": entry.digest} for role, entry in plan.data.items()]
    outputs = [
        {**f, "tensors": a.tensors[f["name"]]} if f["name"] in a.tensors else dict(f)
        for a in artifacts
        for f in a.files
    ]
    outputs += [{**_file(p, p.parent), "bytes": p.stat().st_size} for p in reports]
    return {
        "schema": 1,
        "name": spec.name,
        "seed": spec.seed,
        "versions": {"python": platform.python_version(), **compute_versions()},
        "platform": f"{sys.platform} {platform.machine()}",
        # Sums of floats depend on both.
        "processor": {
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "model": workspace.source_key,
        "inputs": inputs,
        "data": data,
        "outputs": outputs,
        "spec": dict(spec.resolved),
        **({"objects": objects} if (objects := given_objects(spec)) else {}),
        "spec_file": os.path.relpath(path, spec.output.resolve()) if path.is_file() else None,
    }


def given_objects(spec: Spec) -> list[dict[str, str]]:
    """Return what no file can repeat: the objects that a Python program gave."""
    kinds = {reference: type(value) for reference, value in spec.objects.items()}
    return [
        {"key": reference.partition(":")[2], "type": f"{kind.__module__}.{kind.__qualname__}"}
        for reference, kind in kinds.items()
    ]


def _file(path: Path, start: Path) -> dict[str, Any]:
    return {"name": _name(path, start), "sha256": file_sha256(path)}


def _named(path: Path, start: Path) -> dict[str, Any]:
    reason = "not read once more for it; 'model' is a hash of sizes, times and headers"
    size = path.stat().st_size
    return {"name": _name(path, start), "bytes": size, "sha256": None, "sha256_reason": reason}


def _name(path: Path, start: Path) -> str:
    """Return a file's path relative to ``start``, or only its name if it is elsewhere."""
    inside = path.is_relative_to(start)
    return path.relative_to(start).as_posix() if inside else path.name


def artifact_evaluation(workspace: Workspace, artifact: StoredArtifact) -> Evaluation | None:
    """Return the results of an artifact that can be run; ``None`` without evaluation data."""
    return workspace.evaluated(
        artifact.key, lambda: artifact_runner(workspace, artifact), artifact.path.name
    )


def artifact_runner(workspace: Workspace, artifact: StoredArtifact) -> CachingRunner:
    """Return an artifact, ready to run."""
    return workspace.runner(artifact.key, lambda: artifact.exporter.open(artifact.path))


SAMPLES = "samples.npz"
"""One array for the float model and one for each artifact: the metric's value for each sample."""

FLOAT = "float"
"""The float model's name in that file."""

_NO_EFFECT = ("output", "limits")


def identity(workspace: Workspace) -> dict[str, Any]:
    """Return what two runs must share so that their results can be paired, for ``report.json``."""
    plan = workspace.plan
    data, metric = workspace.evaluation, plan.metric
    decides = {k: v for k, v in plan.spec.resolved.items() if k not in _NO_EFFECT}
    return {
        "model": workspace.source_key,
        "data": None if data is None else data.digest,
        "metric_code": None if metric is None else metric_code(metric),
        "spec": json_sha256(decides),
    }


def per_sample_entry(workspace: Workspace) -> dict[str, Any] | None:
    """Return the report's entry on the file of per-sample results and how they make the metric."""
    metric = workspace.plan.metric
    if metric is None or workspace.baseline_evaluation is None:
        return None
    factor = 100.0 if metric.unit == "%" else 1.0
    return {"file": SAMPLES, "factor": factor, "exponential": metric.exponential}


def write_samples(
    workspace: Workspace,
    artifacts: Sequence[StoredArtifact],
    entries: Sequence[Mapping[str, Any]],
    folder: Path,
) -> list[Path]:
    """Write the results of the float model and of every artifact that has a metric.

    Args:
        entries: their entries in the report, in the same order.

    Returns:
        The file, or nothing if no metric was measured.
    """
    baseline = workspace.baseline_evaluation
    if baseline is None:
        return []
    arrays = {FLOAT: _packed(baseline.per_sample)}
    for artifact, entry in zip(artifacts, entries, strict=True):
        evaluation = artifact_evaluation(workspace, artifact) if entry["metric"] else None
        if evaluation is not None:
            arrays[artifact.path.name] = _packed(evaluation.per_sample)
    # An uncompressed archive holds no time of day and no version of a compressor.
    np.savez(folder / SAMPLES, **arrays)  # type: ignore[arg-type]  # names are no options
    return [folder / SAMPLES]


def _packed(values: Array) -> Array:
    """Return right and wrong as booleans, other values unchanged."""
    return values.astype(np.bool_) if np.isin(values, (0.0, 1.0)).all() else values
