"""Divide a file into the parts that are coded each in its own way: the tensors of safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

_LENGTH = 8  # bytes that say how long a header is
_LONGEST = 100_000_000  # bytes of a header: what the safetensors library reads
_TINY = 4096  # bytes of a tensor that is never coded alone
_GROUP = 1 << 16  # bytes of a group, and of a tensor that may be in one
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "C64": 4}
_WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_WIDTHS |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
_OFFSETS = re.compile(r'"data_offsets":\[\d+,\d+\]')
_LEFT_OUT = '"data_offsets":[]'
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
        members: tensors that are coded together, as that takes fewer bytes; empty where it is one
            tensor. Name and type are then the first one's.
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
        return f"tensor {self.name!r}" if self.dtype else f"file {self.name!r}"

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
    return Divided(head, tuple(sections))


def runs(sections: Sequence[Section]) -> Iterator[tuple[Section, ...]]:
    """Yield sections that may be coded together.

    They follow each other, are short, and their elements are as wide.
    """
    run: list[Section] = []
    size = 0
    for section in sections:
        joins = bool(run) and bool(section.dtype) and run[0].width == section.width
        if run and not (joins and size + section.nbytes <= _GROUP):
            yield tuple(run)
            run, size = [], 0
        run.append(section)
        size += section.nbytes
    if run:
        yield tuple(run)


def groupings(run: Sequence[Section]) -> list[list[Section]]:
    """Return the ways in which the sections of a run may be coded: all as one, or few of them.

    The smallest are always together: alone, none shows the coder how its values are spread.
    """
    apart: list[list[Section]] = []
    for section in run:
        tiny = section.nbytes < _TINY
        if apart and tiny and apart[-1][0].nbytes < _TINY:
            apart[-1].append(section)
        else:
            apart.append([section])
    ways = [[joined(run)]]
    return ways if len(apart) == 1 else [*ways, [joined(group) for group in apart]]


def joined(group: Sequence[Section]) -> Section:
    """Return the section that others make together, which follow each other."""
    if len(group) == 1:
        return group[0]
    size = sum(section.nbytes for section in group)
    return replace(group[0], shape=(), nbytes=size, members=tuple(group))


def without_offsets(head: str) -> str:
    """Leave out of a header what its types and shapes say: where each tensor lies.

    Where they do not say it, in a header that another program wrote, nothing is left out.
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
        ValueError: it is no header, or one with elements of unknown size.
    """
    if _LEFT_OUT not in head:
        return head
    document = json.loads(head)
    if not isinstance(document, dict):
        raise ValueError("the header is no mapping")
    sizes = [_size(name, entry) for name, entry in document.items() if name != "__metadata__"]
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
