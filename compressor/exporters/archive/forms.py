"""Forms of a tensor's bytes in which an order-0 entropy coder finds what is regular in them.

A coder of Huffman's kind, such as the one inside Zstandard, gives each byte a whole number of bits.
So narrow codes go several to a byte, a very common value is set apart from the others by a bit or
by its distances, and each byte of a wide element goes to a stream of its own, of which the one with
the exponents is regular. All forms can be undone to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from compressor.exporters.archive.contexts import (
    MOST_BYTES,
    MOST_SYMBOLS,
    coded_bytes,
    coded_symbols,
    read_bytes,
    read_symbols,
)
from compressor.models.codec.bit_stream import pack_bits, stream_bytes, unpack_bits
from compressor.types.tensors import Array

Sparse: TypeAlias = Literal["", "mask", "gaps"]

WHOLE = 840
"""Bytes of which a multiple holds whole symbols of any width."""

_BYTE = 8
_MIXED = "mixed"
_FAR = 255  # a gap that goes on
_TURNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHARED = {1: 1, 2: 2, 3: 4, 4: 4}  # width in which symbols share bytes; wider ones do not
_WAYS: tuple[Sparse, ...] = ("", "mask", "gaps")


@dataclass(frozen=True)
class Form:
    """How the elements of a chunk become streams of bytes.

    Attributes:
        bits: of a symbol: 1 to 8, of which the chunk is a stream as
            :mod:`compressor.models.codec.bit_stream` writes it, or 16, 32 or 64.
        sparse: how the most common symbol is left out: by a ``mask`` with one bit a symbol, set
            where another one is, or by the ``gaps`` between the others; empty where it is not.
        packed: whether symbols of 4 bits and fewer share bytes; otherwise each has its own.
        turned: the sign of each element is moved after its mantissa, so that all bits of a
            float's exponent lie in one byte.
        mixed: it is one stream, coded bit by bit in the contexts that
            :mod:`compressor.exporters.archive.contexts` has: symbols of up to 7 bits as a matrix,
            others as bytes.
        columns: of the matrix.
        kernel: columns that belong together.
    """

    bits: int = 8
    sparse: Sparse = ""
    packed: bool = True
    turned: bool = False
    mixed: bool = False
    columns: int = 0
    kernel: int = 0

    def __str__(self) -> str:
        if self.mixed:
            size = f"-{self.columns}-{self.kernel}" if self.columns else ""
            return f"{self.bits}-{_MIXED}{size}"
        parts = [f"{self.bits}", self.sparse, "" if self.packed else "apart"]
        return "-".join(part for part in (*parts, "turned" if self.turned else "") if part)

    @classmethod
    def named(cls, name: str) -> Form:
        """Return the form of a name that ``str`` gave; raises ``ValueError`` for others."""
        if name in _NAMES:
            return _NAMES[name]
        match str(name).split("-"):
            case [
                ("1" | "2" | "3" | "4" | "5" | "6" | "7" | "8") as bits,
                "mixed",
                columns,
                kernel,
            ]:
                sizes = [int(size) for size in (columns, kernel) if size.isdecimal()]
                if len(sizes) == 2 and min(sizes) > 0 and not sizes[0] % sizes[1]:
                    return cls(int(bits), mixed=True, columns=sizes[0], kernel=sizes[1])
            case [("8" | "16" | "32" | "64") as bits, "mixed"]:
                return cls(int(bits), mixed=True)
        raise ValueError(f"there is no form {name!r}")

    def streams(self, data: Array) -> list[Array]:
        """Take a chunk apart.

        Args:
            data: its bytes, uint8 ``[n]``, whole elements.

        Returns:
            Streams of bytes, uint8 ``[m]`` each: if the common symbol is left out, that symbol and
            where it is; then the symbols, in planes if they are wide.
        """
        symbols = self._symbols(data)
        if not self.sparse:
            return self._stored(symbols)
        common = most_common(symbols)
        others = symbols != common
        places = np.flatnonzero(others)  # indexing with it is several times faster than with a mask
        where = np.packbits(others) if self.sparse == "mask" else _gaps(places)
        head = np.array([common], symbols.dtype).view(np.uint8)
        return [head, where, *self._stored(symbols[places])]

    def of_any_length(self, place: int) -> bool:
        """Whether the stream in a place may have any length, as that of gaps may."""
        return self.sparse == "gaps" and place == 1

    @property
    def shared(self) -> int:
        """Bits that a symbol takes in a stream."""
        return _SHARED.get(self.bits, _BYTE) if self.packed else _BYTE

    def mixed_stream(self, data: Array) -> bytes:
        """Code a chunk, uint8 ``[n]``, in contexts."""
        if not self.columns:
            return coded_bytes(data.tobytes(), self.bits // _BYTE)
        return coded_symbols(self._symbols(data), self.bits, self.columns, self.kernel)

    def mixed_chunk(self, stream: bytes, nbytes: int) -> Array:
        """Invert :meth:`mixed_stream`.

        Raises:
            ValueError: the chunk has more symbols than are ever mixed.
        """
        if not self.fits(nbytes):
            raise ValueError(f"a mixed chunk has {nbytes} bytes")
        if not self.columns:
            return np.frombuffer(read_bytes(stream, nbytes, self.bits // _BYTE), np.uint8)
        count = self.symbols_of(nbytes)
        symbols = read_symbols(stream, count, self.bits, self.columns, self.kernel)
        return symbols if self.bits == _BYTE else _packed(symbols, self.bits)[:nbytes]

    def symbols_of(self, nbytes: int) -> int:
        """Return how many symbols a chunk of so many bytes has; of narrow ones to a whole byte."""
        padded = nbytes + -nbytes % self.bits if self.bits < _BYTE else nbytes
        return padded * _BYTE // self.bits

    def fits(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes may be mixed."""
        if not self.columns:
            return nbytes <= MOST_BYTES
        rows = -(-nbytes * _BYTE // self.bits // self.columns) + 1
        return rows * self.columns <= MOST_SYMBOLS

    def _symbols(self, data: Array) -> Array:
        if self.bits < _BYTE:
            rest = -data.size % self.bits
            whole = np.concatenate([data, np.zeros(rest, np.uint8)]) if rest else data
            return _unpacked(whole, self.bits, whole.size * _BYTE // self.bits)
        if self.bits == _BYTE:
            return data
        wide = data.view(_TURNED[self.bits // _BYTE])
        if not self.turned:
            return wide
        one = wide.dtype.type(1)
        turned: Array = (wide << one) | (wide >> wide.dtype.type(self.bits - 1))
        return turned

    def _stored(self, symbols: Array) -> list[Array]:
        if self.bits <= _BYTE:
            return [symbols if self.shared == _BYTE else _packed(symbols, self.shared)]
        planes = symbols.view(np.uint8).reshape(-1, self.bits // _BYTE).T
        return [np.ascontiguousarray(plane) for plane in planes]


class Reader:
    """Puts the streams of a chunk together; the length of each is known before it is read."""

    def __init__(self, form: Form, nbytes: int):
        self._form = form
        self._nbytes = nbytes
        self._width = max(1, form.bits // _BYTE)
        self._count = form.symbols_of(nbytes)
        self._streams: list[Array] = []
        self._places: Array | None = None  # of the symbols that are not the common one

    @property
    def next_length(self) -> int | None:
        """The length of the next stream, ``-1`` where it may be any; ``None`` after the last."""
        head = 2 if self._form.sparse else 0
        place = len(self._streams)
        if place < head:
            if place == 0:
                return self._width
            return -1 if self._form.of_any_length(place) else -(-self._count // _BYTE)
        if place - head >= self._width:
            return None
        return stream_bytes(self._held, self._form.shared)

    @property
    def most(self) -> int:
        """The greatest length of a stream that may have any length."""
        return 2 * self._count + 1

    def give(self, stream: Array) -> None:
        """Take the next stream, uint8 ``[m]``; raises ``ValueError`` if it cannot be one."""
        self._streams.append(stream)
        if self._form.sparse and len(self._streams) == 2:
            if self._form.sparse == "mask":
                flags = np.unpackbits(stream, count=self._count).view(np.bool_)
                self._places = np.flatnonzero(flags)
            else:
                self._places = _far_places(stream, self._count)

    def whole(self) -> Array:
        """Return the chunk, uint8 ``[nbytes]``."""
        form = self._form
        streams = self._streams[2:] if form.sparse else self._streams
        symbols = self._loaded(streams)
        if self._places is not None:
            full = np.full(self._count, self._streams[0].view(symbols.dtype)[0], symbols.dtype)
            full[self._places] = symbols
            symbols = full
        if form.bits < _BYTE:
            return _packed(symbols, form.bits)[: self._nbytes]
        if form.turned:
            one = symbols.dtype.type(1)
            symbols = (symbols >> one) | (symbols << symbols.dtype.type(form.bits - 1))
        return symbols.view(np.uint8)

    @property
    def _held(self) -> int:
        return self._count if self._places is None else self._places.size

    def _loaded(self, streams: list[Array]) -> Array:
        form = self._form
        if form.bits <= _BYTE:
            alone = form.shared == _BYTE
            return streams[0] if alone else _unpacked(streams[0], form.shared, self._held)
        joined = np.empty((streams[0].size, self._width), np.uint8)
        for index, stream in enumerate(streams):
            joined[:, index] = stream
        return joined.ravel().view(_TURNED[self._width])


def candidates(data: Array, width: int, *, floating: bool) -> list[Form]:
    """Return the forms that a tensor may have, the plainest first.

    Of symbols narrower than a byte, the two widths are tried of which an ideal coder would make
    least.

    Args:
        data: bytes of its beginning, uint8 ``[n]``.
        width: bytes of an element, or 1 where elements of fewer bits share bytes.
    """
    if width > 1:
        return [Form(), *_wide(width, floating)]
    sizes = {bits: entropy(data, bits) for bits in range(1, _BYTE)}
    narrow = sorted(sizes, key=lambda bits: (sizes[bits], bits))[:2]
    return [Form(), *(form for bits in (_BYTE, *sorted(narrow)) for form in _narrow(bits))]


def _wide(width: int, floating: bool) -> Iterator[Form]:
    for turned in (True, False) if floating else (False,):
        for sparse in _WAYS:
            yield Form(_BYTE * width, sparse, turned=turned)


def _narrow(bits: int) -> Iterator[Form]:
    for sparse in _WAYS:
        if sparse or bits == 3:  # other widths lie in the chunk as they would in the stream
            yield Form(bits, sparse)
        if bits < _BYTE:
            yield Form(bits, sparse, packed=False)


_NAMES = {
    str(form): form
    for form in (
        Form(),
        *(form for width in _TURNED for form in _wide(width, True)),
        *(form for bits in range(1, _BYTE + 1) for form in _narrow(bits)),
    )
}


def most_common(symbols: Array) -> int:
    """Return the most common symbol of a chunk; of wide ones zero, without counting."""
    if symbols.dtype != np.uint8 or not symbols.size:
        return 0
    return int(np.bincount(symbols).argmax())


def entropy(data: Array, bits: int = 8) -> float:
    """Return the bytes that an ideal order-0 coder takes (Shannon 1948).

    Args:
        data: uint8 ``[n]``.
        bits: of a symbol, 1 to 8.
    """
    taken = shares(data, bits)
    taken = taken[taken > 0]
    return float(-(taken * np.log2(taken)).sum() * (data.size * _BYTE // bits) / _BYTE)


def shares(data: Array, bits: int) -> Array:
    """Return how often each symbol occurs, of all that there are.

    Args:
        data: uint8 ``[n]``.
        bits: of a symbol, 1 to 8.
    """
    symbols = data if bits == _BYTE else _unpacked(data, bits, data.size * _BYTE // bits)
    found: Array = np.bincount(symbols, minlength=1) / max(1, symbols.size)
    return found


def _unpacked(data: Array, bits: int, count: int) -> Array:
    return np.asarray(unpack_bits(_writable(data), bits, count).numpy())


def _packed(symbols: Array, bits: int) -> Array:
    return np.asarray(pack_bits(_writable(symbols), bits).numpy())


def _writable(data: Array) -> torch.Tensor:
    """Return bytes as a tensor; torch takes none that lie in a file or in ``bytes``."""
    if not data.size:
        return torch.empty(0, dtype=torch.uint8)  # numpy's may have strides that torch refuses
    return torch.from_numpy(np.require(data, requirements="W"))


def _gaps(places: Array) -> Array:
    """Return the distance from each place to the one before, less one, in bytes.

    A byte of 255 stands for as many that are left out.
    """
    steps = np.diff(places, prepend=-1) - 1
    far, near = np.divmod(steps, _FAR)
    ends = np.cumsum(far + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if ends.size else 0, _FAR, np.uint8)
    gaps[ends] = near
    return gaps


def _far_places(gaps: Array, count: int) -> Array:
    """Invert :func:`_gaps` for so many places; raises ``ValueError`` where they go beyond."""
    near = gaps != _FAR
    places: Array = np.cumsum(np.where(near, gaps.astype(np.int64) + 1, _FAR))[near] - 1
    if places.size and places[-1] >= count:
        raise ValueError("a gap goes beyond the end")
    return places
