"""The most memory that a model takes while it is opened and run, in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from compressor.errors import ArtifactError
from compressor.files import scratch
from compressor.run.artifact_file import ONNX, Machinery
from compressor.run.artifact_file import Artifact as Opened
from compressor.run.artifacts import Artifact
from compressor.run.cold_rounds import cold_starts
from compressor.run.store import result_key
from compressor.run.workspace import Workspace, machine

_NOT_ASKED = "not measured: compress run --memory does that, in a process for each model"
_UNTOLD = "the system does not tell a process's peak"
_SECONDS = 10.0  # after which no further start begins, once there were three


def artifact_memory(workspace: Workspace, artifact: Artifact, reason: str = "") -> dict[str, Any]:
    """Return an artifact's entries about memory in ``report.json``.

    Args:
        workspace: of the run.
        artifact: what is opened.
        reason: why it cannot be run here, if it cannot.
    """
    if reason or not workspace.memory:
        return _nothing(reason or _NOT_ASKED)
    folder = artifact.path.parent
    options = artifact.exporter.model_dump(mode="json")
    files = tuple(folder / str(file["name"]) for file in artifact.files)
    found = Opened(artifact.path.name, artifact.path, artifact.exporter.format, files, options)
    key = result_key("artifact", artifact.digest, run_by=dict(artifact.exporter.run_by))
    return _measured(workspace, key, found)


def float_memory(workspace: Workspace) -> dict[str, Any]:
    """Return the same of the float model, which is opened as an ONNX file."""
    if not workspace.runs or not workspace.memory:
        return _nothing(_NOT_ASKED if workspace.runs else workspace.cannot_run)
    with scratch("float-") as folder:
        path = folder / "float.onnx"
        ir.save(workspace.plan.model.carrier.graph(), path, external_data="float.onnx.data")
        files = tuple(sorted(folder.iterdir()))
        return _measured(workspace, workspace.source_key, Opened("float", path, ONNX, files))


def _measured(workspace: Workspace, key: str, model: Opened) -> dict[str, Any]:
    """Start a model several times, or take what came of that from the store."""
    own = result_key("memory", key, machine=machine())
    found: dict[str, Any] | None = workspace.store.read(own)
    if found is not None:
        return found
    with workspace.progress.stage(f"memory of {model.name}") as advance:
        try:
            (start,) = cold_starts([model], Machinery(), workspace.sample(1), _SECONDS, advance)
        except ArtifactError as error:  # the run's own process has opened it, and goes on
            return _nothing(f"in a process of its own it {error.problem}")
    entry = _entry(start["memory"])
    with workspace.store.write(own) as (_, stored):
        stored.update(entry)
    return entry


def _entry(memory: Mapping[str, Any] | None) -> dict[str, Any]:
    if memory is None:
        return _nothing(_UNTOLD)
    peak = memory["peak"]
    return {
        "peak_memory_bytes": round(peak["median"]),
        "peak_memory_range": [round(peak["least"]), round(peak["most"])],
        "peak_memory_bytes_reason": None,
    }


def _nothing(reason: str) -> dict[str, Any]:
    return {
        "peak_memory_bytes": None,
        "peak_memory_range": None,
        "peak_memory_bytes_reason": reason,
    }
