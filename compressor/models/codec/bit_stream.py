"""Codes of a few bits as dense streams of bits, in bytes or in words of 32 bits.

Code ``i`` occupies the bits from ``i * bits`` on, lowest bit first, across byte boundaries.

As many codes as fill a byte are handled as one integer whose bytes are shifted together or apart
in steps; where the width does not divide a byte, eight codes are handled as one 64-bit integer.
Views of other widths assume a little-endian machine, as safetensors files do."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

_BYTE = 8
_WHOLE = 0xFF
_CHUNK = 1 << 20  # bytes worked on at once: few calls, and all of it in the cache

# Integers of as many bytes as there are codes in a byte of the stream.
_WORD_OF_A_BYTE = {8: torch.uint8, 4: torch.int16, 2: torch.int32}

_LANES = (1, 2, 4)  # bytes; pairs of lanes are drawn together until eight codes are one
BITS = (2, 3, 4, 8)
"""Widths that can be packed."""

_WORD = 32


def stream_bytes(count: int, bits: int) -> int:
    """Return how many bytes hold so many codes."""
    return -(-count * bits // _BYTE)


def pack_bits(codes: Tensor, bits: int, biased: bool = False) -> Tensor:
    """Pack the lowest bits of bytes.

    Args:
        codes: int8 or uint8, of any shape.
        bits: width of a code, 1 to 8.
        biased: flip the highest bit of each, so that the smallest signed code is stored as 0.

    Returns:
        uint8 ``[stream_bytes(codes.numel(), bits)]``; bits after the last code are 0 (of biased
        codes, those of code 0).

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    flat = codes.contiguous().view(torch.uint8).view(-1)
    count = flat.numel()
    rest = -count % _BYTE
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    stream = torch.empty(flat.numel() * bits // _BYTE, dtype=torch.uint8)
    if bits in _WORD_OF_A_BYTE:
        _pack_in_bytes(flat, bits, biased, stream)
    else:
        _pack_in_eights(flat, bits, biased, stream.view(-1, bits))
    return stream[: stream_bytes(count, bits)] if rest else stream


def unpack_bits(stream: Tensor, bits: int, count: int, signed: bool = False) -> Tensor:
    """Invert :func:`pack_bits` of codes that are not biased.

    Args:
        stream: uint8, at least ``stream_bytes(count, bits)`` of them; not changed.
        bits: width of a code, 1 to 8.
        signed: the highest bit of a code is its sign.

    Returns:
        int8 if they are signed, otherwise uint8: ``[count]``.
    """
    flat = stream.contiguous().view(-1)[: stream_bytes(count, bits)]
    if bits in _WORD_OF_A_BYTE:
        codes = _unpack_bytes(flat, bits, signed)
    else:
        codes = _unpack_eights(flat, bits, signed)
    return (codes.view(torch.int8) if signed else codes)[:count]


def _pack_in_bytes(flat: Tensor, bits: int, biased: bool, stream: Tensor) -> None:
    """Fill each byte of the stream with its codes, for widths that divide a byte."""
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


def _pack_in_eights(flat: Tensor, bits: int, biased: bool, stream: Tensor) -> None:
    """Pack eight codes at a time in a 64-bit integer; the stream is ``[eights, bits]``."""
    eights = flat.view(torch.int64)
    flip = _repeated(1 << (bits - 1), bits, _BYTE) if biased else 0
    step = _CHUNK // _BYTE
    scratch = torch.empty(min(step, eights.numel()), dtype=torch.int64)
    for start in range(0, eights.numel(), step):
        lanes = eights[start : start + step] & _repeated((1 << bits) - 1, _BYTE, _BYTE)
        moved = scratch[: lanes.numel()]
        for lane in _LANES:
            low, _, above = _pair_masks(bits, lane)
            torch.bitwise_right_shift(lanes, lane * (_BYTE - bits), out=moved)
            moved &= above
            lanes &= low
            lanes |= moved
        lanes ^= flip
        stream[start : start + step] = lanes.view(torch.uint8).view(-1, _BYTE)[:, :bits]


def _unpack_bytes(flat: Tensor, bits: int, signed: bool) -> Tensor:
    """Return a byte for each code, for widths that divide a byte."""
    if bits == _BYTE:
        return flat.clone()
    dtype = _WORD_OF_A_BYTE[bits]
    codes = torch.empty(flat.numel() * dtype.itemsize, dtype=torch.uint8)
    words = codes.view(dtype)
    # A signed code with its highest bit flipped is larger by that bit than it should be.
    sign = 1 << (bits - 1) if signed else 0
    flip = _repeated(sign, bits, _BYTE // bits) & _WHOLE
    step = _CHUNK // dtype.itemsize
    scratch = torch.empty(min(step, words.numel()), dtype=dtype)
    flipped = torch.empty(min(step, words.numel()) if flip else 0, dtype=torch.uint8)
    for start in range(0, words.numel(), step):
        lanes = words[start : start + step]
        moved = scratch[: lanes.numel()]
        part = flat[start : start + step]
        lanes.copy_(torch.bitwise_xor(part, flip, out=flipped[: part.numel()]) if flip else part)
        width = _BYTE // 2
        while width >= bits:
            lanes |= torch.bitwise_left_shift(lanes, width * (_BYTE // bits - 1), out=moved)
            codes_together = width // bits
            lanes &= _repeated(
                (1 << width) - 1, _BYTE * codes_together, dtype.itemsize // codes_together
            )
            width //= 2
        if signed:
            lanes.view(torch.uint8).sub_(sign)  # wraps around, as signed bytes do
    return codes


def _unpack_eights(flat: Tensor, bits: int, signed: bool) -> Tensor:
    """Return a byte for each code; ``bits`` bytes hold eight codes, spread in a 64-bit integer."""
    rest = -flat.numel() % bits
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    groups = flat.view(-1, bits)
    codes = torch.empty((groups.shape[0], _BYTE), dtype=torch.uint8)
    step = _CHUNK // _BYTE
    scratch = torch.empty(min(step, groups.shape[0]), dtype=torch.int64)
    for start in range(0, groups.shape[0], step):
        part = codes[start : start + step]
        part[:, :bits] = groups[start : start + step]
        part[:, bits:] = 0
        lanes = part.view(torch.int64).view(-1)
        moved = scratch[: lanes.numel()]
        for lane in reversed(_LANES):
            low, apart, _ = _pair_masks(bits, lane)
            torch.bitwise_left_shift(lanes, lane * (_BYTE - bits), out=moved)
            moved &= apart
            lanes &= low
            lanes |= moved
        if signed:
            bytes_, sign = part.view(-1), 1 << (bits - 1)
            bytes_ ^= sign
            bytes_ -= sign  # wraps around, as signed bytes do
    return codes.view(-1)


def _pair_masks(bits: int, lane: int) -> tuple[int, int, int]:
    """Return masks of pairs of lanes: the first codes, the second, and the second moved down."""
    codes, pairs = (1 << lane * bits) - 1, _BYTE // (2 * lane)
    places = (0, lane * _BYTE, lane * bits)
    first, apart, drawn = (_repeated(codes << p, 2 * lane * _BYTE, pairs) for p in places)
    return first, apart, drawn


def _repeated(pattern: int, width: int, times: int) -> int:
    """Return a pattern of bits repeated at every multiple of ``width``, as a signed integer."""
    value = sum(pattern << (width * index) for index in range(times))
    return value - (1 << 64) if value >> 63 else value


def packed_columns(columns: int, bits: int) -> int:
    """Return how many words of 32 bits hold a row of so many codes."""
    return -(-columns * bits // _WORD)


def whole_words(bits: int) -> int:
    """Return the least number of codes that fills whole words of 32 bits."""
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
    stream = pack_bits(codes, bits, biased=codes.dtype == torch.int8)
    padded = (columns + rest) * bits // _WORD
    return stream.view(torch.int32).view(rows, padded)[:, :words].contiguous()


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
    return pack_bits(codes, 4).view(rows, columns // 2)
