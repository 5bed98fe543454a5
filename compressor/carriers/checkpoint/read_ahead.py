"""Read parts of files a bounded distance before they are used.

What is not in the page cache is read past it, into buffers that are used again and again. What is
there already, or lies on a file system without direct reads, is mapped, and only touched here, so
that whoever uses it does not wait for the disk.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from compressor.carriers.checkpoint.direct import Buffer
from compressor.carriers.checkpoint.reading import Span
from compressor.errors import ModelError

DISTANCE = 128 << 20
"""Bytes that may be read and not yet done with; memory holds little more of the input."""

_THREADS = 2  # while one's data is on its way, the other's request waits at the disk already
_LONGEST = 32 << 20  # bytes of the longest part that gets a buffer
_STEP = 2 << 20  # bytes touched between two looks whether to stop


@dataclass(frozen=True)
class _Ready:
    """How a part has been read: into a buffer, or mapped and in the cache before or since."""

    buffer: Buffer | None = None
    cached: bool = False


class ReadAhead:
    """Reads parts of files in the order in which they will be used.

    Used as a context manager; its threads end when the block does.

    Args:
        spans: what will be used, in this order.
        distance: how many bytes may be read and not yet done with; each user of several at once
            may add one part.
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
        """Wait until a part has been read; within the block, views of it are there at once.

        They are not to be used afterwards.

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
                buffer = self._buffer()
                if span.file.load(span.start, span.stop, buffer):
                    return _Ready(buffer)
            for start in range(span.start, span.stop, _STEP):
                if not self._ended.is_set():
                    span.file.touch(start, min(start + _STEP, span.stop))
            return _Ready(cached=cached)
        return _Ready(cached=True)

    def _buffer(self) -> Buffer:
        with self._lock:
            return self._free.pop() if self._free else Buffer(self._longest)
