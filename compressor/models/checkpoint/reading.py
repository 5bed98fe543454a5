"""Parts of files as tensors: mapped, or read ahead past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch

from compressor.errors import ModelError
from compressor.models.codec.headers import DTYPES, TensorHeader

_ALIGNED = 4096  # what the ends of a direct read are multiples of, in the file and in memory
_REQUEST = 1 << 20  # bytes asked for at once: larger requests were not faster
# From <malloc.h>. Setting either one ends glibc's own adjustment of both.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

_LARGEST = 32 << 20  # the largest limit between heap and maps that older versions accept

DISTANCE = 128 << 20
"""Bytes that may be read and not yet done with; memory holds little more of the input."""

_THREADS = 2  # while one's data is on its way, the other's request waits at the disk already
_LONGEST = 32 << 20  # bytes of the longest part that gets a buffer
_STEP = 2 << 20  # bytes touched between two looks whether to stop


class Buffer:
    """Memory that direct reads can fill.

    Args:
        nbytes: the longest range that will be read.
    """

    def __init__(self, nbytes: int):
        # An anonymous map starts at a page. The range may start and end within an aligned piece.
        self._memory = mmap.mmap(-1, nbytes + 2 * _ALIGNED)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self, handle: int, start: int, stop: int) -> torch.Tensor:
        """Read bytes ``start`` to ``stop`` of a file that was opened by :func:`open_direct`.

        Returns:
            A view of the buffer, uint8.

        Raises:
            OSError: the disk is broken, the file is shorter, or its system reads in other units.
        """
        first = start // _ALIGNED * _ALIGNED
        last = -(-stop // _ALIGNED) * _ALIGNED
        with memoryview(self._memory) as view:
            for at in range(first, last, _REQUEST):
                with view[at - first : min(at + _REQUEST, last) - first] as part:
                    if os.preadv(handle, [part], at) < min(len(part), stop - at):
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._bytes[start - first : stop - first]


def open_direct(path: Path) -> int:
    """Open a file for direct reads; return the handle, to be closed.

    Raises:
        OSError: the file cannot be opened, or its file system or this system has no direct reads.
    """
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


def cached_share(mapped: torch.Tensor) -> float:
    """Return which share of a part of a map is in the page cache; 1 if the system does not tell."""
    first = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - first
    pages = -(-length // mmap.PAGESIZE)
    there = torch.zeros(pages, dtype=torch.uint8)
    with suppress(AttributeError):  # a C library without it
        arguments = (first, length, there.data_ptr())
        if not ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, arguments)):
            return int((there & 1).sum()) / max(pages, 1)
    return 1.0


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``stop`` of a file."""

    file: MappedFile
    start: int
    stop: int

    def __len__(self) -> int:
        """Return how many there are."""
        return self.stop - self.start


@runtime_checkable
class RowReader(Protocol):
    """A tensor in a file that is read whole or by rows, its first axis."""

    @property
    def multiple(self) -> int:
        """Rows that are read together: others need their whole multiple to be read."""
        ...

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
        nbytes: its size as it was when its header was checked.
    """

    def __init__(self, path: Path, nbytes: int):
        self.path = path
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, int], torch.Tensor] = {}

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
        stop = offset + count * dtype.itemsize
        with self._lock:
            for (first, last), data in self._loaded.items():
                if first <= offset and stop <= last:
                    part = data[offset - first : stop - first].numpy()
                    return torch.frombuffer(part, dtype=dtype).reshape(shape)
            mapped = self._map
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(shape)

    def load(self, start: int, stop: int, buffer: Buffer) -> bool:
        """Read a range past the page cache, for all later views; return whether that worked.

        Not every file system can.
        """
        try:
            handle = open_direct(self.path)
            try:
                data = buffer.fill(handle, start, stop)
            finally:
                os.close(handle)
        except OSError:
            return False
        with self._lock:
            self._loaded[start, stop] = data
        return True

    def unload(self, start: int, stop: int) -> None:
        """Release a range's buffer; views that were taken of it lose their content."""
        with self._lock:
            self._loaded.pop((start, stop), None)

    def cached(self, start: int, stop: int) -> bool:
        """Return whether most of a range is in the page cache, if the system tells.

        Raises:
            ModelError: the file cannot be read any more.
        """
        return start == stop or cached_share(self._view(start, stop)) > 1 / 2

    def touch(self, start: int, stop: int) -> None:
        """Read a range into memory; waits for the disk."""
        if start < stop:
            self._view(start, stop)[:: mmap.PAGESIZE].max()

    def release(self, start: int, stop: int) -> None:
        """Drop a range from this process's memory; it is read again when it is used again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with self._lock:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def forget(self, start: int, stop: int) -> None:
        """Drop a range from the page cache as well, unless others use it."""
        self.release(start, stop)
        with suppress(OSError), self.path.open("rb") as stream:  # some file systems take no advice
            os.posix_fadvise(stream.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)

    def _view(self, start: int, stop: int) -> torch.Tensor:
        with self._lock:
            return torch.frombuffer(self._map, dtype=torch.uint8, count=stop - start, offset=start)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a mapped file."""

    file: MappedFile
    header: TensorHeader
    multiple = 1

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


@contextmanager
def kept_memory(nbytes: int) -> Iterator[None]:
    """Within the block, let each thread keep freed memory; afterwards return it to the system.

    Afterwards, the limits are those at which glibc's own adjustment ends. With the ones that it
    begins with, each larger tensor would be mapped anew from then on.

    Has no effect with a C library other than glibc.

    Args:
        nbytes: freed bytes that a thread's heap may keep at its end.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, nbytes)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        libc.malloc_trim(ctypes.c_size_t(0))


@dataclass(frozen=True)
class _Ready:
    """How a part was read: into a buffer, or mapped, in the cache already or since then."""

    buffer: Buffer | None = None
    cached: bool = False


class ReadAhead:
    """Reads parts of files in the order in which they will be used.

    Used as a context manager; its threads end when the block does.

    Args:
        spans: what will be used, in this order.
        distance: how many bytes may be read ahead; each concurrent user may add one part.
    """

    def __init__(self, spans: Iterable[Span], distance: int = DISTANCE):
        self._spans = deque(spans)
        self._longest = max((len(s) for s in self._spans if len(s) <= _LONGEST), default=0)
        self._left = distance
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ready: defaultdict[Span, deque[Future[_Ready]]] = defaultdict(deque)
        self._free: list[Buffer] = []
        self._threads = ThreadPoolExecutor(_THREADS, "read-ahead")

    def __enter__(self) -> ReadAhead:
        with self._lock:
            self._go_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)

    @contextmanager
    def using(self, span: Span) -> Iterator[None]:
        """Wait until a part has been read; within the block, views of it need no more reading.

        They must not be used afterwards.

        Args:
            span: the next of those that nobody has used.
        """
        with self._lock:
            while not self._ready[span] and self._spans:  # others hold all that may be held
                self._read_next()
            coming = self._ready[span].popleft()
        ready = coming.result()
        try:
            yield
        finally:
            if ready.buffer is not None:
                span.file.unload(span.start, span.stop)
            elif ready.cached:
                span.file.release(span.start, span.stop)
            else:
                span.file.forget(span.start, span.stop)
            with self._lock:
                if ready.buffer is not None:
                    self._free.append(ready.buffer)
                self._left += len(span)
                self._go_on()

    def _go_on(self) -> None:
        # A part longer than the distance must not wait for ever.
        while self._left > 0 and self._spans and not self._ended.is_set():
            self._read_next()

    def _read_next(self) -> None:
        span = self._spans.popleft()
        self._left -= len(span)
        self._ready[span].append(self._threads.submit(self._read, span))

    def _read(self, span: Span) -> _Ready:
        # Whoever uses a file that has gone or changed meets the same error, and reports it.
        with suppress(ModelError):
            cached = span.file.cached(span.start, span.stop)
            if not cached and len(span) <= _LONGEST:
                with self._lock:
                    buffer = self._free.pop() if self._free else Buffer(self._longest)
                if span.file.load(span.start, span.stop, buffer):
                    return _Ready(buffer)
            for start in range(span.start, span.stop, _STEP):
                if not self._ended.is_set():
                    span.file.touch(start, min(start + _STEP, span.stop))
            return _Ready(cached=cached)
        return _Ready(cached=True)
