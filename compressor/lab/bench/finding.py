"""Find the artifacts that a path holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compressor import catalog
from compressor.errors import ModelError, SpecError
from compressor.lab.verify.files import settled_folder
from compressor.lab.verify.forms import read_mapping
from compressor.lab.verify.manifests import MANIFEST, REPORT, check_unchanged, unchanged_run
from compressor.models.onnx.file import external_files, target_of
from compressor.progress import SILENT
from compressor.run.artifact_file import ONNX, ArtifactFile

_FOLDERS = ("model.json", "config.json")  # what lies in a folder that is one artifact
_FORMATS: Mapping[str, str] = {
    ".onnx": ONNX,
    ".engine": "tensorrt",
    ".plan": "tensorrt",
    ".xml": "openvino",
    ".tflite": "litert",
    ".pte": "executorch",
    ".safetensors": "safetensors",
    ".json": "safetensors",
}


def find_artifacts(paths: Sequence[Path]) -> list[ArtifactFile]:
    """Return the artifacts at all paths, each with a name of its own.

    Raises:
        SpecError: there are none, or a path holds none.
        ModelError: the report or the manifest of a run is damaged, or a file it names is missing.
        InputError: a file of a run was changed since.
    """
    if not paths:
        raise SpecError("compress bench", "got no path", "name artifacts, or a run's output folder")
    artifacts = [artifact for path in paths for artifact in _at(path)]
    seen: Counter[str] = Counter()
    named = []
    for artifact in artifacts:
        seen[artifact.name] += 1
        again = seen[artifact.name]
        named.append(
            replace(artifact, name=f"{artifact.name} ({again})") if again > 1 else artifact
        )
    return named


def _at(path: Path) -> list[ArtifactFile]:
    subject = f"path {str(path)!r}"
    settled_folder(path)
    if path.is_dir() and (path / REPORT).is_file():
        return artifacts_of_run(path)
    if path.is_dir():
        if not any((path / name).is_file() for name in _FOLDERS):
            raise SpecError(
                subject,
                f"is a folder without {REPORT} and without {' or '.join(_FOLDERS)}",
                "name the artifacts in it",
            )
        files = _folder_files(path)
        check_unchanged(path, files, subject)
        return [ArtifactFile(str(path), path, "safetensors", files)]
    formats = catalog.names("exporter")
    kind = _FORMATS.get(path.suffix) or path.suffix.removeprefix(".")
    if kind not in formats or path.name in (REPORT, MANIFEST):
        raise SpecError(
            subject,
            f"is not recognized as an artifact by its name; formats are {', '.join(formats)}",
            "name a file that compress run exported, or the folder of the run",
        )
    check_unchanged(path.parent, [path], subject)
    target = target_of(path) if kind == ONNX else None
    options = {} if target is None else {"target": target}
    files = _files(path, kind)
    check_unchanged(path.parent, set(files) - {path}, subject)
    return [ArtifactFile(str(path), path, kind, files, options)]


def artifacts_of_run(folder: Path, only: str | None = None) -> list[ArtifactFile]:
    """Return the artifacts that a run wrote.

    Args:
        only: the main file of the one that is wanted; files of others may be missing.

    Raises:
        ModelError: the report or the manifest is damaged, or a file is missing.
        InputError: a file was changed since.
    """
    subject = f"run {str(folder)!r}"
    manifest, _ = unchanged_run(folder, subject, SILENT)
    report = read_mapping(folder / REPORT)
    try:
        options = {entry["format"]: entry for entry in manifest.content["spec"]["exports"]}
        entries = [
            (str(a["path"]), str(a["format"]), [folder / f["name"] for f in a["files"]])
            for a in report["artifacts"]
        ]
    except (KeyError, TypeError) as error:
        raise ModelError(
            subject,
            "has a report or manifest this version cannot read",
            "run its spec again",
        ) from error
    artifacts = []
    for name, kind, files in entries:
        if only not in (None, name):
            continue
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(subject, f"lacks {missing[0]!r}", "run its spec again")
        written_with = {k: v for k, v in options.get(kind, {}).items() if k != "format"}
        artifacts.append(
            ArtifactFile(str(folder / name), folder / name, kind, tuple(files), written_with)
        )
    return artifacts


def _files(path: Path, kind: str) -> tuple[Path, ...]:
    if kind == ONNX:
        return (path, *external_files(path))
    if kind == "openvino":
        weights = path.with_suffix(".bin")
        return (path, *([weights] if weights.is_file() else []))
    return _folder_files(path.parent) if kind == "safetensors" else (path,)


def _folder_files(folder: Path) -> tuple[Path, ...]:
    described = [folder / name for name in _FOLDERS if (folder / name).is_file()]
    return (*described, *sorted(folder.glob("*.safetensors")))
