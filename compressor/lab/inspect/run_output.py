"""Inspect what a run leaves: its result, its files, and the manifest of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import InputError, ModelError
from compressor.files import file_sha256
from compressor.lab.inspect.contents import EngineContents, FileState, RunContents, State
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


ENGINES = (".engine", ".plan", ".trt")
MANIFESTS = tuple(f"{suffix}.json" for suffix in ENGINES)
_KIND = "tensorrt-engine"
_KEYS = {"engine": dict, "layers": list, "quantized": list, "profiles": dict, "versions": dict}


def is_engine(path: Path) -> bool:
    """Tell whether a path is an engine or the manifest of one, by its name."""
    return path.name.endswith((*ENGINES, *MANIFESTS))


def inspect_engine(path: Path) -> EngineContents:
    """Describe an engine.

    Args:
        path: the engine, or its manifest.

    Raises:
        InputError: there is no manifest.
        ModelError: the manifest is not one, or there is no engine.
    """
    if path.name.endswith(MANIFESTS):
        path = path.with_suffix("")
    manifest = path.with_name(f"{path.name}.json")
    if not manifest.is_file():
        raise InputError(
            f"path {str(path)!r}",
            "is a TensorRT engine without its manifest, and only a GPU can open it",
            f"put {manifest.name} beside it, or inspect the ONNX file that it was built from",
        )
    if not path.is_file():
        raise ModelError(
            f"manifest {str(manifest)!r}", f"is of {path.name!r}, which is missing", "run again"
        )
    content = _read(manifest)
    return EngineContents(
        path=str(path),
        files={file.name: file.stat().st_size for file in (path, manifest)},
        manifest=content,
        intact=file_sha256(path) == content["engine"].get("sha256"),
    )


def _read(path: Path) -> dict[str, Any]:
    subject = f"manifest {str(path)!r}"
    remedy = "it was edited or damaged; run the spec again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(subject, f"cannot be read ({error})", remedy) from error
    whole = isinstance(content, dict) and content.get("kind") == _KIND
    if not whole or not all(isinstance(content.get(key), kind) for key, kind in _KEYS.items()):
        raise ModelError(subject, "is not that of a TensorRT engine", remedy)
    found: dict[str, Any] = content
    return found
