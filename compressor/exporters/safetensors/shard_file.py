"""One output file that is filled in any order, and appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from compressor.exporters.safetensors.stream_plan import PlannedShard
from compressor.files import file_sha256, sync


@dataclass(frozen=True)
class WrittenFile:
    """A finished file.

    Attributes:
        path: where it is.
        nbytes: its size.
        sha256: the hash of its bytes, in hexadecimal.
    """

    path: Path
    nbytes: int
    sha256: str


class ShardFile:
    """A shard under a temporary name, its header written and its size final from the start.

    Args:
        shard: what will be in it.
        directory: where it will be.

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
            # Room for all of it at once: a full disk is noticed now, and blocks that are there are
            # written to many times faster than blocks that are looked for while writing.
            os.posix_fallocate(self._handle, 0, shard.nbytes)
            self._write(shard.layout.header, 0)
        except OSError:
            self.abandon()
            raise

    def put(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write a tensor, or a part of one.

        Args:
            name: the tensor, as the plan calls it.
            tensor: its elements.
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
        """Bring to the disk what has been written so far, so that less is left for the end."""
        os.fdatasync(self._handle)

    def finish(self, plan: str) -> None:
        """Flush it, give it its name, and note its hash beside it.

        Args:
            plan: digest of the plan that it belongs to.
        """
        digest = hashlib.sha256()
        with mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ) as mapped:
            digest.update(mapped)
        os.fsync(self._handle)
        self._close()
        self._part.replace(self._path)
        note = {"plan": plan, "bytes": self._shard.nbytes, "sha256": digest.hexdigest()}
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


def journal_of(path: Path) -> Path:
    """Return where the note about a finished shard lies."""
    return path.with_name(f".{path.name}.done.json")


def finished(shard: PlannedShard, directory: Path, plan: str) -> WrittenFile | None:
    """Return a shard that an earlier call finished; ``None`` where it has to be written.

    It counts only if it was written by the same plan and its bytes are still the same.
    """
    written = noted(shard, directory, plan)
    if written is None or file_sha256(written.path) != written.sha256:
        return None
    return written


def noted(shard: PlannedShard, directory: Path, plan: str) -> WrittenFile | None:
    """Return what the note beside a shard says of it, without reading the shard."""
    path = directory / shard.name
    try:
        note = json.loads(journal_of(path).read_text(encoding="utf-8"))
        size = path.stat().st_size
    except (OSError, ValueError):
        return None
    wanted = {"plan": plan, "bytes": size}
    same = isinstance(note, dict) and all(note.get(k) == v for k, v in wanted.items())
    if not same or size != shard.nbytes or not isinstance(note.get("sha256"), str):
        return None
    return WrittenFile(path, size, note["sha256"])
