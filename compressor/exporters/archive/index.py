"""The index of an archive: which files are in it, in which parts, and where each chunk lies.

A file is divided into the parts that are coded each in its own way: the tensors of safetensors.

An archive is :data:`MAGIC`, the chunks one after the other, the index, and a footer. The index is
JSON, coded like other streams. It names no tensors: it holds the header of each safetensors file as
it is, and the parts follow in the order of their data. The footer holds the length of the index as
it is stored and as JSON, the SHA-256 of both numbers and the stored index, and the magic bytes
backwards. So every byte of the file is under some checksum."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from compressor.errors import ModelError, SpecError
from compressor.exporters.archive.coder import CHUNK, SUM, coded_text, decoded_text
from compressor.exporters.archive.contexts import MOST_BYTES, MOST_SYMBOLS
from compressor.exporters.archive.forms import Form
from compressor.files import check_json_size, is_file_name
from compressor.models.codec.headers import LONGEST_HEADER, METADATA, parse_header
from compressor.types.tensors import Array

LENGTH = 8  # bytes that say how long a header is
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "C64": 4}
_WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_WIDTHS |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
_OFFSETS = re.compile(r'"data_offsets":\[\d+,\d+\]')
_LEFT_OUT = '"data_offsets":[]'
_FLOATS = ("F64", "F32", "C64", "F16", "BF16")
MAGIC = b"CMPRSAR1"
"""What an archive begins with."""

SCHEMA = 3
_READ = (2, SCHEMA)  # the former has no mixed forms
TEXT_LEVEL = 19  # of what is small and repeats itself

ENTRY = 20
"""About the bytes that a part takes in the index."""

_MEMBER_SUM = 2  # bytes of the checksum of one of several tensors; the chunk has a longer one
_END = MAGIC[::-1]
_NUMBER = 8
_FOOTER = 2 * _NUMBER + hashlib.sha256().digest_size + len(_END)
_LONGEST = 32 << 20  # bytes of an index as JSON, more than the archive has
_SLACK = 1.01  # times the codes of which there may be so many: the last byte of a tensor is filled
_DAMAGED = "it is damaged; copy it again, or export the model again"


@dataclass(frozen=True)
class Section:
    """A part of a file: a tensor, or all of a file that is not safetensors.

    Attributes:
        dtype: its element type, as safetensors calls it; empty where it is not a tensor.
        start: its first byte in the file.
        members: tensors that are coded together, as that takes fewer bytes; empty for one tensor.
            Name and type are then the first one's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    members: tuple[Section, ...] = ()

    @property
    def tensors(self) -> tuple[Section, ...]:
        """The tensors in it."""
        return self.members or (self,)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"tensor {self.name!r}" if self.dtype else f"file {self.name!r}"

    @property
    def width(self) -> int:
        """Bytes of an element; 1 where elements may share bytes, or are not known."""
        width = _WIDTHS.get(self.dtype, 1)
        return width if self.nbytes % width == 0 else 1

    @property
    def floating(self) -> bool:
        """Whether elements are floats of two bytes or more."""
        return any(tensor.dtype in _FLOATS for tensor in self.tensors)


def prefix_of(head: str) -> bytes:
    """Return the bytes of a safetensors file before its data."""
    text = head.encode()
    return len(text).to_bytes(LENGTH, "little") + text if head else b""


def divide(path: Path) -> tuple[str, tuple[Section, ...]]:
    """Return the header of a safetensors file and its tensors, in the order of their data.

    Any other file has no header and is one part.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        text = file.read(length) if 0 < length <= min(size, LONGEST_HEADER) else b""
    try:
        head = text.decode()
        return head, tensors_of(head, size)
    except ValueError:
        return "", (Section(path.name, "", (), 0, size),)


def tensors_of(head: str, size: int) -> tuple[Section, ...]:
    """Return the tensors of a safetensors file of so many bytes.

    Raises:
        ValueError: it is not such a header, or tensors do not follow each other to the file's end.
    """
    try:
        header = parse_header(Path(), head.encode(), size)
    except ModelError as error:
        raise ValueError(error.problem) from error
    return tuple(Section(*tensor) for tensor in header.tensors.values())


def joined(group: Sequence[Section]) -> Section:
    """Return the section that others make together, which follow each other."""
    if len(group) == 1:
        return group[0]
    size = sum(section.nbytes for section in group)
    return replace(group[0], shape=(), nbytes=size, members=tuple(group))


def without_offsets(head: str) -> str:
    """Leave the places of tensors out of a header, where its types and shapes imply them.

    Nothing is left out of a header that another program wrote in another order.
    """
    short = _OFFSETS.sub(_LEFT_OUT, head)
    try:
        same = with_offsets(short) == head
    except ValueError:
        same = False
    return short if same else head


def with_offsets(head: str) -> str:
    """Invert :func:`without_offsets`.

    Raises:
        ValueError: it is not a header, or one with elements of unknown size.
    """
    if _LEFT_OUT not in head:
        return head
    document = json.loads(head)
    if not isinstance(document, dict):
        raise ValueError("the header is not a mapping")
    sizes = [_size(name, entry) for name, entry in document.items() if name != METADATA]
    ends = list(accumulate(sizes, initial=0))
    texts = head.split(_LEFT_OUT)
    if len(texts) != len(ends):
        raise ValueError("the header has another number of tensors than of places")
    places = [f'"data_offsets":[{start},{end}]' for start, end in pairwise(ends)]
    return "".join(text + place for text, place in zip(texts, [*places, ""], strict=True))


def _size(name: str, entry: Any) -> int:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape)} if dtype in _WIDTHS:
            if all(type(length) is int and length >= 0 for length in shape):
                return prod(shape) * _WIDTHS[dtype]
    raise ValueError(f"tensor {name!r} is not described")


@dataclass(frozen=True)
class Chunk:
    """Where a coded chunk starts in the archive, the bytes of its streams, and their checksum."""

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
    """A file in an archive: its size and hash, its header if it is safetensors, and its parts."""

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


def index_bytes(files: Sequence[PackedFile], *, mixed: bool = False) -> bytes:
    """Return the end of an archive: its index and footer; ``mixed`` as in ``coded_text``."""
    document = {"schema": SCHEMA, "files": [file.as_json() for file in files]}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    stored = coded_text(text, TEXT_LEVEL, mixed=mixed)
    numbers = b"".join(len(x).to_bytes(_NUMBER, "little") for x in (stored, text))
    return stored + numbers + hashlib.sha256(numbers + stored).digest() + _END


def read_index(path: Path) -> tuple[PackedFile, ...]:
    """Read what is in an archive.

    Raises:
        SpecError: there is no such file.
        ModelError: it is not an archive, or is cut or damaged.
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
                "does not begin like an archive",
                "give a file that compress run exported; copy it again if this is one",
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
    size = end + len(data)
    try:
        if length > _LONGEST + size:
            raise ValueError(f"it has {length} bytes")
        text = decoded_text(data, length)
        check_json_size(text, size)
        document = json.loads(text)
        if b"\\u" in text:  # half of a surrogate pair would fail later, where it is written
            json.dumps(document, ensure_ascii=False).encode()
        schema = document["schema"]
        if schema in _READ:
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
        if not is_file_name(name):
            raise ValueError(f"{name!r} is not a file name")
        if type(size) is not int or size < 0 or not isinstance(head, str):
            raise ValueError(f"{name!r} is not described")
        head = with_offsets(head)
        sections = list(tensors_of(head, size) if head else [Section(name, "", (), 0, size)])
        parts = []
        for fields in entry["parts"]:
            part = _part(sections, fields, place)
            place += part.stored
            parts.append(part)
        if sections:
            raise ValueError(f"{name!r} lacks parts")
        files.append(PackedFile(name, size, str(digest), head, tuple(parts)))
    if place != end:
        raise ValueError("chunks do not fill the file")
    _check_mixed([part for file in files for part in file.parts if part.form.mixed])
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files have one name")
    return tuple(files)


def _check_mixed(parts: Sequence[Part]) -> None:
    """Refuse more bits to be mixed than any archive has: they would take minutes."""
    codes = [part for part in parts if part.form.columns]
    symbols = sum(part.section.nbytes * 8 // part.form.bits for part in codes)
    others = sum(part.section.nbytes for part in parts if not part.form.columns)
    if symbols > _SLACK * MOST_SYMBOLS or others > MOST_BYTES:
        raise ValueError(f"{symbols} codes and {others} bytes are mixed")


def member_sums(section: Section, data: Array) -> tuple[str, ...]:
    """Return the checksums of tensors that are coded together.

    Args:
        data: its bytes, uint8 ``[n]``.
    """
    places = [(tensor.start - section.start, tensor.nbytes) for tensor in section.members]
    digests = (hashlib.sha256(data[start : start + size].data) for start, size in places)
    return tuple(digest.hexdigest()[: 2 * _MEMBER_SUM] for digest in digests)


def _part(sections: list[Section], fields: Any, place: int) -> Part:
    """Read the entry of the next part; its sections are taken off the list."""
    form, step, lengths, sums, joint = fields
    of_each = 2 * _MEMBER_SUM
    count = max(1, len(joint) // of_each)
    if not isinstance(joint, str) or count > len(sections):
        raise ValueError("there are more parts than tensors")
    section = joined(sections[:count])
    del sections[:count]
    starts = range(0, len(section.members) * of_each, of_each)
    member_digests = tuple(joint[start : start + of_each] for start in starts)
    digits = 2 * SUM
    if type(step) is not int or not 1 <= step <= CHUNK or len(sums) != digits * len(lengths):
        raise ValueError(f"{section.name!r} is not described")
    if len(lengths) != -(-section.nbytes // step):
        raise ValueError(f"{section.name!r} lacks chunks")
    chunks = []
    for number, streams in enumerate(lengths):
        if not all(type(length) is int and length >= 0 for length in streams):
            raise ValueError(f"{section.name!r} has a chunk of {streams!r} bytes")
        digest = sums[number * digits : (number + 1) * digits]
        chunks.append(Chunk(place, tuple(streams), digest))
        place += chunks[-1].stored
    return Part(section, Form.named(form), step, tuple(chunks), member_digests)


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, problem, _DAMAGED)
