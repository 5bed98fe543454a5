"""Divide a file into the parts that are coded each in its own way: the tensors of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

_LENGTH = 8  # bytes that say how long a header is
_LONGEST = 100_000_000  # bytes of a header: what the safetensors library reads
_TINY = 4096  # bytes of a tensor that is coded together with its neighbours
_GROUP = 1 << 16  # bytes of such a group
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "C64": 4}
_WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_FLOATS = ("F64", "F32", "C64", "F16", "BF16")


@dataclass(frozen=True)
class Section:
    """A part of a file.

    Attributes:
        name: the tensor's, or that of the file.
        dtype: its element type, as safetensors calls it; empty where it is no tensor.
        shape: its shape.
        start: its first byte in the file.
        nbytes: its size.
        members: tensors that are coded together, as they are too small to be coded well alone;
            empty where it is one tensor. Name and type are then the first one's.
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
        """How messages call it."""
        if not self.dtype:
            return f"file {self.name!r}"
        others = len(self.members) - 1
        return f"tensor {self.name!r}" + (f" (or {others} beside it)" if others > 0 else "")

    @property
    def width(self) -> int:
        """Bytes of an element; 1 where elements may share bytes, or are not known."""
        width = _WIDTHS.get(self.dtype, 1)
        return width if self.nbytes % width == 0 else 1

    @property
    def floating(self) -> bool:
        """Elements are floats of two bytes or more."""
        return any(tensor.dtype in _FLOATS for tensor in self.tensors)


@dataclass(frozen=True)
class Divided:
    """A file and its parts, which lie behind its head without gaps.

    Attributes:
        head: the header of a safetensors file, without its length; empty for any other file.
        sections: the parts in their order.
    """

    head: str
    sections: tuple[Section, ...]

    @property
    def prefix(self) -> bytes:
        """The bytes before the first part."""
        return prefix_of(self.head)


def prefix_of(head: str) -> bytes:
    """Return the bytes of a safetensors file before its data."""
    text = head.encode()
    return len(text).to_bytes(_LENGTH, "little") + text if head else b""


def divide(path: Path) -> Divided:
    """Divide a file; one that is not quite a safetensors file is one part."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        text = file.read(length) if 0 < length <= min(size, _LONGEST) else b""
    try:
        head = text.decode()
        divided = divide_by(head, size)
    except ValueError:
        return _whole(path.name, size)
    return divided


def divide_by(head: str, size: int) -> Divided:
    """Divide a safetensors file of so many bytes by its header.

    Raises:
        ValueError: it is no such header, or tensors do not follow each other to the file's end.
    """
    document = json.loads(head)
    if not isinstance(document, dict):
        raise ValueError("the header is no mapping")
    prefix = len(prefix_of(head))
    entries = {name: e for name, e in document.items() if name != "__metadata__"}
    sections = [_section(name, entry, prefix) for name, entry in entries.items()]
    sections.sort(key=lambda section: (section.start, section.nbytes))
    end = prefix
    for section in sections:
        if section.start != end:
            raise ValueError(f"tensor {section.name!r} does not follow the one before it")
        end += section.nbytes
    if end != size:
        raise ValueError("tensors do not fill the file")
    return Divided(head, tuple(_grouped(sections)))


def _grouped(sections: Sequence[Section]) -> Iterator[Section]:
    """Put tiny tensors that follow each other, and whose elements are as wide, into one part."""
    group: list[Section] = []
    for section in sections:
        tiny = section.nbytes < _TINY
        fits = bool(group) and group[0].width == section.width
        if group and not (tiny and fits and _end(group) - group[0].start < _GROUP):
            yield _joined(group)
            group = []
        if tiny:
            group.append(section)
        else:
            yield section
    if group:
        yield _joined(group)


def _joined(group: Sequence[Section]) -> Section:
    if len(group) == 1:
        return group[0]
    first = group[0]
    return replace(first, shape=(), nbytes=_end(group) - first.start, members=tuple(group))


def _end(group: Sequence[Section]) -> int:
    return group[-1].start + group[-1].nbytes


def head_of(head: str, sections: Sequence[Section]) -> str:
    """Return the header of a file that holds some tensors of another one alone, in this order."""
    document = json.loads(head)
    content = {k: v for k, v in document.items() if k == "__metadata__"}
    end = 0
    for section in sections:
        offsets = [end, end + section.nbytes]
        content[section.name] = {**document[section.name], "data_offsets": offsets}
        end += section.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _LENGTH)


def _section(name: str, entry: Any, prefix: int) -> Section:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            whole = all(type(length) is int and length >= 0 for length in shape)
            if whole and 0 <= start <= end and prod(shape) <= 8 * (end - start):
                return Section(name, dtype, tuple(shape), prefix + start, end - start)
    raise ValueError(f"tensor {name!r} is not described")


def _whole(name: str, size: int) -> Divided:
    return Divided("", (Section(name, "", (), 0, size),))
