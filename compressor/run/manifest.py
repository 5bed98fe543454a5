"""The manifest: hashes of every input and output, versions, seed and the resolved spec."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.files import file_sha256
from compressor.run.workspace import Workspace
from compressor.store import compute_versions


def manifest(
    workspace: Workspace, artifacts: Sequence[Mapping[str, Any]], reports: Sequence[Path]
) -> dict[str, Any]:
    """Describe a run so that it can be repeated and its files be recognised."""
    plan = workspace.plan
    spec = plan.spec
    named = _named if workspace.identify_by_headers else _file
    inputs = [named(f, spec.folder) for f in plan.model.files]
    if spec.document.path.is_file():  # a command may have made it up
        inputs.insert(0, _file(spec.document.path.resolve(), spec.folder))
    data = [{"role": role, "sha256": entry.digest} for role, entry in plan.data.items()]
    outputs = [dict(f) for artifact in artifacts for f in artifact["files"]]
    outputs += [{**_file(p, spec.output), "bytes": p.stat().st_size} for p in reports]
    return {
        "schema": 1,
        "name": spec.name,
        "seed": spec.seed,
        "versions": {"python": platform.python_version(), **compute_versions()},
        "platform": f"{sys.platform} {platform.machine()}",
        "model": workspace.source_key,
        "inputs": inputs,
        "data": data,
        "outputs": outputs,
        "spec": dict(spec.resolved),
    }


def _file(path: Path, start: Path) -> dict[str, Any]:
    return {"name": _name(path, start), "sha256": file_sha256(path)}


def _named(path: Path, start: Path) -> dict[str, Any]:
    reason = "not read once more for it; 'model' is a hash of sizes, times and headers"
    size = path.stat().st_size
    return {"name": _name(path, start), "bytes": size, "sha256": None, "sha256_reason": reason}


def _name(path: Path, start: Path) -> str:
    """Name a file relative to ``start``; one that lies elsewhere by its name alone."""
    inside = path.is_relative_to(start)
    return path.relative_to(start).as_posix() if inside else path.name
