"""Find out what lies at a path, and inspect it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compressor.errors import SpecError
from compressor.lab.inspect.contents import Contents, ModelContents
from compressor.lab.inspect.graph import inspect_compressed
from compressor.lab.inspect.run_output import MANIFEST, REPORT
from compressor.models.codec.load import packed_format
from compressor.progress import Progress, Silent
from compressor.types.exporter import PackedFormat

_SPECS = (".yaml", ".yml")


def inspect_path(path: Path, progress: Progress | None = None) -> Contents:
    """Describe a checkpoint, an ONNX file, a compressed model, an archive, an engine, or a run.

    Args:
        path: the file or folder.
        progress: shows how far it is.

    Raises:
        SpecError: there is nothing, or nothing of a known kind.
        ModelError: a file is cut or not what its name says.
        InputError: an engine lacks its manifest.
    """
    from compressor.lab.inspect.checkpoint import inspect_checkpoint
    from compressor.lab.inspect.graph import compressed_folder, inspect_compressed, inspect_onnx
    from compressor.lab.inspect.run_output import inspect_engine, inspect_run, is_engine

    progress = progress or Silent()
    subject = f"path {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    folder = path if path.is_dir() else path.parent
    if (path.is_dir() or path.name == REPORT) and (folder / MANIFEST).is_file():
        return inspect_run(folder, progress)
    if path.name == MANIFEST:
        return inspect_run(folder, progress)
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
    sizes = packed.stored_bytes(path)
    with packed.unpacked(path) as folder:
        contents = inspect_compressed(folder, progress)
    rows = tuple(replace(row, bytes=sizes.get(row.name, row.bytes)) for row in contents.tensors)
    files = {path.name: path.stat().st_size}
    return replace(contents, kind="archive", path=str(path), files=files, tensors=rows)
