"""Read rows of weights a bounded distance before they are used."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import TypeAlias, TypeVar

import torch

from compressor.errors import ModelError
from compressor.models.checkpoint.reading import Buffer, RowReader, Span
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer
from compressor.types.tensors import StoredTensor

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


ResultT = TypeVar("ResultT")

_Found: TypeAlias = list[tuple["RowBlock", ResultT]]

_ELEMENTS = 4 << 20  # of a block; the work on one takes some 20 bytes for each
_WAITING = 2  # blocks beyond those in work


@dataclass(frozen=True)
class RowBlock:
    """Rows ``start`` to ``stop`` of a layer's weight in canonical form."""

    layer: Layer
    start: int
    stop: int


def row_blocks(layer: Layer, multiple: int = 1, elements: int = _ELEMENTS) -> list[RowBlock]:
    """Divide a weight's rows into blocks.

    Args:
        layer: whose weight it is.
        multiple: rows that stay together.
        elements: about how many of them make a block.
    """
    step = max(1, elements // max(layer.columns, 1) // multiple) * multiple
    starts = range(0, layer.rows, step)
    return [RowBlock(layer, start, min(start + step, layer.rows)) for start in starts]


def read_rows(carrier: Carrier, layer: Layer, start: int, stop: int) -> torch.Tensor:
    """Return some rows of a layer's float weight in canonical form.

    No others are read or computed where the weight lies in a file by rows. A view of the file
    must not be changed.
    """
    reader = _reader(carrier.tensors(), layer)
    if reader is not None:
        return reader.rows(start, stop).flatten(1)
    return layer.canonical(carrier.weight(layer))[start:stop]


def all_rows(carrier: Carrier, layer: Layer) -> Iterator[torch.Tensor]:
    """Yield all rows of a layer's float weight in canonical form, a block of them at a time."""
    reader = _reader(carrier.tensors(), layer)
    matrix = layer.canonical(carrier.weight(layer)) if reader is None else None
    for block in row_blocks(layer, 1 if reader is None else reader.multiple):
        if matrix is not None:
            yield matrix[block.start : block.stop]
        else:
            yield read_rows(carrier, layer, block.start, block.stop)


def scan(
    carrier: Carrier,
    blocks: Sequence[RowBlock],
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> Iterator[tuple[RowBlock, ResultT]]:
    """Work on blocks of rows, several at a time, and yield what is found in their order.

    Files are read ahead of their use. Memory holds a few blocks; a weight that cannot be read by
    rows is held as a whole.

    Args:
        carrier: the model.
        blocks: those of one layer follow each other.
        work: takes rows in canonical form, which are not to be kept or changed, and says what is
            found in them; called by several threads.
    """
    tensors = carrier.tensors()
    readers = {
        layer.weight: _reader(tensors, layer)
        for layer in {block.layer.weight: block.layer for block in blocks}.values()
    }
    of_files = [(block, reader) for block in blocks if (reader := readers[block.layer.weight])]
    spans = [reader.span(block.start, block.stop) for block, reader in of_files]
    with ReadAhead(spans) as ahead, _one_thread_each() as threads:
        jobs: list[Callable[[], _Found[ResultT]]] = []
        for weight, found in groupby(blocks, key=lambda block: block.layer.weight):
            reader = readers[weight]
            if reader is None:
                jobs.append(partial(_of_whole, carrier, list(found), work))
            else:
                jobs += [partial(_of_file, ahead, reader, block, work) for block in found]
        yield from _in_order(jobs, threads)


def _of_file(
    ahead: ReadAhead,
    reader: RowReader,
    block: RowBlock,
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> _Found[ResultT]:
    with ahead.using(reader.span(block.start, block.stop)):
        rows = reader.rows(block.start, block.stop).flatten(1)
        return [(block, work(rows, block))]


def _of_whole(
    carrier: Carrier,
    blocks: Sequence[RowBlock],
    work: Callable[[torch.Tensor, RowBlock], ResultT],
) -> _Found[ResultT]:
    layer = blocks[0].layer
    matrix = layer.canonical(carrier.weight(layer))
    return [(block, work(matrix[block.start : block.stop], block)) for block in blocks]


def _reader(tensors: Mapping[str, StoredTensor], layer: Layer) -> RowReader | None:
    """Return what reads the rows of a float weight that lies in a file, if it can be had so."""
    tensor = tensors.get(layer.weight)
    if tensor is None or tensor.codes is not None or not layer.rows_first:
        return None
    return tensor.read if isinstance(tensor.read, RowReader) else None


def _in_order(
    jobs: Sequence[Callable[[], _Found[ResultT]]], threads: int
) -> Iterator[tuple[RowBlock, ResultT]]:
    workers = ThreadPoolExecutor(threads, "scan", initializer=torch.set_num_threads, initargs=(1,))
    coming: deque[Future[_Found[ResultT]]] = deque()
    try:
        for job in jobs:
            coming.append(workers.submit(job))
            if len(coming) >= threads + _WAITING:
                yield from coming.popleft().result()
        while coming:
            yield from coming.popleft().result()
    finally:
        workers.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """Keep torch from dividing a thread's work among further threads; yields how many to use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
