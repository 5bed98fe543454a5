"""Put files into an archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from compressor.archives import MAGIC
from compressor.hashing import file_sha256
from compressor.types.tensors import Array
from exporters.archive.coder import CHUNK, Coded, encode, in_order, threads
from exporters.archive.forms import WHOLE, Form, candidates
from exporters.archive.index import TEXT_LEVEL, Chunk, PackedFile, Part, index_bytes
from exporters.archive.sections import Section, divide

_PROBE = 128 * WHOLE  # bytes of a tensor on which all forms are tried
_CLOSE = 1.01  # those that are further behind the best there are not tried on the rest
_SMALL = 4 << 20  # bytes of a file of which every byte counts, and not how long decoding takes
_LIKELY = 2  # forms to which the slow coder is put, besides the plainest


@dataclass(frozen=True)
class _Source:
    """A file that goes into an archive, and how it is coded."""

    path: Path
    level: int
    small: bool


def pack(files: Sequence[Path], target: Path, level: int, advance: Callable[[int], None]) -> None:
    """Write an archive; one tensor after the other is read, and several of its chunks are coded
    at once.

    Args:
        files: what goes into it; their names differ.
        target: the archive, which is not there yet.
        level: Zstandard's, 1 to 22.
        advance: takes the bytes that have been coded so far.

    Raises:
        OSError: the disk is full.
    """
    packed: list[PackedFile] = []
    done = 0
    with target.open("xb") as out, ThreadPoolExecutor(threads(), "archive") as workers:
        out.write(MAGIC)
        for path in files:
            divided = divide(path)
            parts = []
            source = _Source(path, level, path.stat().st_size <= _SMALL)
            for section in divided.sections:
                parts.append(_write(workers, source, section, out))
                done += section.nbytes
                advance(done)
            size = path.stat().st_size
            packed.append(
                PackedFile(path.name, size, file_sha256(path), divided.head, tuple(parts))
            )
        out.write(index_bytes(packed))


def _write(workers: ThreadPoolExecutor, source: _Source, section: Section, out: BinaryIO) -> Part:
    """Code a part of a file, each of its chunks in the form that is best for all of them."""
    if not section.dtype:
        source = replace(source, level=max(source.level, TEXT_LEVEL))
    form, coded = _best(workers, source, section)
    chunks = []
    for chunk in coded:
        chunks.append(Chunk(out.tell(), chunk.lengths, chunk.checksum))
        out.write(chunk.data)
    return Part(section, form, CHUNK, tuple(chunks))


def _best(
    workers: ThreadPoolExecutor, source: _Source, section: Section
) -> tuple[Form, list[Coded]]:
    """Code a part in all forms that may be the smallest, and return that.

    Forms that make clearly more of its beginning are left out of the rest. Of equals the first
    wins.
    """
    if not section.nbytes:
        return Form(), []
    probe = next(_chunks(source.path, section))[:_PROBE]
    forms = candidates(probe, section.width, floating=section.floating)
    sizes = {form: len(encode(probe, form, source.level).data) for form in forms}
    if source.small:
        likely = sorted(forms, key=lambda form: (form != forms[0], sizes[form]))[: 1 + _LIKELY]
        sizes = {f: len(encode(probe, f, source.level, small=True).data) for f in likely}
    found: list[tuple[Form, list[Coded]]] = []
    for form, size in sizes.items():
        if size <= _CLOSE * min(sizes.values()):
            work = partial(encode, form=form, level=source.level, small=source.small)
            chunks = _chunks(source.path, section)
            found.append((form, list(in_order(workers, work, chunks))))
    return min(found, key=lambda pair: sum(len(coded.data) for coded in pair[1]))


def _chunks(path: Path, section: Section) -> Iterator[Array]:
    """Yield the bytes of a part, uint8 ``[n]``, chunk by chunk."""
    with path.open("rb") as file:
        file.seek(section.start)
        for place in range(0, section.nbytes, CHUNK):
            data = bytearray(file.read(min(CHUNK, section.nbytes - place)))
            yield np.frombuffer(data, np.uint8)
