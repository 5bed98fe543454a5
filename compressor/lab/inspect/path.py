"""Find out what lies at a path and inspect it: a run's output, an engine, or a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compressor.errors import SpecError, argument
from compressor.files import file_sha256
from compressor.lab.inspect.checkpoint import inspect_checkpoint
from compressor.lab.inspect.contents import (
    Contents,
    EngineContents,
    ModelContents,
    RunContents,
)
from compressor.lab.inspect.coreml import inspect_coreml
from compressor.lab.inspect.executorch import inspect_executorch
from compressor.lab.inspect.gguf import inspect_gguf
from compressor.lab.inspect.graph import (
    compressed_folder,
    inspect_compressed,
    inspect_onnx,
    inspect_ort,
)
from compressor.lab.inspect.litert import inspect_litert
from compressor.lab.inspect.openvino import inspect_openvino
from compressor.lab.verify.files import compare, settled_folder
from compressor.lab.verify.forms import check_report, read_mapping
from compressor.lab.verify.manifests import (
    MANIFEST,
    REPORT,
    engine_files,
    is_engine,
    read_engine_manifest,
    read_manifest,
)
from compressor.models.codec.load import packed_format
from compressor.progress import SILENT, Progress
from compressor.types.exporter import PackedFormat

_SPECS = (".yaml", ".yml")
_PACKAGE = ".mlpackage"


def inspect_path(path: Path, progress: Progress = SILENT) -> Contents:
    """Describe a checkpoint, a file of a runtime's format, a compressed model, an archive, an
    engine, or a run.

    Raises:
        SpecError: there is nothing, or nothing of a known kind.
        ModelError: a file is cut or not what its name says.
        InputError: an engine lacks its manifest.
    """
    folder = settled_folder(path)
    of_run = (path.is_dir() or path.name == REPORT) and (folder / MANIFEST).is_file()
    if of_run or path.name == MANIFEST:
        return _inspect_run(folder, progress)
    program = _inspect_program(path, progress)
    if program is not None:
        return program
    if is_engine(path):
        return _inspect_engine(path)
    if path.suffix in _SPECS:
        remedy = f"compress plan {argument(path)} says what is in it"
        raise SpecError(f"path {str(path)!r}", "is a spec", remedy)
    packed = packed_format(path)
    if packed is not None:
        return _inspect_packed(path, packed, progress)
    compressed = compressed_folder(path)
    if compressed is not None:
        return inspect_compressed(compressed, progress)
    return inspect_checkpoint(path, progress)


def _inspect_program(path: Path, progress: Progress) -> ModelContents | None:
    """Describe a file of the format that its name says; ``None`` if that is of none of them."""
    if path.suffix == _PACKAGE and path.is_dir():
        return inspect_coreml(path)
    if path.is_dir() and path.suffix != ".onnx":
        return None
    match path.suffix:
        case ".onnx":
            return inspect_onnx(path, progress)
        case ".ort":
            return inspect_ort(path, progress)
        case ".gguf":
            return inspect_gguf(path, progress)
        case ".tflite":
            return inspect_litert(path)
        case ".pte":
            return inspect_executorch(path)
        case ".xml" | ".bin" if path.with_suffix(".xml").is_file():
            return inspect_openvino(path.with_suffix(".xml"))
    return None


def _inspect_packed(path: Path, packed: PackedFormat, progress: Progress) -> ModelContents:
    """Describe the model in an archive; all of it is decoded and checked on the way.

    Raises:
        ModelError: the archive is cut or damaged.
    """
    sizes = packed.stored_bytes(path)
    with packed.unpacked(path) as folder:
        contents = inspect_compressed(folder, progress)
    rows = tuple(replace(row, bytes=sizes.get(row.name, row.bytes)) for row in contents.tensors)
    files = {path.name: path.stat().st_size}
    return replace(contents, kind="archive", path=str(path), files=files, tensors=rows)


def _inspect_run(folder: Path, progress: Progress) -> RunContents:
    """Compare a run's files with its manifest, and read its report.

    Raises:
        ModelError: manifest or report is not that of a run, or the manifest was changed.
    """
    manifest = read_manifest(folder)
    files = compare(folder, manifest.files, progress)
    report = None
    if any(file.name == REPORT and file.state == "unchanged" for file in files):
        report = read_mapping(folder / REPORT)
        check_report(report, f"run {str(folder)!r}")
    return RunContents(
        path=str(folder),
        name=manifest.name,
        seed=manifest.seed,
        versions=manifest.versions,
        files=files,
        report=report,
    )


def _inspect_engine(path: Path) -> EngineContents:
    """Describe an engine.

    Raises:
        InputError: there is no manifest.
        ModelError: the manifest is not one or was changed, or there is no engine.
    """
    path, manifest = engine_files(path)
    content = read_engine_manifest(manifest)
    return EngineContents(
        path=str(path),
        files={file.name: file.stat().st_size for file in (path, manifest)},
        manifest=content,
        intact=file_sha256(path) == content["engine"]["sha256"],
    )
