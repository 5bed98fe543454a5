"""What runs and exporters noted of the files that they wrote."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import InputError, ModelError
from compressor.files import strict_json
from compressor.lab.verify.files import FileState, checked_name, compare
from compressor.lab.verify.forms import EDITED, EngineManifest, Manifest, check_form
from compressor.progress import SILENT, Progress
from compressor.types.proofs import SEAL, ExpectedFile, is_sealed

MANIFEST = "manifest.json"
REPORT = "report.json"

ENGINES = (".engine", ".plan", ".trt")
ENGINE_MANIFESTS = tuple(f"{suffix}.json" for suffix in ENGINES)


def is_engine(path: Path) -> bool:
    """Return whether a path is named like an engine or the manifest of one."""
    return path.name.endswith((*ENGINES, *ENGINE_MANIFESTS))


@dataclass(frozen=True)
class RunManifest:
    """A run's ``manifest.json``.

    Attributes:
        content: all of it.
        files: what must be true of the other files.
    """

    name: str
    seed: int
    versions: Mapping[str, str]
    content: Mapping[str, Any]
    files: tuple[ExpectedFile, ...]


def read_manifest(folder: Path) -> RunManifest:
    """Read the manifest of a run.

    Raises:
        ModelError: it is not one, was changed, or names files outside its folder.
    """
    path = folder / MANIFEST
    subject, problem = f"manifest {str(path)!r}", "is not that of a run"
    content = _sealed(path, subject, problem)
    check_form(Manifest, content, subject, problem)
    files = []
    for entry in content["outputs"]:
        name = checked_name(entry["name"], subject)
        files.append(ExpectedFile(name, entry["sha256"], entry.get("tensors", {})))
    return RunManifest(content["name"], content["seed"], content["versions"], content, tuple(files))


def _sealed(path: Path, subject: str, problem: str) -> dict[str, Any]:
    """Read a document and check its seal.

    Raises:
        ModelError: it cannot be read, has no seal, or was changed.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ModelError(subject, problem, "check its permissions") from error
    content = strict_json(text, subject, "cannot be read", EDITED)
    if not isinstance(content, dict) or SEAL not in content:
        raise ModelError(subject, problem, EDITED)
    if not is_sealed(text):
        raise ModelError(subject, "was changed: its seal does not match", EDITED)
    return content


def engine_files(path: Path) -> tuple[Path, Path]:
    """Return an engine and its manifest, from the path of either.

    Raises:
        InputError: there is no manifest.
        ModelError: there is no engine.
    """
    if path.name.endswith(ENGINE_MANIFESTS):
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
    return path, manifest


def read_engine_manifest(path: Path) -> dict[str, Any]:
    """Read what an exporter wrote beside an engine.

    Raises:
        ModelError: it is not that of an engine, or was changed.
    """
    subject, problem = f"manifest {str(path)!r}", "is not that of a TensorRT engine"
    content = _sealed(path, subject, problem)
    check_form(EngineManifest, content, subject, problem)
    return content


def check_unchanged(folder: Path, files: Iterable[Path], subject: str) -> None:
    """Refuse files of a folder that the run whose manifest is there wrote otherwise.

    Args:
        files: those that no run wrote are left alone.
        subject: what they are, for the message.

    Raises:
        InputError: one was changed.
        ModelError: the manifest was changed.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file() or f'"{SEAL}"'.encode() not in manifest.read_bytes():
        return  # another program's
    names = {file.name for file in files}
    expected = [file for file in read_manifest(folder).files if file.name in names]
    _refuse(_changed(compare(folder, expected, SILENT)), subject)


def _changed(states: Iterable[FileState]) -> list[str]:
    return [file.name for file in states if file.state == "changed"]


def _refuse(changed: Sequence[str], subject: str) -> None:
    if changed:
        raise InputError(
            subject,
            f"{', '.join(changed)} does not match {MANIFEST}: it was edited or replaced after "
            "the run",
            "compress verify shows what is damaged; run the spec again, finished passes are reused",
        )


def unchanged_run(
    folder: Path, subject: str, progress: Progress, only: Collection[str] | None = None
) -> tuple[RunManifest, tuple[FileState, ...]]:
    """Open a run that is about to be judged, and refuse it if a file of it was changed.

    Args:
        subject: the run, for the message.
        only: names of the files that matter; all of them if not given.

    Returns:
        The manifest, and the state of these files; some may be missing.

    Raises:
        InputError: a file was changed, or the report is missing.
        ModelError: the manifest is not that of a run, or was changed.
    """
    manifest = read_manifest(folder)
    files = [file for file in manifest.files if only is None or file.name in only]
    states = compare(folder, files, progress)
    changed = _changed(states)
    if not any(file.name == REPORT and file.state == "unchanged" for file in states):
        changed = changed or [REPORT]
    _refuse(changed, subject)
    return manifest, states
