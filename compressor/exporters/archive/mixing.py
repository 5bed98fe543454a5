"""Arithmetic coding of single bits, whose probability several contexts say together.

M. Mahoney, Adaptive weighing of context models for lossless data compression, 2005 (Florida Tech.
TR CS-2005-16): each context keeps how often its next bit was one, the logits of these shares are
weighted, and the weights follow the gradient of the code length. The coder is the carryless one of
his ``lpaq``. A bit takes some microseconds, so only small files are coded so.

Decoding has to compute exactly what encoding did, on any machine. So only sums, products and
quotients of doubles are taken, which IEEE 754 rounds the same everywhere, and the exponential and
the logarithm are read from tables that are made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Protocol, TypeAlias

import numpy as np

from compressor.types.tensors import Array

Cell: TypeAlias = list[float]
"""The share of ones after a context, and how many bits it is of."""

SHARES = 1 << 16  # steps in which the logit of a share is known
_SPAN, _FINE = 12, 256  # the largest logit, and the steps of one
_LEAST = 1e-5  # the least share: what is never seen costs 17 bits at most
_WHOLE = 0xFFFFFFFF
_TOP = 0xFF000000


def _exponential(x: Array) -> Array:
    """Return e^x for -12 to 12: the 4096th power of five terms of Taylor's series."""
    y = x / 4096
    power: Array = 1 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5))))
    for _ in range(12):
        power = power * power
    return power


def _logarithm(x: Array) -> Array:
    """Return ln x: that of the power of two, and the series of the inverse hyperbolic tangent."""
    mantissa, exponent = np.frexp(x)
    z = (mantissa - 0.75) / (mantissa + 0.75)
    series = np.zeros_like(z)
    for k in range(21, 0, -2):
        series = series * (z * z) + 1 / k
    found: Array = 2 * z * series + exponent * 0.6931471805599453 - 0.2876820724517809
    return found


_SHARE = (np.arange(SHARES) + 0.5) / SHARES
STRETCH: list[float] = (_logarithm(_SHARE) - _logarithm(1 - _SHARE)).tolist()
"""The logit of each share, in 65,536 steps."""

_LOGIT = np.arange(-_SPAN * _FINE, _SPAN * _FINE + 1) / _FINE
_SQUASH: list[float] = (1 / (1 + _exponential(-_LOGIT))).tolist()
_MOST, _MIDDLE = _SPAN - 0.1, _SPAN * _FINE + 0.5


class BitCoder(Protocol):
    """Writes bits, or reads them: then the bit that it is given does not matter."""

    def code(self, share: float, bit: int) -> int:
        """Code a bit that is one with a probability; return it."""
        ...


class BitWriter:
    """Writes bits into :meth:`finished` bytes."""

    def __init__(self) -> None:
        self._low, self._high = 0, _WHOLE
        self._out = bytearray()

    def code(self, share: float, bit: int) -> int:
        """Write a bit that is one with a probability between 0 and 1; return it."""
        low, high = self._low, self._high
        middle = low + int((high - low) * share)
        if bit:
            high = middle
        else:
            low = middle + 1
        while not (low ^ high) & _TOP:
            self._out.append(high >> 24)
            low = (low << 8) & _WHOLE
            high = (high << 8) & _WHOLE | 255
        self._low, self._high = low, high
        return bit

    def finished(self) -> bytes:
        """Return all bytes; zeros at the end are left out, as a reader takes any number of them."""
        for count in range(1, 5):
            rest = 32 - 8 * count
            last = -(-self._low >> rest)  # the least number of so many bytes from the low end on
            if last << rest <= self._high:
                whole = bytes(self._out) + last.to_bytes(count, "big")
                return whole.rstrip(b"\0")
        raise AssertionError("four bytes hold the low end itself")


class BitReader:
    """Reads what :class:`BitWriter` has written; beyond the end come zeros."""

    def __init__(self, data: bytes):
        self._data, self._place = data, 4
        self._low, self._high = 0, _WHOLE
        self._value = int.from_bytes(data[:4].ljust(4, b"\0"), "big")

    def code(self, share: float, bit: int = 0) -> int:
        """Return the next bit, which is one with a probability between 0 and 1."""
        del bit
        low, high = self._low, self._high
        middle = low + int((high - low) * share)
        if self._value <= middle:
            found, high = 1, middle
        else:
            found, low = 0, middle + 1
        while not (low ^ high) & _TOP:
            low = (low << 8) & _WHOLE
            high = (high << 8) & _WHOLE | 255
            following = self._data[self._place] if self._place < len(self._data) else 0
            self._value = (self._value << 8) & _WHOLE | following
            self._place += 1
        self._low, self._high = low, high
        return found


class Known:
    """Codes nothing: contexts learn from bits that both sides know."""

    def code(self, share: float, bit: int) -> int:
        """Return the bit."""
        del share
        return bit


class Mixture:
    """What several contexts say of a bit, weighted.

    Args:
        contexts: how many there are.
        sets: of weights, from which each bit chooses one.
        rate: of the weights.
        weight: that each context has at the beginning.
        memory: bits after which a context forgets as fast as it learns.
    """

    def __init__(self, contexts: int, sets: int, rate: float, weight: float, memory: int):
        self._weights = [[weight] * contexts for _ in range(sets)]
        self._rate, self._memory = rate, memory

    def copy(self) -> Mixture:
        """Return another with the same weights."""
        other = copy(self)
        other._weights = [list(weights) for weights in self._weights]
        return other

    def code(self, coder: BitCoder, cells: Sequence[Cell], chosen: int, bit: int) -> int:
        """Code a bit, and learn from it; return it.

        Args:
            coder: what writes or reads it.
            cells: of the contexts, all different.
            chosen: the set of weights.
            bit: as ``coder`` takes it.
        """
        weights, stretch = self._weights[chosen], STRETCH
        logits = [stretch[int(cell[0] * SHARES)] for cell in cells]
        logit = 0.0
        for weight, one in zip(weights, logits, strict=True):
            logit += weight * one
        logit = min(max(logit, -_MOST), _MOST)
        share = _SQUASH[int(logit * _FINE + _MIDDLE)]
        bit = coder.code(share, bit)
        step = (bit - share) * self._rate
        for place, one in enumerate(logits):
            weights[place] += step * one
        memory = self._memory
        for cell in cells:
            held, count = cell
            held += (bit - held) / (count + 1.5)
            cell[0] = held if _LEAST < held < 1 - _LEAST else min(max(held, _LEAST), 1 - _LEAST)
            if count < memory:
                cell[1] = count + 1
        return bit
