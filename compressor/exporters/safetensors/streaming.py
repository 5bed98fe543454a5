"""Write a planned checkpoint: tensors flow through in blocks of rows, several at a time.

Memory holds a few blocks for each thread, whatever the size of the checkpoint: blocks are read from
mapped files, computed, and written to their place in a file whose header is there already. All
threads take the next block of one common order, so they cross from a shard to the next without
waiting for each other. A shard that is complete is hashed, flushed and given its name meanwhile.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from compressor.errors import InputError
from compressor.exporters.safetensors.blocks import block_tensors, kept_memory, pieces
from compressor.exporters.safetensors.shard_file import ShardFile, finished
from compressor.exporters.safetensors.stream_plan import PlannedShard, StreamPlan
from compressor.files import disk_errors
from compressor.models.checkpoint.read_ahead import DISTANCE, ReadAhead
from compressor.models.checkpoint.reading import RowReader, Span
from compressor.types.data import ALONE, Ranks
from compressor.types.tensors import StoredTensor

ResultT = TypeVar("ResultT")

# Elements in work at once, all threads together, and by one thread: with some 20 bytes of
# intermediate results each they stay far below 1 GiB.
_IN_WORK = 16 << 20
_AT_ONCE = 8 << 20

_KEPT = 64 << 20  # bytes that a thread's heap keeps from one block to the next

_UNFLUSHED = 64 << 20  # bytes that a thread writes before it has them brought to the disk


@dataclass(frozen=True)
class _Block:
    """Some rows of a tensor of a shard."""

    shard: int
    tensor: StoredTensor
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the float tensor."""
        rows = self.tensor.shape[0] if self.tensor.shape else 1
        whole = self.tensor.elements * self.tensor.dtype.itemsize
        return whole * (self.stop - self.start) // rows if rows else 0

    @property
    def span(self) -> Span | None:
        """Where it lies in a file, if it does."""
        read = self.tensor.read
        return read.span(self.start, self.stop) if isinstance(read, RowReader) else None


def _nobody_watches(_: int) -> None:
    pass


def write_shards(
    plan: StreamPlan,
    directory: Path,
    ranks: Ranks = ALONE,
    threads: int | None = None,
    advance: Callable[[int], None] = _nobody_watches,
) -> None:
    """Write this process's shards into a folder, except those that an earlier call finished.

    Args:
        plan: what is written.
        directory: an existing folder; finished shards stay in it if the call fails.
        ranks: which of several processes this is.
        threads: how many work; by default as many as torch would use.
        advance: takes the input bytes that are done, those finished earlier included.

    Raises:
        InputError: the disk is full.
        ModelError: an input file has changed, or a weight holds NaN or infinity.
        SpecError: the folder cannot be written to.
    """
    open_shards, done = [], 0
    with disk_errors(directory):
        for shard in plan.share(ranks):
            if finished(shard, directory, plan.digest) is None:
                open_shards.append(shard)
            else:
                done += shard.read_bytes
        advance(done)
        _check_room(open_shards, directory)
        count = threads or torch.get_num_threads()
        stream = _Stream(plan.digest, open_shards, directory, count)
        with _one_thread_each(), kept_memory(_KEPT):
            stream.run(lambda own: advance(done + own))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Keep torch from dividing a thread's work among further threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_room(shards: Sequence[PlannedShard], directory: Path) -> None:
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"folder {str(directory)!r}",
            f"has room for {free:,} bytes, {needed:,} will be written",
            "free some space or choose another output",
        )


class _Stream:
    """What the threads share."""

    def __init__(self, digest: str, shards: Sequence[PlannedShard], directory: Path, threads: int):
        self._digest = digest
        self._shards = shards
        self._directory = directory
        self._threads = threads
        self._elements = min(_AT_ONCE, max(1, _IN_WORK // threads))
        self._blocks = [
            _Block(index, tensor, start, stop)
            for index, shard in enumerate(shards)
            for tensor in shard.sources
            for start, stop in pieces(tensor, self._elements)
        ]
        self._next = iter(self._blocks)
        self._left = Counter(block.shard for block in self._blocks)
        self._files: dict[int, ShardFile] = {}
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, advance: Callable[[int], None]) -> None:
        """Write everything; what is not finished when it fails is removed."""
        workers = ThreadPoolExecutor(self._threads, "stream")
        finisher = ThreadPoolExecutor(1, "finish")
        spans = [span for block in self._blocks if (span := block.span) is not None]
        try:
            # Each thread uses one, and some are on their way.
            ahead_by = (self._threads + 4) * max(map(len, spans), default=0)
            with ReadAhead(spans, min(ahead_by, DISTANCE)) as ahead:
                try:
                    jobs = [
                        workers.submit(self._work, ahead, finisher, advance)
                        for _ in range(self._threads)
                    ]
                    _raise_first(jobs, self._stop)
                finally:
                    self._stop.set()
                    workers.shutdown(cancel_futures=True)
            _raise_first([job for worker in jobs for job in worker.result()], self._stop)
        finally:
            finisher.shutdown(cancel_futures=True)
            for file in self._files.values():
                file.abandon()

    def _work(
        self, ahead: ReadAhead, finisher: ThreadPoolExecutor, advance: Callable[[int], None]
    ) -> list[Future[None]]:
        """Take blocks until there are none; return what is still to be flushed and finished."""
        torch.set_num_threads(1)
        completed: list[Future[None]] = []
        written = 0
        while (taken := self._take()) is not None:
            block, file = taken
            with nullcontext() if block.span is None else ahead.using(block.span):
                for name, tensor, start in block_tensors(
                    block.tensor, block.start, block.stop, self._elements
                ):
                    file.put(name, tensor, start)
                    written += tensor.nbytes
            if written > _UNFLUSHED:
                written = 0
                completed.append(finisher.submit(file.flush))
            with self._lock:
                self._done += block.nbytes
                self._left[block.shard] -= 1
                advance(self._done)
                if not self._left[block.shard]:
                    completed.append(finisher.submit(file.finish, self._digest))
        return completed

    def _take(self) -> tuple[_Block, ShardFile] | None:
        with self._lock:
            block = None if self._stop.is_set() else next(self._next, None)
            if block is None:
                return None
            if block.shard not in self._files:
                shard = self._shards[block.shard]
                self._files[block.shard] = ShardFile(shard, self._directory)
            return block, self._files[block.shard]


def _raise_first(jobs: Sequence[Future[ResultT]], stop: threading.Event) -> None:
    """Wait for jobs; if one fails, tell the others to stop, and raise what it raised."""
    done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
    failed = next((job for job in jobs if job in done and job.exception() is not None), None)
    if failed is not None:
        stop.set()
        failed.result()
