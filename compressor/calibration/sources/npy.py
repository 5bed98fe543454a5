"""Arrays in npy files, as ``numpy.save`` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from compressor.calibration.sources.file_source import IndexedFileSource
from compressor.calibration.sources.headers import Header, native
from compressor.calibration.sources.rows import ReadAt, Rows, StreamRows, read_header
from compressor.types.tensors import Array


class NpySource(IndexedFileSource):
    """One npy file, or a folder of them.

    In a folder an array's name is its file's without ``.npy``. A single file holds one array,
    so it answers to whatever name the only field gives it.
    """

    kind: ClassVar[str] = "npy file or folder of them"

    def headers(self) -> dict[str, Header]:
        """Return the headers of the file, or of all npy files in the folder."""
        return {name: _checked_header(path) for name, path in self._paths().items()}

    @contextmanager
    def open_rows(self, chosen: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Open the files."""
        paths = self._paths()
        with ExitStack() as stack:
            rows: dict[str, Rows] = {}
            for name, stored in chosen.items():
                stream = stack.enter_context(paths[stored].open("rb"))
                rows[name] = StreamRows(stream, read_header(stream))
            yield rows

    def open_at(self, chosen: Mapping[str, str]) -> dict[str, ReadAt]:
        """Map the files into memory."""
        paths = self._paths()
        return {name: mapped_rows(paths[stored]) for name, stored in chosen.items()}

    def files(self) -> list[tuple[str, Path]]:
        """Return the file, or those of the folder that the fields name."""
        paths = self._paths()
        wanted = set(self.fields.values()) & set(paths) or set(paths)
        return [(name if self.path.is_dir() else "", paths[name]) for name in sorted(wanted)]

    def _paths(self) -> dict[str, Path]:
        if self.path.is_dir():
            return {path.stem: path for path in sorted(self.path.glob("*.npy"))}
        only = next(iter(self.fields.values())) if len(self.fields) == 1 else self.path.stem
        return {only: self.path}


def mapped_rows(path: Path) -> ReadAt:
    """Return what reads rows of an npy file, of which only these come into memory.

    Raises:
        OSError: there is no such file.
        ValueError: it is none, or holds Python objects.
    """
    array = np.load(path, mmap_mode="r")

    def read_at(rows: NDArray[np.int64]) -> Array:
        return np.asarray(array[rows], native(array.dtype), order="C")

    return read_at


def _checked_header(path: Path) -> Header:
    with path.open("rb") as stream:
        header = read_header(stream)
        have = path.stat().st_size - stream.tell()
    if have != header.nbytes and not header.dtype.hasobject:
        raise ValueError(f"{path.name} has {have} bytes of data, not {header.nbytes}")
    return header
