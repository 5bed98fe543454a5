"""Parts of files as tensors: mapped, and read when they are used.

A mapped file costs no anonymous memory, and its pages go once they have been used.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from compressor.carriers.checkpoint.headers import DTYPES, TensorHeader
from compressor.errors import ModelError


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``stop`` of a file."""

    file: MappedFile
    start: int
    stop: int


@runtime_checkable
class RowReader(Protocol):
    """A tensor in a file, whole or by rows: its first axis."""

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows."""
        ...

    def span(self, start: int, stop: int) -> Span:
        """Return the bytes of the file that these rows are read from."""
        ...


class MappedFile:
    """A file that is mapped into memory when it is first read.

    Args:
        path: the file.
        nbytes: its size as it was when its header was checked.
    """

    def __init__(self, path: Path, nbytes: int):
        self.path = path
        self.nbytes = nbytes
        self._lock = threading.Lock()

    @cached_property
    def _map(self) -> mmap.mmap:
        subject = f"checkpoint {str(self.path)!r}"
        try:
            with self.path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size != self.nbytes:
                    raise ModelError(
                        subject, "has changed since its header was read", "run the command again"
                    )
                # Private and writable, since torch wants to write to whatever it wraps; nothing
                # that is written would reach the file.
                return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(
                subject, f"cannot be read ({error.strerror})", "check its permissions"
            ) from error

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a view of the file; it is not to be changed.

        Raises:
            ModelError: the file cannot be read any more.
        """
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            mapped = self._map
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(shape)

    def touch(self, start: int, stop: int) -> None:
        """Read a range into memory; waits for the disk."""
        if start < stop:
            self.tensor(torch.uint8, (stop - start,), start)[:: mmap.PAGESIZE].max()

    def release(self, start: int, stop: int) -> None:
        """Take a range out of this process's memory; it is read again if it is used again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with self._lock:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a mapped file."""

    file: MappedFile
    header: TensorHeader

    @property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        return DTYPES[self.header.dtype]

    def __call__(self) -> torch.Tensor:
        """Return all of it, a view of the file."""
        return self.file.tensor(self.dtype, self.header.shape, self.header.offset)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows, a view of the file."""
        span = self.span(start, stop)
        shape = (stop - start, *self.header.shape[1:])
        return self.file.tensor(self.dtype, shape, span.start)

    def span(self, start: int, stop: int) -> Span:
        """Return the bytes that these rows take."""
        one = prod(self.header.shape[1:]) * self.dtype.itemsize
        offset = self.header.offset
        return Span(self.file, offset + start * one, offset + stop * one)
