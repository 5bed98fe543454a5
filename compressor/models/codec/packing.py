"""Codes of 2, 3, 4 and 8 bits as dense streams of bits, in words of 32 or in bytes.

Code ``i`` of a row occupies the bits from ``i * bits`` on, the lowest first, across the bounds of
words; a row starts a new word. Integers are biased: the smallest code, whether signed or not, is
stored as 0. So does ``pack-quantized`` of compressed-tensors store them; its 4-bit floats are
pairs in bytes, the first in the low half, which is the same stream without the bias.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from compressor.models.codec.bit_stream import pack_bits, unpack_bits

BITS = (2, 3, 4, 8)
"""Widths that can be packed."""

_WORD = 32


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
    stream = pack_bits(codes, bits, biased=codes.dtype == torch.int8)
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
    codes = unpack_bits(words.contiguous().view(torch.uint8), bits, rows * padded)
    codes = codes.view(rows, padded)[:, :columns]
    if dtype == torch.int8:
        codes = codes.view(torch.int8) - (1 << (bits - 1))  # wraps around, as signed bytes do
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
    return pack_bits(codes, 4).view(rows, columns // 2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert :func:`pack_nibbles`: uint8 ``[rows, columns / 2]`` to ``[rows, columns]``."""
    count = 2 * packed.numel()
    return unpack_bits(packed, 4, count).view(packed.shape[0], 2 * packed.shape[1])
