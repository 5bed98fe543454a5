"""Sources that read arrays from files: headers, rows, batches."""

from __future__ import annotations

import hashlib
import json
import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError

from compressor.errors import DataError, SpecError, close_names
from compressor.types.data import SourceInfo
from compressor.types.options import Options
from compressor.types.tensors import Array, Batch, TensorSpec


@dataclass(frozen=True)
class Header:
    """An array's description before it is read."""

    shape: tuple[int, ...]  # its axes, samples first
    dtype: np.dtype[Any]  # as stored, in either byte order
    fortran: bool = False  # whether the first axis varies fastest in the file

    @property
    def nbytes(self) -> int:
        """The size of the array's data."""
        size = self.dtype.itemsize
        for axis in self.shape:  # not numpy's product, which overflows
            size *= axis
        return size


def choose(
    subject: str, fields: Mapping[str, str], headers: Mapping[str, Header]
) -> dict[str, str]:
    """Return ``fields`` (model names to stored names), or all arrays under their stored names.

    Raises:
        DataError: an array is missing, or there are none at all.
    """
    if not headers:
        raise DataError(subject, "holds no arrays", "save named arrays, samples first")
    for stored in fields.values():
        if stored not in headers:
            close = close_names(stored, headers, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                subject,
                f"has no array {stored!r}",
                f"{hint}it has {', '.join(map(repr, sorted(headers)))}",
            )
    return dict(fields) or {name: name for name in headers}


def describe(
    subject: str, arrays: Mapping[str, str], headers: Mapping[str, Header], most: int | None
) -> SourceInfo:
    """Return the description of the chosen arrays, of which at most ``most`` samples are used.

    Raises:
        DataError: an array is not numeric, is a scalar or empty, or lengths differ.
    """
    for stored in arrays.values():
        check_numeric(subject, stored, headers[stored])
        if not headers[stored].shape:
            problem = f"array {stored!r} is a single number"
            raise DataError(subject, problem, "save an array, samples first, or set samples: feeds")
        if 0 in headers[stored].shape:
            problem = f"array {stored!r} is empty, with shape {list(headers[stored].shape)}"
            raise DataError(subject, problem, "save at least one sample")
    lengths = {stored: headers[stored].shape[0] for stored in arrays.values()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{stored!r} {length}" for stored, length in lengths.items())
        raise DataError(
            subject,
            f"its arrays have different lengths: {listed}",
            "save as many rows of each, one for each sample",
        )
    available = next(iter(lengths.values()))
    specs = tuple(
        TensorSpec(name, ("batch", *headers[stored].shape[1:]), native(headers[stored].dtype).name)
        for name, stored in arrays.items()
    )
    return SourceInfo(available if most is None else min(most, available), specs)


def check_numeric(subject: str, stored: str, header: Header) -> None:
    """Raise ``DataError`` for an array that holds something else than numbers."""
    if header.dtype.hasobject:
        raise DataError(
            subject,
            f"array {stored!r} holds Python objects, which only pickle can load",
            "save it with a numeric dtype (pickles can run code, so they are never loaded)",
        )
    if header.dtype.kind not in "biuf":
        raise DataError(
            subject,
            f"array {stored!r} has dtype {header.dtype}",
            "save it as bool, integers or floats (bfloat16 as float32)",
        )


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in this machine's byte order."""
    return dtype.newbyteorder("=")


ReadAt: TypeAlias = Callable[[NDArray[np.int64]], Array]
"""Returns the rows with these numbers, in that order, as an array that the caller owns."""
_PART = 1 << 20  # bytes asked for at a time


class Rows(Protocol):
    """The rows of an array, in order."""

    def take(self, count: int) -> Array:
        """Return the next ``count`` rows, as an array that the caller owns."""


class InOrder:
    """Rows in order from a function that returns them by number."""

    def __init__(self, read: ReadAt):
        self._read = read
        self._position = 0

    def take(self, count: int) -> Array:
        """Return the next rows."""
        start, self._position = self._position, self._position + count
        return self._read(np.arange(start, self._position))


class StreamRows:
    """Rows from a stream positioned after an npy header.

    Only the requested rows are in memory, except for an array in Fortran order: its rows are
    scattered, so it is read at once.
    """

    def __init__(self, stream: IO[bytes], header: Header):
        self._stream = stream
        self._header = header
        self._whole: Array | None = None
        self._position = 0

    def take(self, count: int) -> Array:
        """Return the next rows; raises ``EOFError`` where the stream ends before."""
        if not self._header.fortran:
            return self._read((count, *self._header.shape[1:]))
        if self._whole is None:
            self._whole = self._read(self._header.shape[::-1]).T
        start, self._position = self._position, self._position + count
        return self._whole[start : self._position].copy()

    def _read(self, shape: tuple[int, ...]) -> Array:
        array = np.empty(shape, self._header.dtype)
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            part = self._stream.read(min(len(rest), _PART))
            if not part:
                raise EOFError("the data end early")
            rest[: len(part)] = part
            rest = rest[len(part) :]
        return array.astype(native(array.dtype), copy=False)


def read_header(stream: IO[bytes]) -> Header:
    """Read an npy header, which leaves the stream at the data.

    Raises:
        ValueError: the stream does not start with an npy header of version 1 or 2 (version 3 is
            only written for structured dtypes), or the header is malformed.
    """
    version = np.lib.format.read_magic(stream)
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"npy version {version[0]}.{version[1]} is not supported")
    try:
        shape, fortran, dtype = readers[version](stream)
    except (TokenError, SyntaxError) as error:  # numpy reads what Python 2 wrote by its tokens
        raise ValueError("the header is malformed") from error
    if any(axis < 0 for axis in shape):
        raise ValueError(f"shape {list(shape)} is negative")
    return Header(shape, dtype, fortran and len(shape) > 1)


_READERS = "_readers"
_READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted zip member
    NotImplementedError,  # a compression that zipfile does not know
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    SafetensorError,
)


class PathSource(Options, ABC):
    """Arrays with the samples as first axis, from a file or a folder."""

    kind: ClassVar[str]

    path: Path = Field(strict=False, description="the file or folder")
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="names in the model to names in the file; all arrays if there are none",
    )
    samples: int | None = Field(default=None, ge=1, description="use at most this many samples")

    @property
    def subject(self) -> str:
        """How errors name this source."""
        return f"data '{self.path}'"

    @classmethod
    def completed(cls, options: dict[str, Any], model: Path) -> dict[str, Any]:  # noqa: ARG003
        """Return the options of a spec, with what is read beside the model where they need it.

        Args:
            model: the folder that holds the model.
        """
        return options

    def described(self) -> str:
        """Return in one line what is done to the samples; empty if that is nothing."""
        return ""

    def misfit(self, spec: TensorSpec) -> str:  # noqa: ARG002
        """Return which keys make of a sample what an input takes; empty if none are known."""
        return ""

    def hashed(self, places: set[str], files: Iterable[tuple[bytes, Path]]) -> str:
        """Return a SHA-256 of the options but ``places``, and of files, each after its name."""
        settings = self.model_dump(mode="json", exclude=places)
        whole = hashlib.sha256(json.dumps([self.kind, settings], sort_keys=True).encode())
        for name, path in files:
            whole.update(name)
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()


class FileSource(PathSource):
    """Arrays with the samples as first axis, read from files a batch at a time."""

    @abstractmethod
    def headers(self) -> dict[str, Header]:
        """Return the headers of all arrays there are, by stored name."""

    @abstractmethod
    def open_rows(self, arrays: Mapping[str, str]) -> AbstractContextManager[dict[str, Rows]]:
        """Open the chosen arrays, model names to stored names; return rows by model name."""

    def readable(self) -> dict[str, Header]:
        """Return the headers of all arrays, by their names in the file.

        Raises:
            SpecError: there is no such file.
            DataError: it cannot be read.
        """
        with self._guard():
            return self.headers()

    def files(self) -> list[tuple[str, Path]]:
        """Return the files that hold the chosen arrays, each with a name for the digest."""
        return [("", self.path)]

    def info(self) -> SourceInfo:
        """Describe the source by reading headers only.

        Raises:
            SpecError: the path does not exist.
            DataError: the file is unusable, or does not hold the arrays asked for.
        """
        return self._choose()[1]

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit``; raises as ``info`` does."""
        if size < 1:
            raise ValueError(f"batches of {size} samples")
        arrays, info = self._choose()
        left = info.samples or 0
        left = left if limit is None else min(left, limit)
        with ExitStack() as stack:
            with self._guard():
                readers = stack.enter_context(self.open_rows(arrays))
            while left > 0:
                count = min(size, left)
                with self._guard():
                    batch = {name: reader.take(count) for name, reader in readers.items()}
                yield batch
                left -= count

    def digest(self) -> str:
        """Return a SHA-256 of the options and the files' content, whatever their location."""
        with self._guard():
            named = ((name.encode() + b"\0", path) for name, path in self.files())
            return self.hashed({"path"}, named)

    def _choose(self) -> tuple[dict[str, str], SourceInfo]:
        headers = self.readable()
        arrays = choose(self.subject, self.fields, headers)
        return arrays, describe(self.subject, arrays, headers, self.samples)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        if not self.path.exists():
            raise SpecError(self.subject, "does not exist", "correct the path")
        try:
            yield
        except _READ_ERRORS as error:
            raise DataError(
                self.subject,
                f"cannot be read: {str(error) or type(error).__name__}",
                f"check that it is a complete {self.kind}",
            ) from error


class IndexedFileSource(FileSource):
    """Files in which any sample can be found without reading those before it."""

    @abstractmethod
    def open_at(self, arrays: Mapping[str, str]) -> dict[str, ReadAt]:
        """Open the chosen arrays, model names to stored names; return readers by model name."""

    @contextmanager
    def open_rows(self, arrays: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Read the rows one after the other by their numbers."""
        yield {name: InOrder(read_at) for name, read_at in self.open_at(arrays).items()}

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by number; raises as ``info`` does.

        The files are examined once and must not change.
        """
        readers = self._readers
        with self._guard():
            return {name: read_at(rows) for name, read_at in readers.items()}

    def __getstate__(self) -> dict[Any, Any]:
        """Leave open files out of a pickle."""
        state = super().__getstate__()
        kept = {name: value for name, value in state["__dict__"].items() if name != _READERS}
        return {**state, "__dict__": kept}

    @cached_property
    def _readers(self) -> dict[str, ReadAt]:
        arrays, _ = self._choose()
        with self._guard():
            return self.open_at(arrays)
