"""Inspect an archive: the model inside, with the bytes that its tensors take there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compressor.archives import stored_bytes, unpacked
from compressor.inspection.compressed import inspect_compressed
from compressor.inspection.contents import ModelContents
from compressor.progress import Progress


def inspect_archive(path: Path, progress: Progress) -> ModelContents:
    """Describe the model in an archive; all of it is decoded and checked on the way.

    Raises:
        ModelError: the archive is cut or damaged.
    """
    sizes = stored_bytes(path)
    with unpacked(path) as folder:
        contents = inspect_compressed(folder, progress)
    rows = tuple(replace(row, bytes=sizes.get(row.name, row.bytes)) for row in contents.tensors)
    files = {path.name: path.stat().st_size}
    return replace(contents, kind="archive", path=str(path), files=files, tensors=rows)
