"""Read flatbuffers by the numbers of their fields, within the bounds of the file.

The layout is that of https://flatbuffers.dev/internals: a table begins with the distance to the
list of its fields' places, and text, vectors and other tables lie where their fields point.
LiteRT, ONNX Runtime and ExecuTorch write such files; none of their packages is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from compressor.errors import SpecError
from compressor.types.tensors import Array

_LIMIT = 2**31  # bytes of a file
_MARK = slice(4, 8)
_AGAIN = 4  # times the file's size that may be read: parts may overlap, but not without end
_MORE = 1 << 20  # bytes
_Default = TypeVar("_Default", int, float)


def check_size(size: int, kind: str) -> None:
    """Raise ``SpecError`` for an export of more bytes than a flatbuffer can have."""
    if size >= _LIMIT:
        raise SpecError(
            f"export {kind}",
            f"takes {size:,} bytes, and a file of this format 2 GB at most",
            "export onnx, whose weights may have a file of their own",
        )


@dataclass
class Flatbuffer:
    """The bytes of a file, and how many of them may still be read."""

    data: memoryview
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = _AGAIN * len(self.data) + _MORE

    def root(self, mark: bytes | None = None) -> Table:
        """Return the table that all else hangs on.

        Args:
            mark: the four bytes that files of the format have; not compared if not given.

        Raises:
            ValueError: the file is cut, damaged or of another format; so do all that read.
        """
        found = bytes(self.data[_MARK])
        if mark is not None and found != mark:
            raise ValueError(f"it begins with {found!r} and not with {mark!r}")
        return Table(self, self.indirect(0))

    def number(self, place: int, kind: str) -> int | float:
        """Return the number at a place; ``kind`` is a letter of :mod:`struct`."""
        try:
            (value,) = struct.unpack_from(f"<{kind}", self.data, place)
        except struct.error as error:
            raise ValueError(f"it ends before byte {place:,}") from error
        return value if isinstance(value, float) else int(value)

    def indirect(self, place: int) -> int:
        """Return where an offset leads."""
        return place + int(self.number(place, "I"))

    def part(self, place: int, size: int) -> memoryview:
        """Return some bytes, which are not copied."""
        if not 0 <= place <= place + size <= len(self.data):
            raise ValueError(f"it has {size:,} bytes at {place:,}, beyond its end")
        self._left -= size
        if self._left < 0:
            raise ValueError("its parts overlap many times")
        return self.data[place : place + size]


@dataclass(frozen=True)
class Table:
    """A table; its fields are known by their numbers in the format's schema."""

    file: Flatbuffer
    place: int

    def at(self, number: int) -> int:
        """Return the place of a field; 0 if the table does not have it."""
        layout = self.place - int(self.file.number(self.place, "i"))
        if layout < 0:
            raise ValueError(f"a table has its layout at {layout:,}")
        slot = 4 + 2 * number
        if slot + 2 > self.file.number(layout, "H"):
            return 0
        offset = int(self.file.number(layout + slot, "H"))
        return self.place + offset if offset else 0

    def number(self, number: int, kind: str, default: _Default = 0) -> _Default:
        """Return a number; ``kind`` is a letter of :mod:`struct`."""
        place = self.at(number)
        return type(default)(self.file.number(place, kind)) if place else default

    def table(self, number: int) -> Table | None:
        """Return the table that a field leads to."""
        place = self.at(number)
        return Table(self.file, self.file.indirect(place)) if place else None

    def tables(self, number: int) -> Iterator[Table]:
        """Yield the tables of a vector."""
        place, count = self._vector(number)
        self.file.part(place, 4 * count)
        for index in range(count):
            yield Table(self.file, self.file.indirect(place + 4 * index))

    def text(self, number: int) -> str:
        """Return a text; empty if there is none."""
        place, count = self._vector(number)
        return bytes(self.file.part(place, count)).decode("utf-8", "replace")

    def texts(self, number: int) -> list[str]:
        """Return the texts of a vector."""
        place, count = self._vector(number)
        self.file.part(place, 4 * count)
        found = []
        for index in range(count):
            start = self.file.indirect(place + 4 * index)
            size = int(self.file.number(start, "I"))
            found.append(bytes(self.file.part(start + 4, size)).decode("utf-8", "replace"))
        return found

    def array(self, number: int, dtype: str) -> Array:
        """Return a vector of numbers, which is not copied."""
        place, count = self._vector(number)
        numpy = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self.file.part(place, count * numpy.itemsize), numpy)

    def _vector(self, number: int) -> tuple[int, int]:
        """Return where the items of a vector are, and how many."""
        place = self.at(number)
        if not place:
            return 0, 0
        start = self.file.indirect(place)
        return start + 4, int(self.file.number(start, "I"))
