"""The index of an archive: which files are in it, in which parts, and where each chunk lies.

An archive is :data:`MAGIC`, the chunks one after the other, the index, and a
footer. The index is JSON, coded like other streams. It names no tensors: it holds the header of
each safetensors file as it is, and the parts follow in the order of their data. The footer says how
long the index is as it is stored and as JSON, holds the SHA-256 of both numbers and the stored
index, and ends with the magic bytes backwards. So every byte of the file is under some checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compressor.errors import ModelError, SpecError
from compressor.exporters.archive.coder import SUM, compressed, decompressed
from compressor.exporters.archive.forms import Form
from compressor.exporters.archive.sections import (
    Divided,
    Section,
    divide_by,
    joined,
    with_offsets,
    without_offsets,
)
from compressor.types.tensors import Array

MAGIC = b"CMPRSAR1"
"""What an archive begins with."""

SCHEMA = 2
TEXT_LEVEL = 19  # of what is small and repeats itself

ENTRY = 20
"""About the bytes that a part takes in the index."""

_MEMBER_SUM = 2  # bytes of the checksum of one of several tensors; the chunk has a longer one
_END = MAGIC[::-1]
_NUMBER = 8
_FOOTER = 2 * _NUMBER + hashlib.sha256().digest_size + len(_END)
_LONGEST = 1 << 30  # bytes of an index as JSON
_DAMAGED = "it is damaged; copy it again, or export the model again"


@dataclass(frozen=True)
class Chunk:
    """Where a coded chunk lies.

    Attributes:
        start: its first byte in the archive.
        lengths: bytes of its streams.
        checksum: of what is stored.
    """

    start: int
    lengths: tuple[int, ...]
    checksum: str

    @property
    def stored(self) -> int:
        """Bytes that it takes."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Part:
    """A part of a file, and how it is stored.

    Attributes:
        section: which part it is.
        form: how its chunks were taken apart.
        step: bytes in a chunk, before it was coded.
        chunks: they follow each other.
        sums: checksums of its tensors before they were coded, where they are coded together: they
            tell which of them is damaged.
        wanted: of tensors that are coded together, those that are asked for; empty for all.
    """

    section: Section
    form: Form
    step: int
    chunks: tuple[Chunk, ...]
    sums: tuple[str, ...] = ()
    wanted: tuple[Section, ...] = ()

    @property
    def stored(self) -> int:
        """Bytes that it takes in the archive."""
        return sum(chunk.stored for chunk in self.chunks)


@dataclass(frozen=True)
class PackedFile:
    """A file in an archive.

    Attributes:
        name: its name.
        nbytes: its size.
        sha256: the hash of its bytes.
        head: the header of a safetensors file.
        parts: what it is made of, in order.
    """

    name: str
    nbytes: int
    sha256: str
    head: str
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the entry in the index."""
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "header": without_offsets(self.head),
            "parts": [
                [
                    str(part.form),
                    part.step,
                    [list(chunk.lengths) for chunk in part.chunks],
                    "".join(chunk.checksum for chunk in part.chunks),
                    "".join(part.sums),
                ]
                for part in self.parts
            ],
        }


def index_bytes(files: Sequence[PackedFile]) -> bytes:
    """Return the end of an archive: its index and footer."""
    document = {"schema": SCHEMA, "files": [file.as_json() for file in files]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    stored = compressed(text, TEXT_LEVEL, small=True)
    numbers = b"".join(len(x).to_bytes(_NUMBER, "little") for x in (stored, text))
    return stored + numbers + hashlib.sha256(numbers + stored).digest() + _END


def read_index(path: Path) -> tuple[PackedFile, ...]:
    """Read what is in an archive.

    Raises:
        SpecError: there is no such file.
        ModelError: it is no archive, cut or damaged.
    """
    subject = f"archive {str(path)!r}"
    if not path.is_file():
        raise SpecError(subject, "does not exist or is a folder", "give a file model.archive")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(
                subject,
                "does not begin as an archive does",
                "give one that compress run exported; if it is one, it is damaged: copy it again",
            )
        if size < len(MAGIC) + _FOOTER:
            _fail(subject, "is cut: it ends before its index")
        file.seek(size - _FOOTER)
        footer = file.read(_FOOTER)
        if not footer.endswith(_END):
            _fail(subject, "is cut, or its end is damaged")
        numbers = footer[: 2 * _NUMBER]
        stored = int.from_bytes(numbers[:_NUMBER], "little")
        start = size - _FOOTER - stored
        if start < len(MAGIC):
            _fail(subject, "has a damaged index: it is longer than the file")
        file.seek(start)
        data = file.read(stored)
    if hashlib.sha256(numbers + data).digest() != footer[2 * _NUMBER : -len(_END)]:
        _fail(subject, "has a damaged index: its checksum differs")
    length = int.from_bytes(numbers[_NUMBER:], "little")
    return _parsed(data, length, start, subject)


def _parsed(data: bytes, length: int, end: int, subject: str) -> tuple[PackedFile, ...]:
    try:
        if length > _LONGEST:
            raise ValueError(f"it has {length} bytes")
        document = json.loads(decompressed(data, length))
        schema = document["schema"]
        if schema == SCHEMA:
            return _files(document["files"], end)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        _fail(subject, f"has an index that cannot be read ({reason})")
    raise ModelError(
        subject,
        f"has schema {schema!r}, this version reads {SCHEMA}",
        "install the version that wrote it, or export the model again",
    )


def _files(entries: Any, end: int) -> tuple[PackedFile, ...]:
    files, place = [], len(MAGIC)
    for entry in entries:
        name, size, digest, head = (entry[k] for k in ("name", "bytes", "sha256", "header"))
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file")
        if type(size) is not int or size < 0 or not isinstance(head, str):
            raise ValueError(f"{name!r} is not described")
        head = with_offsets(head)
        sections = list((divide_by(head, size) if head else _alone(name, size)).sections)
        parts = []
        for given in entry["parts"]:
            part = _part(sections, given, place)
            place += part.stored
            parts.append(part)
        if sections:
            raise ValueError(f"{name!r} lacks parts")
        files.append(PackedFile(name, size, str(digest), head, tuple(parts)))
    if place != end:
        raise ValueError("chunks do not fill the file")
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files have one name")
    return tuple(files)


def _alone(name: str, size: int) -> Divided:
    return Divided("", (Section(name, "", (), 0, size),))


def member_sums(section: Section, data: Array) -> tuple[str, ...]:
    """Return the checksums of tensors that are coded together.

    Args:
        section: what they make together.
        data: its bytes, uint8 ``[n]``.
    """
    places = [(tensor.start - section.start, tensor.nbytes) for tensor in section.members]
    digests = (hashlib.sha256(data[start : start + size].data) for start, size in places)
    return tuple(digest.hexdigest()[: 2 * _MEMBER_SUM] for digest in digests)


def _part(sections: list[Section], given: Any, place: int) -> Part:
    """Read the entry of the next part; its sections are taken off the list."""
    form, step, lengths, sums, joint = given
    of_each = 2 * _MEMBER_SUM
    count = max(1, len(joint) // of_each)
    if not isinstance(joint, str) or count > len(sections):
        raise ValueError("there are more parts than tensors")
    section = joined(sections[:count])
    del sections[:count]
    own_sums = tuple(joint[k * of_each : (k + 1) * of_each] for k in range(len(section.members)))
    digits = 2 * SUM
    if type(step) is not int or step < 1 or len(sums) != digits * len(lengths):
        raise ValueError(f"{section.name!r} is not described")
    if len(lengths) != -(-section.nbytes // step):
        raise ValueError(f"{section.name!r} lacks chunks")
    chunks = []
    for number, own in enumerate(lengths):
        if not all(type(length) is int and length >= 0 for length in own):
            raise ValueError(f"{section.name!r} has a chunk of {own!r} bytes")
        digest = sums[number * digits : (number + 1) * digits]
        chunks.append(Chunk(place, tuple(own), digest))
        place += chunks[-1].stored
    return Part(section, Form.named(form), step, tuple(chunks), own_sums)


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, problem, _DAMAGED)
