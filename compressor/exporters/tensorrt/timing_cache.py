"""The file that keeps what TensorRT measured, so that later builds measure less."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import SpecError
from compressor.files import publish, staging


def read_cache(folder: Path, name: str | None) -> bytes | None:
    """Return what earlier builds measured; nothing where there was none.

    Args:
        folder: the spec's.
        name: the file, relative to it; ``None`` where no cache is wanted.

    Raises:
        SpecError: it is no file.
    """
    if name is None:
        return None
    path = folder / name
    if path.is_dir():
        raise SpecError(f"timing-cache {name!r}", "is a folder", "name a file")
    return path.read_bytes() if path.is_file() else b""


def write_cache(folder: Path, name: str | None, content: bytes | None) -> None:
    """Write what is known now, in one step."""
    if name is None or content is None:
        return
    path = folder / name
    with staging(path.parent) as staged:
        (staged / path.name).write_bytes(content)
        publish(staged / path.name, path)
