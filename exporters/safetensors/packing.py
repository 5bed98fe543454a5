"""Codes of 2, 3, 4 and 8 bits as dense streams of bits, in words of 32 or in bytes.

Code ``i`` of a row occupies the bits from ``i * bits`` on, the lowest first, across the bounds of
words; a row starts a new word. Integers are biased: the smallest code, whether signed or not, is
stored as 0. So does ``pack-quantized`` of compressed-tensors store them; its 4-bit floats are
pairs in bytes, the first in the low half, which is the same stream without the bias.

As many codes as fill a byte are handled as one integer, whose bytes are drawn together in steps; of
3 bits, eight codes as one of 64 bits. Views of other widths take the machine to be little-endian,
as safetensors files are.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
"""Widths that can be packed."""

_WORD = 32
_BYTE = 8
_CHUNK = 1 << 20  # bytes worked on at once: few calls, and all of it in the cache

# Integers of as many bytes as there are codes in a byte of the stream.
_WORD_OF_A_BYTE = {8: torch.uint8, 4: torch.int16, 2: torch.int32}


def packed_columns(columns: int, bits: int) -> int:
    """Return how many words of 32 bits hold a row of so many codes."""
    return -(-columns * bits // _WORD)


def whole_words(bits: int) -> int:
    """Return the least number of codes that fills words of 32 bits without a rest."""
    return _WORD // gcd(_WORD, bits)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack each row into words of 32 bits.

    Args:
        codes: ``[rows, columns]``, int8 from ``-2^(bits-1)`` or uint8 from 0.
        bits: width of a code, one of :data:`BITS`.

    Returns:
        int32 ``[rows, packed_columns(columns, bits)]``; bits after the last code are 0.
    """
    rows, columns = codes.shape
    words = packed_columns(columns, bits)
    rest = -columns % whole_words(bits)
    if rest:
        # What is packed as 0: the smallest code.
        smallest = -(1 << (bits - 1)) if codes.dtype == torch.int8 else 0
        codes = torch.nn.functional.pad(codes, (0, rest), value=smallest)
    stream = _drawn_together(codes, bits, biased=codes.dtype == torch.int8)
    padded = (columns + rest) * bits // _WORD
    return stream.view(torch.int32).view(rows, padded)[:, :words].contiguous()


def unpack_words(words: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Invert :func:`pack_words`.

    Args:
        words: int32 ``[rows, packed_columns(columns, bits)]``.
        bits: width of a code, one of :data:`BITS`.
        columns: codes in a row.
        dtype: ``torch.int8`` or ``torch.uint8``, as the codes were.
    """
    rows = words.shape[0]
    missing = -words.shape[1] % (bits // gcd(_WORD, bits))
    if missing:
        words = torch.nn.functional.pad(words, (0, missing))
    padded = words.shape[1] * _WORD // bits
    codes = _spread(words.contiguous().view(torch.uint8), bits).view(rows, padded)[:, :columns]
    if dtype == torch.int8:
        codes = (codes ^ (1 << (bits - 1))).view(torch.int8)
        # The sign bit of a narrow code fills the byte.
        codes = (codes << (_BYTE - bits)) >> (_BYTE - bits)
    return codes.contiguous()


def pack_words_down(codes: Tensor, bits: int) -> Tensor:
    """Pack each column into words of 32 bits: ``[packed_columns(rows, bits), columns]``.

    Takes codes as :func:`pack_words` does.
    """
    packed = pack_words(codes.T, bits).T
    return packed.flatten().view(packed.shape)  # strides of a new tensor, for one column as well


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes into bytes, the first in the low half.

    Args:
        codes: uint8 ``[rows, columns]`` from 0 to 15.

    Returns:
        uint8 ``[rows, columns / 2]``.

    Raises:
        ValueError: the number of columns is odd.
    """
    rows, columns = codes.shape
    if columns % 2:
        raise ValueError(f"{columns} columns do not make pairs")
    return _drawn_together(codes, 4, biased=False).view(rows, columns // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert :func:`pack_nibbles`: uint8 ``[rows, columns / 2]`` to ``[rows, columns]``."""
    return _spread(packed.contiguous(), 4).view(packed.shape[0], 2 * packed.shape[1])


def _drawn_together(codes: Tensor, bits: int, biased: bool) -> Tensor:
    """Return the lowest ``bits`` of all bytes as a stream, uint8; ``biased`` flips the highest."""
    flat = codes.contiguous().view(torch.uint8).view(-1)
    count = flat.numel()
    rest = -count % _BYTE
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    stream = torch.empty(flat.numel() * bits // _BYTE, dtype=torch.uint8)
    if bits in _WORD_OF_A_BYTE:
        _draw_bytes(flat, bits, biased, stream)
    else:
        _draw_eights(flat, bits, biased, stream.view(-1, bits))
    return stream[: -(-count * bits // _BYTE)] if rest else stream


def _draw_bytes(flat: Tensor, bits: int, biased: bool, stream: Tensor) -> None:
    """Make each byte of the stream of the codes that fill it, for widths that divide a byte."""
    words = flat.view(_WORD_OF_A_BYTE[bits])
    mask = _repeated((1 << bits) - 1, _BYTE, words.itemsize)
    flip = _repeated(1 << (bits - 1), bits, words.itemsize) if biased else 0
    step = _CHUNK // words.itemsize
    scratch = torch.empty((2, min(step, words.numel())), dtype=words.dtype)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        lanes, moved = scratch[:, : part.numel()]
        torch.bitwise_and(part, mask, out=lanes)
        width = bits
        while width < _BYTE:
            lanes |= torch.bitwise_right_shift(lanes, width * (_BYTE // bits - 1), out=moved)
            width *= 2
        target = stream[start : start + step]
        target.copy_(lanes)  # the conversion keeps the lowest byte
        if flip:
            target ^= flip


def _draw_eights(flat: Tensor, bits: int, biased: bool, stream: Tensor) -> None:
    """Draw eight codes together in an integer of 64 bits; the stream is ``[eights, bits]``."""
    eights = flat.view(torch.int64)
    first = _repeated((1 << bits) - 1, _BYTE, _BYTE)
    second = _repeated((1 << 2 * bits) - 1, 2 * _BYTE, _BYTE // 2)
    third = _repeated((1 << 4 * bits) - 1, 4 * _BYTE, _BYTE // 4)
    flip = _repeated(1 << (bits - 1), bits, _BYTE) if biased else 0
    step = _CHUNK // _BYTE
    scratch = torch.empty(min(step, eights.numel()), dtype=torch.int64)
    for start in range(0, eights.numel(), step):
        lanes = eights[start : start + step] & first
        moved = scratch[: lanes.numel()]
        lanes |= torch.bitwise_right_shift(lanes, _BYTE - bits, out=moved)
        lanes &= second
        lanes |= torch.bitwise_right_shift(lanes, 2 * (_BYTE - bits), out=moved)
        lanes &= third
        lanes |= torch.bitwise_right_shift(lanes, 4 * (_BYTE - bits), out=moved)
        lanes ^= flip
        stream[start : start + step] = lanes.view(torch.uint8).view(-1, _BYTE)[:, :bits]


def _spread(stream: Tensor, bits: int) -> Tensor:
    """Return the codes of a stream of bytes, one a byte, flat; it holds groups of eight codes."""
    flat = stream.view(-1)
    if bits == _BYTE:
        return flat.clone()
    count = flat.numel() * _BYTE // bits
    rest = -flat.numel() % bits
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    bytes_of_eight = flat.view(-1, bits).to(torch.int64)
    lanes = bytes_of_eight[:, 0]
    for index in range(1, bits):
        lanes = lanes | bytes_of_eight[:, index] << (_BYTE * index)
    codes = torch.empty((lanes.numel(), _BYTE), dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(_BYTE):
        codes[:, index] = lanes >> (bits * index) & mask
    return codes.view(-1)[:count]


def _repeated(pattern: int, width: int, times: int) -> int:
    """Return a pattern of bits repeated at every multiple of ``width``, as a signed integer."""
    value = sum(pattern << (width * index) for index in range(times))
    return value - (1 << 64) if value >> 63 else value
