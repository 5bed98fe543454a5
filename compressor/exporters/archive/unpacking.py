"""Take files, or single tensors, out of an archive."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import numpy as np

from compressor.errors import InputError, ModelError, SpecError, suggestion
from compressor.exporters.archive.coder import checksum, decode, threads
from compressor.exporters.archive.index import (
    LENGTH,
    MAGIC,
    Chunk,
    PackedFile,
    Part,
    Section,
    member_sums,
    prefix_of,
    read_index,
)
from compressor.files import scratch, switch
from compressor.models.codec.headers import METADATA
from compressor.progress import SILENT, Progress
from compressor.types.exporter import PackedFormat, UnpackedFile
from compressor.types.parallel import WAITING, in_order
from compressor.types.tensors import Array

_MOST_GROWTH, _ALWAYS = 1000, 200_000_000  # times its size, and bytes, that an archive may become
_DAMAGED = "the archive is damaged; copy it again, or export the model again"


class ArchiveFormat(PackedFormat):
    """``model.archive``, as the exporter ``archive`` writes it."""

    def holds(self, path: Path) -> bool:
        """Whether the file begins as an archive does."""
        try:
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    def unpack(
        self,
        path: Path,
        folder: Path,
        tensors: Sequence[str] = (),
        *,
        force: bool = False,
        progress: Progress = SILENT,
    ) -> tuple[UnpackedFile, ...]:
        """Take the files out; see the base class."""
        files = read_index(path)
        if tensors:
            files = _with_only(files, tensors, path)
        occupied = folder.is_dir() and any(folder.iterdir())
        if folder.exists() and not folder.is_dir():
            raise SpecError(f"folder {str(folder)!r}", "is a file", "name another one")
        if occupied and not force:
            raise SpecError(
                f"folder {str(folder)!r}",
                "holds files already",
                "name a new one, or give --force to replace files of the same names",
            )
        _check_room(path, folder, sum(file.nbytes for file in files))
        new = not folder.exists()
        made = []
        try:
            with switch(folder) as (staged, _):
                total = sum(file.nbytes for file in files)
                with progress.stage(f"unpack {path.name}", total) as advance:
                    for file in files:
                        made.append(_write(path, file, staged / file.name))
                        advance(sum(one.bytes for one in made))
        finally:
            if new and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        return tuple(made)

    @contextmanager
    def unpacked(self, path: Path) -> Iterator[Path]:
        """Yield a temporary folder with the files."""
        with scratch() as folder:
            self.unpack(path, folder)
            yield folder

    def damaged_tensors(self, path: Path) -> tuple[str, ...]:
        """Return the tensors that damaged chunks destroy; no chunk that is whole is decoded."""
        damaged: dict[str, None] = {}
        try:
            files = read_index(path)
        except ModelError:
            return ()
        with path.open("rb") as source:
            for piece in (piece for file in files for piece in _pieces(file)):
                data = _stored(source.fileno(), piece.chunk)
                if checksum(data) != piece.chunk.checksum:
                    lost = (section for section in _lost(piece, data) if section.dtype)
                    damaged.update(dict.fromkeys(section.name for section in lost))
        return tuple(damaged)

    def stored_bytes(self, path: Path) -> dict[str, int]:
        """Return the bytes that each tensor takes in the archive, by name."""
        sizes: dict[str, int] = {}
        for file in read_index(path):
            for part in file.parts if file.head else ():
                whole = max(1, part.section.nbytes)
                for tensor in part.section.tensors:  # of what is coded together, its share
                    sizes[tensor.name] = round(part.stored * tensor.nbytes / whole)
        return sizes


def _check_room(path: Path, folder: Path, takes: int) -> None:
    """Refuse an archive whose files would fill the disk, before any is written.

    Raises:
        ModelError: they are far larger than any that were packed into so few bytes.
        InputError: there is no room for them.
    """
    subject, size = f"archive {str(path)!r}", path.stat().st_size
    if takes > _MOST_GROWTH * size + _ALWAYS:
        raise ModelError(subject, f"would become {takes:,} bytes, from {size:,}", _DAMAGED)
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = disk_usage(place).free
    if takes > free:
        problem = f"becomes {takes:,} bytes, and {str(place)!r} has room for {free:,}"
        raise InputError(
            subject, problem, "free some space there, or set TMPDIR to a folder elsewhere"
        )


def _write(path: Path, file: PackedFile, target: Path) -> UnpackedFile:
    """Write a file, many chunks of it decoded at once, and compare its hash.

    Raises:
        ModelError: a chunk is damaged, or the file is not what was put in.
    """
    digest = hashlib.sha256()
    with (
        target.open("xb") as out,
        path.open("rb") as source,
        ThreadPoolExecutor(threads(), "archive") as workers,
    ):
        prefix = prefix_of(file.head)
        digest.update(prefix)
        out.write(prefix)
        work = partial(_decoded, source.fileno(), path)
        for data in in_order(workers, work, _pieces(file), threads() + WAITING):
            digest.update(data.data)
            out.write(data.data)
    sha256 = digest.hexdigest()
    if file.sha256 and sha256 != file.sha256:
        raise ModelError(
            f"file {file.name!r} of archive {str(path)!r}",
            "is not the file that was packed: its SHA-256 differs",
            _DAMAGED,
        )
    return UnpackedFile(file.name, target.stat().st_size, sha256)


class _Piece(NamedTuple):
    """A chunk of a part, and how many bytes it has once it is decoded."""

    part: Part
    chunk: Chunk
    nbytes: int


def _pieces(file: PackedFile) -> Iterator[_Piece]:
    for part in file.parts:
        for number, chunk in enumerate(part.chunks):
            left = part.section.nbytes - number * part.step
            yield _Piece(part, chunk, min(part.step, left))


def _decoded(handle: int, path: Path, piece: _Piece) -> Array:
    """Read and decode a chunk.

    Raises:
        ModelError: its checksum differs, or it is not an archive.
    """
    section, chunk = piece.part.section, piece.chunk
    data = _stored(handle, chunk)
    if checksum(data) != chunk.checksum:
        lost = _lost(piece, data)
        beside = f" and {len(lost) - 1} coded with it" if len(lost) > 1 else ""
        raise ModelError(
            f"{lost[0].title}{beside} of archive {str(path)!r}",
            "has another checksum than the one stored for it",
            _DAMAGED,
        )
    try:
        whole = decode(memoryview(data), chunk.lengths, piece.part.form, piece.nbytes)
    except ValueError as error:
        subject = f"{section.title} of archive {str(path)!r}"
        raise ModelError(subject, f"cannot be decoded ({error})", _DAMAGED) from error
    if not piece.part.wanted:
        return whole
    starts = [(tensor.start - section.start, tensor.nbytes) for tensor in piece.part.wanted]
    return np.concatenate([whole[start : start + size] for start, size in starts])


def _stored(handle: int, chunk: Chunk) -> bytes:
    """Read a chunk as it is stored; it is shorter where the archive ends."""
    return os.pread(handle, chunk.stored, chunk.start)


def _lost(piece: _Piece, data: bytes) -> tuple[Section, ...]:
    """Return what a damaged chunk destroys: of tensors coded together, those that are others."""
    section, sums = piece.part.section, piece.part.sums
    if not sums:
        return (section,)
    try:
        form = piece.part.form
        whole = decode(memoryview(data), piece.chunk.lengths, form, piece.nbytes, damaged=True)
    except ValueError:
        return section.members  # where each lies is no longer known
    pairs = zip(section.members, sums, member_sums(section, whole), strict=True)
    return tuple(member for member, was, now in pairs if was != now) or section.members


def _with_only(
    files: Sequence[PackedFile], tensors: Sequence[str], path: Path
) -> tuple[PackedFile, ...]:
    """Leave out what is not asked for."""
    inside = [part.section for file in files if file.head for part in file.parts]
    names = [tensor.name for section in inside for tensor in section.tensors]
    for name in tensors:
        if name not in names:
            raise SpecError(f"tensor {name!r}", f"is not in {str(path)!r}", suggestion(name, names))
    selected_files = []
    for file in files:
        parts: list[Part] = []
        taken: list[Section] = []
        for part in file.parts if file.head else ():
            selected = tuple(t for t in part.section.tensors if t.name in tensors)
            if selected:
                parts.append(replace(part, wanted=selected if part.section.members else ()))
                taken += selected
        if parts:
            head = head_of(file.head, taken)
            size = len(prefix_of(head)) + sum(tensor.nbytes for tensor in taken)
            selected_files.append(PackedFile(file.name, size, "", head, tuple(parts)))
    return tuple(selected_files)


def head_of(head: str, sections: Sequence[Section]) -> str:
    """Return the header of a file that holds some tensors of another one alone, in this order."""
    document = json.loads(head)
    content = {k: v for k, v in document.items() if k == METADATA}
    end = 0
    for section in sections:
        offsets = [end, end + section.nbytes]
        content[section.name] = {**document[section.name], "data_offsets": offsets}
        end += section.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % LENGTH)
