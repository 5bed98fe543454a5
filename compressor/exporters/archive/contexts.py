"""Contexts in which codes of weights, and bytes of anything else, are mixed and coded.

Of codes, the rows and columns of the weight say most: how many of their codes are not the common
one. Of bytes, those before say most, and in wide elements the place within one.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np

from compressor.exporters.archive.mixing import (
    SHARES,
    STRETCH,
    BitCoder,
    BitReader,
    BitWriter,
    Cell,
    Known,
    Mixture,
)
from compressor.types.tensors import Array

MOST_SYMBOLS = 1 << 19
"""Codes of an archive that are mixed at most; a thousand take some milliseconds."""

MOST_BYTES = 1 << 15
"""Other bytes of an archive that are mixed at most; they take several times as long."""

_PRIOR = 4.0  # codes of the whole weight's share that each row and column starts with
_COARSE = 1.5  # steps of a logit, where rows and columns are looked up together
_ORDERS = (0, 1, 2, 3, 4, 6)  # bytes before that are a context
_WORD = 16  # bytes of a word at most
_REPEATED = 5  # bytes that have to be there before, for those after them to be expected
_LONG = 15


def coded_symbols(symbols: Array, bits: int, columns: int, kernel: int) -> bytes:
    """Code symbols of few bits as a matrix.

    Args:
        symbols: uint8 ``[n]``, row by row; the last row may be shorter.
        bits: of a symbol, 1 to 8.
        columns: of the matrix.
        kernel: columns that belong together, such as the places of a kernel; it divides them.
    """
    writer = BitWriter()
    _Matrix(writer, symbols.size, bits, columns, kernel).run(symbols)
    return writer.finished()


def read_symbols(data: bytes, count: int, bits: int, columns: int, kernel: int) -> Array:
    """Invert :func:`coded_symbols`: uint8 ``[count]``."""
    matrix = _Matrix(BitReader(data), count, bits, columns, kernel)
    return matrix.run(None)


class _Matrix:
    """Symbols of a matrix that are written or read."""

    def __init__(self, coder: BitCoder, count: int, bits: int, columns: int, kernel: int):
        self._coder, self._bits, self._kernel = coder, bits, kernel
        self._count, self._columns = count, columns
        self._rows = -(-count // columns)

    def run(self, symbols: Array | None) -> Array:
        """Write symbols, or read them if there are none."""
        size = self._rows * self._columns
        padded = np.zeros(size, np.uint8)
        if symbols is not None:
            padded[: self._count] = symbols
        present, common = self._alphabet(None if symbols is None else padded)
        others = [symbol for symbol in present if symbol != common]
        shape = (self._rows, self._columns // self._kernel, self._kernel)
        full = padded.reshape(shape)
        away = full != common
        rows = self._alive(None if symbols is None else away.any((1, 2)), shape[0])
        groups = self._alive(None if symbols is None else away.any((0, 2)), shape[1])
        place = np.ix_(rows, groups)
        if symbols is None:
            full[...] = common
            full[place] = self._values(None, len(rows), len(groups), others, common)
        else:
            self._values(full[place], len(rows), len(groups), others, common)
        return padded[: self._count]

    def _alphabet(self, symbols: Array | None) -> tuple[list[int], int]:
        """Code which symbols there are, and the most common one."""
        size, coder = 1 << self._bits, self._coder
        counts = np.zeros(size, int) if symbols is None else np.bincount(symbols, minlength=size)
        common, node = int(counts.argmax()), 1
        for shift in range(self._bits - 1, -1, -1):
            node = node * 2 + coder.code(0.5, common >> shift & 1)
        common = node - size
        mixture, cell = Mixture(1, 1, 0.0, 1.0, 255), [0.5, 0.0]
        there = [mixture.code(coder, [cell], 0, int(counts[s] > 0)) for s in range(size)]
        return [symbol for symbol in range(size) if there[symbol]], common

    def _alive(self, flags: Array | None, count: int) -> list[int]:
        """Code which rows, or groups of columns, have other symbols than the common one."""
        mixture, cells = Mixture(1, 1, 0.0, 1.0, 255), ([0.9, 4.0], [0.9, 4.0])
        found, last = [], 1
        for place in range(count):
            bit = 0 if flags is None else int(flags[place])
            last = mixture.code(self._coder, [cells[last]], 0, bit)
            if last:
                found.append(place)
        return found

    def _values(
        self, symbols: Array | None, rows: int, groups: int, others: list[int], common: int
    ) -> Array:
        """Code the symbols of rows and groups that are alive: ``[rows, groups, kernel]``."""
        kernel, coder = self._kernel, self._coder
        columns = groups * kernel
        code = Mixture(6, 4, 0.02, 0.25, 400).code
        whole: Cell = [0.05, 2.0]
        of_group: list[Cell] = []
        of_place: list[Cell] = [[0.05, 2.0] for _ in range(kernel)]
        near: dict[int, Cell] = {}
        both: dict[tuple[int, int], Cell] = {}
        values = _Values(coder, others, groups)
        found = np.full((rows, columns), common, np.uint8)
        known = None if symbols is None else symbols.reshape(rows, columns).tolist()
        above = [0] * (columns + 2)  # whether symbols of the row before are others, from place 1 on
        for row in range(rows):
            of_row: Cell = [whole[0], _PRIOR]
            line = None if known is None else known[row]
            left = before = 0
            current = [0] * (columns + 2)
            for column in range(columns):
                group = column // kernel
                if group == len(of_group):
                    of_group.append([whole[0], _PRIOR])
                cell = of_group[group]
                up = above[column + 1]
                key = left + 2 * before + 4 * up + 8 * (above[column] + above[column + 2])
                around = near.get(key)
                if around is None:
                    around = near[key] = [whole[0], 1.0]
                pair = (
                    int(STRETCH[int(of_row[0] * SHARES)] * _COARSE),
                    int(STRETCH[int(cell[0] * SHARES)] * _COARSE),
                )
                together = both.get(pair)
                if together is None:
                    together = both[pair] = [whole[0], 1.0]
                cells = (whole, cell, of_row, around, together, of_place[column - group * kernel])
                bit = 0 if line is None else int(line[column] != common)
                bit = code(coder, cells, left + 2 * up, bit)
                if bit:
                    symbol = values.code(common if line is None else line[column], group)
                    found[row, column] = symbol
                before, left = left, bit
                current[column + 1] = bit
            above = current
        return found.reshape(rows, groups, kernel)


class _Values:
    """Symbols other than the common one, bit by bit, with those before and those above."""

    def __init__(self, coder: BitCoder, others: list[int], groups: int):
        self._coder, self._others = coder, others
        self._places = {symbol: place for place, symbol in enumerate(others)}
        self._bits = max(0, len(others) - 1).bit_length()
        self._mixture = Mixture(3, 1, 0.02, 0.5, 60)
        self._cells: dict[tuple[int, int, int], Cell] = {}
        self._last, self._above = -1, [-1] * groups

    def code(self, symbol: int, group: int) -> int:
        """Code one symbol; return it."""
        place, cells = self._places.get(symbol, 0), self._cells
        contexts = ((0, 0), (1, self._last), (2, self._above[group]))
        node = 1
        for shift in range(self._bits - 1, -1, -1):
            chosen = []
            for kind, context in contexts:
                key = (kind, context, node)
                cell = cells.get(key)
                if cell is None:
                    cell = cells[key] = [0.5, 0.5 if kind else 0.0]
                chosen.append(cell)
            node = node * 2 + self._mixture.code(self._coder, chosen, 0, place >> shift & 1)
        found = min(node - (1 << self._bits), max(0, len(self._others) - 1))
        self._last = self._above[group] = found
        return self._others[found] if self._others else symbol


def coded_bytes(data: bytes, width: int) -> bytes:
    """Code bytes of elements that are so wide; those of text have one byte."""
    writer, bits = BitWriter(), _begun(width)
    for byte in data:
        bits.code(writer, byte)
    return writer.finished()


def read_bytes(data: bytes, count: int, width: int) -> bytes:
    """Invert :func:`coded_bytes`."""
    reader, bits = BitReader(data), _begun(width)
    return bytes(bits.code(reader, 0) for _ in range(count))


class _Bytes:
    """Bytes that are written or read, and what has been learned of those before.

    Args:
        width: of an element.
        before: what is known from the start; it is not changed.
    """

    def __init__(self, width: int, before: _Bytes | None = None):
        self._width, self._before = width, before
        self._tables: list[dict[bytes, dict[int, Cell]]] = [{} for _ in range(len(_ORDERS) + 1)]
        self._seen: bytearray = bytearray() if before is None else before._seen.copy()
        self._places: dict[bytes, int] = {} if before is None else before._places.copy()
        self._mixture = Mixture(len(_ORDERS) + 2, 64, 0.02, 0.3, 127)
        if before is not None:
            self._mixture = before._mixture.copy()
        self._repeated: dict[tuple[int, int], Cell] = {}
        self._expected, self._length = 0, 0  # the place of the byte that is expected, if any is

    def code(self, coder: BitCoder, byte: int) -> int:
        """Code a byte; return it."""
        contexts = self._contexts()
        slots = [table.get(c) for table, c in zip(self._tables, contexts, strict=True)]
        for place, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
            if slot is None:
                slots[place] = self._tables[place][context] = self._known(place, context)
        expected = self._seen[self._expected] + 256 if self._length else 0
        node = 1
        for shift in range(7, -1, -1):
            cells, sure = [], 0
            for slot in slots:
                assert slot is not None
                cell = slot.get(node)
                if cell is None:
                    cell = slot[node] = [0.5, 0.0]
                else:
                    sure += 1
                cells.append(cell)
            likely = expected >> shift + 1 == node
            last: Cell = [0.5, 0.0]
            if likely:
                key = (min(self._length, _LONG), expected >> shift & 1)
                last = self._repeated.setdefault(key, [0.9 if key[1] else 0.1, 1.0])
            chosen = min(sure, 7) * 8 + (1 + min(self._length, _LONG) // 3 if likely else 0)
            cells.append(last)
            node = node * 2 + self._mixture.code(coder, cells, chosen, byte >> shift & 1)
        self._learn(node - 256)
        return node - 256

    def _known(self, place: int, context: bytes) -> dict[int, Cell]:
        """Return a copy of what was known of a context before."""
        before = None if self._before is None else self._before._tables[place].get(context)
        return {} if before is None else {node: list(cell) for node, cell in before.items()}

    def _contexts(self) -> list[bytes]:
        """Return the bytes before, up to so many, and the word that they end with."""
        seen = self._seen
        size = len(seen)
        if self._width > 1:
            place = size % self._width
            head, start = bytes([place]), size - place
            element = bytes(seen[start:])
            earlier = [head + bytes(seen[max(0, size - k * self._width) :][:1]) for k in (1, 2)]
            before = head + bytes(seen[max(0, start - self._width) : start])
            return [head, head + element, *earlier, earlier[0] + element, before, before + element]
        start = size
        while start > max(0, size - _WORD) and chr(seen[start - 1]).isalnum():
            start -= 1
        return [
            *(bytes(seen[max(0, size - order) :]) if order else b"" for order in _ORDERS),
            bytes(seen[max(0, start - 1) :]),
        ]

    def _learn(self, byte: int) -> None:
        seen = self._seen
        if self._length:
            same = seen[self._expected] == byte
            self._expected, self._length = self._expected + 1, self._length + 1 if same else 0
        seen.append(byte)
        if len(seen) >= _REPEATED:
            key = bytes(seen[-_REPEATED:])
            if not self._length:
                self._expected = self._places.get(key, 0)
                self._length = int(self._expected > 0)
            self._places[key] = len(seen)


def _begun(width: int) -> _Bytes:
    """Return what codes bytes; of text it knows what there is in descriptions of models."""
    return _Bytes(width, _primed() if width == 1 else None)


@cache
def _primed() -> _Bytes:
    found, known = _Bytes(1), Known()
    for byte in files(__package__).joinpath("primer.txt").read_bytes():
        found.code(known, byte)
    return found
