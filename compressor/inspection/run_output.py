"""Inspect the output folder of a run: its result, and whether its files are still the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import ModelError
from compressor.files import file_sha256
from compressor.inspection.contents import FileState, RunContents, State
from compressor.progress import Progress

MANIFEST = "manifest.json"
REPORT = "report.json"
_EDITED = "it was edited or damaged; run the spec again"


def inspect_run(folder: Path, progress: Progress) -> RunContents:
    """Compare a run's files with its manifest, and read its report.

    Raises:
        ModelError: the manifest is not one.
    """
    manifest = read_mapping(folder / MANIFEST)
    subject = f"manifest {str(folder / MANIFEST)!r}"
    try:
        name, seed = str(manifest["name"]), int(manifest["seed"])
        versions = {str(k): str(v) for k, v in manifest["versions"].items()}
        expected = {str(entry["name"]): str(entry["sha256"]) for entry in manifest["outputs"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(subject, "is not that of a run", _EDITED) from error
    files = []
    with progress.stage("compare files", len(expected)) as advance:
        for file, digest in expected.items():
            files.append(_state(folder, file, digest))
            advance(len(files))
    whole = any(file.name == REPORT and file.state == "unchanged" for file in files)
    return RunContents(
        path=str(folder),
        name=name,
        seed=seed,
        versions=versions,
        files=tuple(files),
        report=read_mapping(folder / REPORT) if whole else None,
    )


def _state(folder: Path, name: str, digest: str) -> FileState:
    path = folder / name
    if not path.is_file():
        return FileState(name, "missing", None)
    state: State = "unchanged" if file_sha256(path) == digest else "changed"
    return FileState(name, state, path.stat().st_size)


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that a run left.

    Raises:
        ModelError: it cannot be read, or is no mapping.
    """
    subject = f"file {str(path)!r}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(subject, f"cannot be read ({error})", _EDITED) from error
    if not isinstance(value, dict):
        raise ModelError(subject, "is not a mapping", _EDITED)
    return value
