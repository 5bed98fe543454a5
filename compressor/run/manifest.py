"""The manifest: hashes of every input and output, versions, seed and the resolved spec."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.hashing import file_sha256
from compressor.run.workspace import Workspace
from compressor.store import compute_versions


def manifest(
    workspace: Workspace, artifacts: Sequence[Mapping[str, Any]], reports: Sequence[Path]
) -> dict[str, Any]:
    """Describe a run so that it can be repeated and its files be recognised."""
    plan = workspace.plan
    spec = plan.spec
    inputs = [_file(f, spec.folder) for f in plan.model.files]
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
        "inputs": [_file(spec.document.path.resolve(), spec.folder), *inputs],
        "data": data,
        "outputs": outputs,
        "spec": dict(spec.resolved),
    }


def _file(path: Path, start: Path) -> dict[str, Any]:
    """Name a file relative to ``start``; one that lies elsewhere by its name alone."""
    inside = path.is_relative_to(start)
    name = path.relative_to(start).as_posix() if inside else path.name
    return {"name": name, "sha256": file_sha256(path)}
