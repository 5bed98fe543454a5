"""Write a planned checkpoint: tensors flow through in blocks of rows, several at a time.

Memory holds a few blocks for each thread, whatever the size of the checkpoint: blocks are read from
mapped files, computed, and written to their place in a file whose header is there already. All
threads take the next block of one common order, so they pass from one shard to the next without
waiting for each other. Meanwhile a complete shard is hashed, flushed and given its name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TypeVar

import torch

from compressor.errors import InputError, not_finite
from compressor.exporters.safetensors.code_layouts import COMPRESSED_TENSORS, CodeLayout
from compressor.exporters.safetensors.stream_plan import (
    PlannedShard,
    StreamPlan,
    finished,
    journal_of,
)
from compressor.files import disk_errors, sync
from compressor.models.checkpoint.reading import (
    DISTANCE,
    ReadAhead,
    RowReader,
    Span,
    kept_memory,
)
from compressor.types.data import ALONE, Ranks
from compressor.types.layers import StoredTensor
from compressor.types.parallel import one_thread_each
from compressor.types.proofs import checksum

ResultT = TypeVar("ResultT")

# Elements in work at once, all threads together, and by one thread: with some 20 bytes of
# intermediate results each they stay far below 1 GiB.
_IN_WORK = 16 << 20
_AT_ONCE = 8 << 20

_KEPT = 64 << 20  # bytes that a thread's heap keeps from one block to the next

_UNFLUSHED = 64 << 20  # bytes that a thread writes before it has them flushed to the disk


def pieces(
    tensor: StoredTensor, elements: int, codes: CodeLayout = COMPRESSED_TENSORS
) -> list[tuple[int, int]]:
    """Divide a tensor's rows into blocks that can be read and computed by themselves.

    Args:
        tensor: the tensor; one that does not lie in a file is one block.
        elements: about how many of them make a block.
        codes: how it is stored if it is quantized.

    Returns:
        First row and the row after the last of each block; at least one, which may be empty.
    """
    whole = [(0, _rows(tensor))]
    return _cuts(tensor, elements, codes) if isinstance(tensor.read, RowReader) else whole


def _cuts(tensor: StoredTensor, elements: int, codes: CodeLayout) -> list[tuple[int, int]]:
    rows = _rows(tensor)
    whole = tensor.codes is not None and (codes.multiple is None or not tensor.codes.by_rows)
    if not tensor.elements or whole:
        return [(0, rows)]
    found = None if tensor.codes is None else codes.multiple
    multiple = 1 if found is None or tensor.codes is None else found(tensor.codes.scheme)
    if isinstance(tensor.read, RowReader):
        multiple = lcm(multiple, tensor.read.multiple)  # so that no two blocks read the same rows
    step = max(1, elements * rows // tensor.elements // multiple) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def block_tensors(
    tensor: StoredTensor,
    start: int,
    stop: int,
    elements: int,
    codes: CodeLayout = COMPRESSED_TENSORS,
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Compute what is stored of some rows of a tensor.

    Args:
        start: first row, one at which :func:`pieces` starts a block.
        elements: about how many of them are worked on at once.
        codes: how it is stored if it is quantized.

    Yields:
        The stored tensor's name, a part of its elements, and the byte of it at which they go.

    Raises:
        ModelError: a weight that is quantized holds NaN or infinity.
    """
    if isinstance(tensor.read, RowReader):
        yield from _stored(tensor, tensor.read.rows(start, stop), start, codes)
        return
    values = tensor.read()
    values = values if values.dim() else values.reshape(1)
    for first, last in _cuts(tensor, elements, codes):
        yield from _stored(tensor, values[first:last], first, codes)


def _stored(
    tensor: StoredTensor, rows: torch.Tensor, start: int, codes: CodeLayout
) -> Iterator[tuple[str, torch.Tensor, int]]:
    if tensor.codes is None:
        (entry,) = codes.entries(tensor)
        yield entry.name, rows, entry.offset(start)
        return
    _check_finite(tensor.name, rows)
    # The layouts have only matrices, whose rows are canonical.
    by_rows, layer = tensor.codes.by_rows, tensor.codes.layer
    matrix = rows.reshape(len(rows), -1) if by_rows else layer.canonical(rows)
    made = codes.tensors(tensor, tensor.codes.compute(matrix))
    for entry in codes.entries(tensor):
        if start == 0 or entry.row_bits:  # what belongs to no row is the same in every block
            yield entry.name, made[entry.name], entry.offset(start)


def _check_finite(name: str, values: torch.Tensor) -> None:
    # A sum with a summand that is not finite is not finite; one of large numbers may overflow too.
    # torch adds up in float32 anyway, and asked for another type it takes ten times as long.
    if bool(values.sum().isfinite()):
        return
    bad = int((~values.isfinite()).sum())
    if bad:
        raise not_finite(f"tensor {name!r}", f"holds {bad} values")


def _rows(tensor: StoredTensor) -> int:
    return tensor.shape[0] if tensor.shape else 1


class ShardFile:
    """A shard under a temporary name, its header written and its size final from the start.

    Raises:
        OSError: the disk is full or broken; nothing is left of the file.
    """

    def __init__(self, shard: PlannedShard, directory: Path):
        self._shard = shard
        self._path = directory / shard.name
        self._part = directory / f".{shard.name}.part"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._handle = os.open(self._part, flags, 0o666)
        self._open = True
        try:
            # Allocate all of it at once: a full disk is noticed now, and writing to blocks that
            # exist is many times faster than allocating while writing.
            os.posix_fallocate(self._handle, 0, shard.nbytes)
            self._write(shard.layout.header, 0)
        except OSError:
            self.abandon()
            raise

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write a tensor, or a part of one.

        Args:
            start: the byte of the stored tensor at which they go.

        Raises:
            ValueError: there are more of them than the plan has room for.
            OSError: the disk is full or broken.
        """
        if not tensor.numel():
            return
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if start + data.nbytes > self._shard.entries[name].nbytes:
            raise ValueError(f"{name}: {data.nbytes} bytes at {start} are more than planned")
        self._write(data, self._shard.layout.offsets[name] + start)

    def flush(self) -> None:
        """Flush what has been written so far, so that less is left for the end."""
        os.fdatasync(self._handle)

    def finish(self, plan: str) -> None:
        """Flush it, give it its name, and note its hash and the plan's digest beside it."""
        digest = hashlib.sha256()
        tensors = {}
        header, offsets = self._shard.layout.header, self._shard.layout.offsets
        with (
            mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
        ):
            digest.update(whole[: len(header)])
            for name in sorted(offsets, key=lambda n: (offsets[n], self._shard.entries[n].nbytes)):
                start, nbytes = offsets[name], self._shard.entries[name].nbytes
                with whole[start : start + nbytes] as data:
                    digest.update(data)
                    tensors[name] = checksum([data])
        os.fsync(self._handle)
        self._close()
        self._part.replace(self._path)
        note = {
            "plan": plan,
            "bytes": self._shard.nbytes,
            "sha256": digest.hexdigest(),
            "tensors": tensors,
        }
        journal = journal_of(self._path)
        draft = journal.with_name(journal.name + ".part")
        draft.write_text(json.dumps(note) + "\n", encoding="utf-8")
        sync(draft)
        draft.replace(journal)
        sync(self._path.parent)

    def abandon(self) -> None:
        """Remove what was written, unless it was finished."""
        self._close()
        self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._handle)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._handle, view, offset)
            view, offset = view[done:], offset + done


@dataclass(frozen=True)
class _Block:
    shard: int
    tensor: StoredTensor
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the float tensor."""
        whole = self.tensor.float_nbytes
        return whole * (self.stop - self.start) // _rows(self.tensor) if whole else 0

    @property
    def span(self) -> Span | None:
        """Its bytes in a file; ``None`` where it does not lie in one."""
        read = self.tensor.read
        return read.span(self.start, self.stop) if isinstance(read, RowReader) else None


def write_shards(
    plan: StreamPlan,
    directory: Path,
    ranks: Ranks = ALONE,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write this process's shards into a folder, except those that an earlier call finished.

    Args:
        directory: an existing folder; finished shards stay in it if the call fails.
        threads: how many work; by default as many as torch would use.
        advance: called with the input bytes that are done, including those finished earlier.

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
        with one_thread_each() as usual, kept_memory(_KEPT):
            stream = _Stream(plan.digest, open_shards, directory, threads or usual)
            stream.run(lambda streamed: advance(done + streamed))


def _check_room(shards: Sequence[PlannedShard], directory: Path) -> None:
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"folder {str(directory)!r}",
            f"has {free:,} bytes free, but {needed:,} will be written",
            "free some space or choose another output",
        )


class _Stream:
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
            for start, stop in pieces(tensor, self._elements, shard.codes)
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
        """Work on blocks until none is left; return the flushes and finishes still under way."""
        torch.set_num_threads(1)
        completed: list[Future[None]] = []
        written = 0
        while (step := self._take()) is not None:
            block, file = step
            with nullcontext() if block.span is None else ahead.using(block.span):
                codes = self._shards[block.shard].codes
                for name, tensor, start in block_tensors(
                    block.tensor, block.start, block.stop, self._elements, codes
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
    """Wait for jobs; if one fails, stop the others and raise what it raised."""
    done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
    failed = next((job for job in jobs if job in done and job.exception() is not None), None)
    if failed is not None:
        stop.set()
        failed.result()
