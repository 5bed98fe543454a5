"""Find out what lies at a path and inspect it: a run's output, an engine, or a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compressor.errors import InputError, ModelError, SpecError
from compressor.files import file_sha256, settle
from compressor.lab.inspect.contents import (
    Contents,
    EngineContents,
    FileState,
    ModelContents,
    RunContents,
    State,
)
from compressor.lab.inspect.forms import (
    EngineManifest,
    Manifest,
    check_form,
    check_report,
    read_mapping,
)
from compressor.models.codec.load import packed_format
from compressor.progress import Progress, Silent
from compressor.types.exporter import PackedFormat

_SPECS = (".yaml", ".yml")
MANIFEST = "manifest.json"
REPORT = "report.json"


def inspect_path(path: Path, progress: Progress | None = None) -> Contents:
    """Describe a checkpoint, an ONNX file, a compressed model, an archive, an engine, or a run.

    Raises:
        SpecError: there is nothing, or nothing of a known kind.
        ModelError: a file is cut or not what its name says.
        InputError: an engine lacks its manifest.
    """
    from compressor.lab.inspect.checkpoint import inspect_checkpoint
    from compressor.lab.inspect.graph import compressed_folder, inspect_compressed, inspect_onnx

    progress = progress or Silent()
    subject = f"path {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    folder = path if path.is_dir() else path.parent
    settle(folder)
    of_run = (path.is_dir() or path.name == REPORT) and (folder / MANIFEST).is_file()
    if of_run or path.name == MANIFEST:
        run = inspect_run(folder, progress)
        if run.report is not None:
            check_report(run.report, f"run {str(folder)!r}")
        return run
    if path.suffix == ".onnx":
        return inspect_onnx(path, progress)
    if is_engine(path):
        return inspect_engine(path)
    if path.suffix in _SPECS:
        raise SpecError(subject, "is a spec", f"compress plan {path} says what is in it")
    packed = packed_format(path)
    if packed is not None:
        return _inspect_packed(path, packed, progress)
    compressed = compressed_folder(path)
    if compressed is not None:
        return inspect_compressed(compressed, progress)
    return inspect_checkpoint(path, progress)


def _inspect_packed(path: Path, packed: PackedFormat, progress: Progress) -> ModelContents:
    """Describe the model in an archive; all of it is decoded and checked on the way.

    Raises:
        ModelError: the archive is cut or damaged.
    """
    from compressor.lab.inspect.graph import inspect_compressed

    sizes = packed.stored_bytes(path)
    with packed.unpacked(path) as folder:
        contents = inspect_compressed(folder, progress)
    rows = tuple(replace(row, bytes=sizes.get(row.name, row.bytes)) for row in contents.tensors)
    files = {path.name: path.stat().st_size}
    return replace(contents, kind="archive", path=str(path), files=files, tensors=rows)


def inspect_run(folder: Path, progress: Progress) -> RunContents:
    """Compare a run's files with its manifest, and read its report, which is not checked.

    Raises:
        ModelError: the manifest is not one.
    """
    manifest = read_mapping(folder / MANIFEST)
    subject = f"manifest {str(folder / MANIFEST)!r}"
    check_form(Manifest, manifest, subject, "is not that of a run")
    expected = {entry["name"]: entry["sha256"] for entry in manifest["outputs"]}
    files = []
    with progress.stage("compare files", len(expected)) as advance:
        for file, digest in expected.items():
            files.append(_state(folder, file, digest))
            advance(len(files))
    whole = any(file.name == REPORT and file.state == "unchanged" for file in files)
    return RunContents(
        path=str(folder),
        name=manifest["name"],
        seed=manifest["seed"],
        versions=manifest["versions"],
        files=tuple(files),
        report=read_mapping(folder / REPORT) if whole else None,
    )


def _state(folder: Path, name: str, digest: str) -> FileState:
    path = folder / name
    if not path.is_file():
        return FileState(name, "missing", None)
    state: State = "unchanged" if file_sha256(path) == digest else "changed"
    return FileState(name, state, path.stat().st_size)


ENGINES = (".engine", ".plan", ".trt")
MANIFESTS = tuple(f"{suffix}.json" for suffix in ENGINES)


def is_engine(path: Path) -> bool:
    """Return whether a path is named like an engine or the manifest of one."""
    return path.name.endswith((*ENGINES, *MANIFESTS))


def inspect_engine(path: Path) -> EngineContents:
    """Describe an engine.

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
    content = read_mapping(manifest)
    check_form(
        EngineManifest, content, f"manifest {str(manifest)!r}", "is not that of a TensorRT engine"
    )
    return EngineContents(
        path=str(path),
        files={file.name: file.stat().st_size for file in (path, manifest)},
        manifest=content,
        intact=file_sha256(path) == content["engine"]["sha256"],
    )
