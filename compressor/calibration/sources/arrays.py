"""Arrays in npy, npz and safetensors files."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from compressor.calibration.sources.file_source import (
    FileSource,
    Header,
    IndexedFileSource,
    ReadAt,
    Rows,
    StreamRows,
    check_numeric,
    choose,
    native,
    read_header,
)
from compressor.types.tensors import Array, Feed


class NpySource(IndexedFileSource):
    """One npy file, or a folder of them.

    In a folder an array's name is its file's without ``.npy``. A single file holds one array,
    so it answers to whatever name the only field gives it.
    """

    kind: ClassVar[str] = "npy file or folder of them"

    def headers(self) -> dict[str, Header]:
        """Return the headers of the file, or of all npy files in the folder."""
        headers = {}
        for name, path in self._paths().items():
            with path.open("rb") as stream:
                headers[name] = _checked_header(stream, path.name, path.stat().st_size)
        return headers

    @contextmanager
    def open_rows(self, arrays: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Open the files."""
        paths = self._paths()
        with ExitStack() as stack:
            rows: dict[str, Rows] = {}
            for name, stored in arrays.items():
                stream = stack.enter_context(paths[stored].open("rb"))
                rows[name] = StreamRows(stream, read_header(stream))
            yield rows

    def open_at(self, arrays: Mapping[str, str]) -> dict[str, ReadAt]:
        """Map the files into memory."""
        paths = self._paths()
        return {name: mapped_rows(paths[stored]) for name, stored in arrays.items()}

    def files(self) -> list[tuple[str, Path]]:
        """Return the file, or those of the folder that the fields name."""
        paths = self._paths()
        names = set(self.fields.values()) & set(paths) or set(paths)
        return [(name if self.path.is_dir() else "", paths[name]) for name in sorted(names)]

    def _paths(self) -> dict[str, Path]:
        if self.path.is_dir():
            return {path.stem: path for path in sorted(self.path.glob("*.npy"))}
        only = next(iter(self.fields.values())) if len(self.fields) == 1 else self.path.stem
        return {only: self.path}


def mapped_rows(path: Path) -> ReadAt:
    """Return a function that reads rows of an npy file; only these come into memory.

    Raises:
        OSError: there is no such file.
        ValueError: it is none, or holds Python objects.
    """
    array = np.load(path, mmap_mode="r")

    def read_at(rows: NDArray[np.int64]) -> Array:
        return np.asarray(array[rows], native(array.dtype), order="C")

    return read_at


def _checked_header(stream: IO[bytes], name: str, size: int) -> Header:
    """Read the header of an npy file of ``size`` bytes, and check that its data fit."""
    header = read_header(stream)
    have = size - stream.tell()
    if have != header.nbytes and not header.dtype.hasobject:
        raise ValueError(f"{name} has {have} bytes of data, not {header.nbytes}")
    return header


_SUFFIX = ".npy"
_AT_ONCE = 200_000_000  # bytes, beyond ten times a file, that it may take in memory


class NpzSource(FileSource):
    """Named arrays of an npz archive.

    Members are decompressed as far as a batch needs them. Object arrays, which are pickles,
    are refused.
    """

    kind: ClassVar[str] = "npz archive"

    def headers(self) -> dict[str, Header]:
        """Return the headers of all members that are arrays."""
        headers = {}
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(_SUFFIX):
                    name = member.filename.removesuffix(_SUFFIX)
                    with archive.open(member) as stream:
                        header = _checked_header(stream, member.filename, member.file_size)
                    # One sample, or the whole array where its samples are scattered.
                    self._check_memory(
                        header.nbytes // (1 if header.fortran else max((1, *header.shape[:1])))
                    )
                    headers[name] = header
        return headers

    def _check_memory(self, takes: int) -> None:
        """Raise ``ValueError`` where so many bytes at once are too many for so small a file."""
        if takes > _AT_ONCE + 10 * self.path.stat().st_size:
            raise ValueError(f"it would take {takes >> 20:,} MiB of memory at once")

    def chosen(self) -> dict[str, Header]:
        """Return the headers of the chosen arrays, of any rank, by their names in the model.

        Raises:
            DataError: the file is unusable, or lacks an array.
        """
        headers = self.readable()
        arrays = choose(self.subject, self.fields, headers)
        for stored in arrays.values():
            check_numeric(self.subject, stored, headers[stored])
        return {name: headers[stored] for name, stored in arrays.items()}

    def feed(self) -> Feed:
        """Return the chosen arrays, whole; raises as :meth:`chosen` does."""
        chosen = self.chosen()
        with self._guard(), np.load(self.path, allow_pickle=False) as archive:
            self._check_memory(sum(header.nbytes for header in chosen.values()))
            whole = {name: archive[self.fields.get(name, name)] for name in chosen}
        return Feed((name, array.astype(native(array.dtype))) for name, array in whole.items())

    @contextmanager
    def open_rows(self, arrays: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Open the members."""
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            rows: dict[str, Rows] = {}
            for name, stored in arrays.items():
                stream = stack.enter_context(archive.open(stored + _SUFFIX))
                rows[name] = StreamRows(stream, read_header(stream))
            yield rows


_DTYPES: dict[str, Any] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class SafetensorsSource(IndexedFileSource):
    """Named arrays of a safetensors file, memory-mapped.

    Formats that numpy itself does not have (BF16, F8 and smaller) are refused.
    """

    kind: ClassVar[str] = "safetensors file"

    def headers(self) -> dict[str, Header]:
        """Return the headers of all arrays."""
        with safe_open(self.path, framework="numpy") as file:
            return {name: _header(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118

    def open_at(self, arrays: Mapping[str, str]) -> dict[str, ReadAt]:
        """Map the file."""
        file: Any = safe_open(self.path, framework="numpy")
        return {name: _rows_at(file.get_slice(stored)) for name, stored in arrays.items()}


def _rows_at(tensor: Any) -> ReadAt:
    def read_at(rows: NDArray[np.int64]) -> Array:
        # The library knows slices only.
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return np.array(tensor[int(rows[0]) : int(rows[-1]) + 1])
        parts = [tensor[row : row + 1] for row in rows.tolist()]
        return np.concatenate([tensor[0:0], *parts])

    return read_at


def _header(tensor: Any) -> Header:
    dtype = np.dtype(_DTYPES.get(tensor.get_dtype(), "V1"))
    return Header(tuple(tensor.get_shape()), dtype)
