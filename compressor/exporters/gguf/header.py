"""The header of a GGUF file, decoded within its bounds: metadata, and where tensors lie.

The library's own reader believes every count, and one that was damaged keeps it busy for ever. So
each count is compared here with the bytes that are left, before anything goes through it. Source of
the layout: ``docs/gguf.md`` of ggml, version 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from compressor.errors import ModelError

Scalar = int | float | bool | str

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Types by number: the name, and the elements and bytes of a block."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_TEXT, _ARRAY = 8, 9
_U32, _U64 = 4, 10
_AXES = 4  # more than these ggml does not compute with
_SMALLEST_ENTRY = 8 + 4 + 1  # of metadata: the length of a key, a type, a value
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_ALIGNMENT = "general.alignment"
_USUAL_ALIGNMENT, _LEAST_ALIGNMENT = 32, 8
_KEPT = 8  # values of an array


@dataclass(frozen=True)
class ValueList:
    """An array of the metadata.

    Attributes:
        count: of its values.
        first: some of them, from the beginning.
    """

    count: int
    first: tuple[Scalar, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file.

    Attributes:
        shape: its axes, those that vary slowest first.
        kind: the name of its type.
        start: of its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says before its data.

    Attributes:
        nbytes: of the whole file.
        tensors: in the file's order.
    """

    nbytes: int
    metadata: dict[str, Scalar | ValueList]
    tensors: tuple[TensorEntry, ...]


def read_header(path: Path) -> Header:
    """Read the header of a file, and no data.

    Raises:
        ModelError: it is no GGUF file of a known version, or cut or damaged.
    """
    subject = f"GGUF file {str(path)!r}"
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_MAGIC))
            if start != _MAGIC:
                raise ModelError(subject, f"begins with {start!r}, not GGUF", "check its name")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reading(subject, data).header()
    except OSError as error:
        raise ModelError(
            subject, f"cannot be read ({error.strerror})", "check its permissions"
        ) from error


class _Reading:
    """Goes through a header from its beginning."""

    def __init__(self, subject: str, data: mmap.mmap):
        self._subject = subject
        self._data = data
        self._at = len(_MAGIC)

    def header(self) -> Header:
        """Return what is there."""
        version = self._whole(_U32)
        if version not in _VERSIONS:
            raise ModelError(
                self._subject,
                f"is of version {version}, and versions 2 and 3 are read, with little-endian "
                "numbers",
                "write it anew with llama.cpp's current tools",
            )
        tensors = self._count("tensors", _SMALLEST_TENSOR)
        entries = self._count("entries", _SMALLEST_ENTRY)
        metadata: dict[str, Scalar | ValueList] = {}
        for _ in range(entries):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"has {key!r} twice")
            metadata[key] = self._value(key)
        found = [self._tensor() for _ in range(tensors)]
        placed = tuple(self._placed(found, self._alignment(metadata)))
        return Header(len(self._data), metadata, placed)

    def _damaged(self, problem: str) -> ModelError:
        return ModelError(
            self._subject, problem, "it is cut or damaged; write or download it again"
        )

    def _take(self, size: int) -> int:
        """Return where the next bytes begin, and go beyond them."""
        start = self._at
        if size > len(self._data) - start:
            raise self._damaged(f"ends at byte {len(self._data):,}, in its header")
        self._at += size
        return start

    def _scalar(self, kind: int) -> int | float | bool:
        form = f"<{_SCALARS[kind]}"
        value: int | float | bool
        (value,) = struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))
        return value

    def _whole(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _count(self, what: str, smallest: int) -> int:
        """Return how many things follow somewhere, each of some bytes at least."""
        count = self._whole(_U64)
        if count > (len(self._data) - self._at) // smallest:
            raise self._damaged(f"has room for fewer than {count:,} {what}")
        return count

    def _text(self) -> str:
        size = self._whole(_U64)
        start = self._take(size)
        return self._data[start : start + size].decode("utf-8", "backslashreplace")

    def _value(self, key: str) -> Scalar | ValueList:
        kind = self._whole(_U32)
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._scalar(kind)
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"has {key!r} of the unknown type {kind}")

    def _array(self, key: str) -> ValueList:
        kind = self._whole(_U32)
        if kind == _TEXT:
            count = self._count(f"texts of {key!r}", 8)
            first = [self._text() for _ in range(min(count, _KEPT))]
            for _ in range(count - len(first)):
                self._take(self._whole(_U64))
            return ValueList(count, tuple(first))
        if kind not in _SCALARS:
            raise self._damaged(f"has {key!r}, an array of the unknown type {kind}")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._count(f"values of {key!r}", size)
        kept = tuple(self._scalar(kind) for _ in range(min(count, _KEPT)))
        self._take((count - len(kept)) * size)
        return ValueList(count, kept)

    def _tensor(self) -> TensorEntry:
        """Return a tensor, whose start counts from that of all data."""
        name = self._text()
        axes = self._whole(_U32)
        if axes > _AXES:
            raise self._damaged(f"has tensor {name!r} with {axes:,} axes")
        shape = tuple(self._whole(_U64) for _ in range(axes))[::-1]
        number, start = self._whole(_U32), self._whole(_U64)
        if number not in TYPES:
            raise self._damaged(f"has tensor {name!r} of the unknown type {number}")
        kind, width, size = TYPES[number]
        if width > 1 and (not shape or shape[-1] % width):
            raise self._damaged(f"has tensor {name!r}, {list(shape)}, in blocks of {width}")
        return TensorEntry(name, shape, kind, start, prod(shape) // width * size)

    def _alignment(self, metadata: dict[str, Scalar | ValueList]) -> int:
        value = metadata.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        whole = isinstance(value, int) and value >= _LEAST_ALIGNMENT
        if not whole or not isinstance(value, int) or value & (value - 1):
            raise self._damaged(f"has {value} as {_ALIGNMENT}, which is not a power of two")
        return value

    def _placed(self, found: list[TensorEntry], alignment: int) -> Iterator[TensorEntry]:
        """Yield tensors with their places in the file, none of which lies in another's."""
        names = {tensor.name for tensor in found}
        data = self._at + -self._at % alignment
        end = 0
        for tensor in sorted(found, key=lambda each: (each.start, each.nbytes)):
            if tensor.start < end or tensor.start % alignment:
                raise self._damaged(f"has tensor {tensor.name!r} where another one is")
            end = tensor.start + tensor.nbytes
            if data + end > len(self._data):
                size = len(self._data)
                raise self._damaged(
                    f"ends at byte {size:,}, and tensor {tensor.name!r} at {data + end:,}"
                )
        if len(names) < len(found):
            raise self._damaged("has two tensors of one name")
        for tensor in found:
            start = data + tensor.start
            yield TensorEntry(tensor.name, tensor.shape, tensor.kind, start, tensor.nbytes)
