"""Codes as blocks of GGUF, bit for bit.

A block holds 32 columns of a row (256 of the formats whose names end in ``_K``) with their scale in
float16, and what is in it means ``d * q + m``. Codes of ours are written only in a block format on
whose grid they lie, so that what llama.cpp computes with is what was calibrated:

==========  ============================  ======================================================
format      a value is                    codes of ours
==========  ============================  ======================================================
``Q4_0``    ``d * (q - 8)``               symmetric, up to 4 bits, groups of a multiple of 32
``Q4_1``    ``d * q + m``                 with zero points; ``m`` is minus zero point times scale
``Q5_0``    ``d * (q - 16)``              symmetric, 5 bits, groups of a multiple of 32
``Q8_0``    ``d * q``                     symmetric, 8 or 6 bits, groups of a multiple of 32
``Q2_K``    ``d * s * q - m * t``         2 bits, groups of a multiple of 256; ``s`` is 1
``Q3_K``    ``d * (s - 32) * (q - 4)``    symmetric, 3 bits, groups of a multiple of 256
``Q4_K``    ``d * s * q - m * t``         with zero points, groups of a multiple of 256
``Q5_K``    ``d * s * q - m * t``         5 bits with zero points, groups of a multiple of 256
``Q6_K``    ``d * s * (q - 32)``          symmetric, 6 bits, groups of a multiple of 256
``MXFP4``   ``2 ** (e - 127) * e2m1``     mxfp4
==========  ============================  ======================================================

Source of the layouts: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from compressor.types.layers import QuantizedTensor, Scheme

BlockFormat = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"
]
SIZES: dict[BlockFormat, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""Columns and bytes of a block."""

_SMALL, _LARGE = 32, 256
_E8M0_BIAS = 126  # frexp's exponent is one more than that of 1.m
_SUB_BLOCKS = 16  # of a large block, each with a scale of its own


def format_of(scheme: Scheme, columns: int) -> BlockFormat | None:
    """Return the smallest format on whose grid all codes of a scheme lie; ``None`` if none is.

    Args:
        columns: of the weight in canonical form.

    >>> format_of(Scheme(4, granularity="group", group=32, scale_type="float16"), 64)
    'Q4_0'
    """
    width = scheme.group if scheme.granularity == "group" else columns
    if scheme.granularity == "rows" or not width or width % _SMALL:
        return None
    if scheme.element == "e2m1":
        return "MXFP4" if scheme.scale_type == "e8m0" and width == _SMALL else None
    if scheme.element != "int":
        return None
    if not scheme.signed and scheme.symmetric:
        return None
    large = width % _LARGE == 0
    match scheme.bits:
        case 6 if large and scheme.symmetric:
            return "Q6_K"
        case 8 | 6:
            return "Q8_0" if scheme.symmetric else None
        case 5 if scheme.symmetric:
            return "Q5_0"
        case 5:
            return "Q5_K" if large else None
        case 2 if large:
            return "Q2_K"
        case 3 if large and scheme.symmetric:
            return "Q3_K"
        case 4 | 3 | 2 if scheme.symmetric:
            return "Q4_0"
        case 4 | 3 | 2:
            return "Q4_K" if large else "Q4_1"
    return None


def row_bytes(kind: BlockFormat, columns: int) -> int:
    """Return the bytes of a row."""
    width, size = SIZES[kind]
    return columns // width * size


def pack(codes: QuantizedTensor, kind: BlockFormat) -> Tensor:
    """Return the blocks of a weight, uint8 ``[rows, row_bytes]``.

    Args:
        codes: in canonical form; all rows, or some of them.
        kind: what :func:`format_of` returned.

    Raises:
        ValueError: a scale, or zero point times scale, is not a float16 number; ``str`` of the
            error says which.
    """
    rows, columns = codes.codes.shape
    width = SIZES[kind][0]
    count = columns // width
    shape = (rows * count, width)
    scale = _each_block(codes.scale, rows, count)
    zero = _each_block(codes.zero_point, rows, count)
    if kind == "MXFP4":
        exponent = torch.frexp(scale).exponent + _E8M0_BIAS
        parts = [exponent.to(torch.uint8), _nibbles(codes.codes.reshape(shape))]
        return torch.cat(parts, 1).reshape(rows, -1)
    d = _half(scale, "a scale")
    scheme = codes.scheme
    if kind == "Q8_0":
        parts = [d, codes.codes.reshape(shape).view(torch.uint8)]
        return torch.cat(parts, 1).reshape(rows, -1)
    # From here on, the least code of so many bits counts as 0.
    offset = 1 << (scheme.bits - 1) if scheme.signed else 0
    levels = (codes.codes.reshape(shape).to(torch.int16) + offset).to(torch.uint8)
    zeros = (zero.to(torch.int16) + offset).to(torch.uint8)
    if kind == "Q4_0":
        parts = [d, _nibbles(levels + (8 - offset))]
    elif kind == "Q4_1":
        least = -zeros.to(torch.float32) * scale
        parts = [d, _half(least, "zero point times scale"), _nibbles(levels)]
    elif kind == "Q5_0":
        parts = [d, _bytes_of((levels >> 4).reshape(len(levels), -1, 8)), _nibbles(levels)]
    elif kind == "Q4_K":
        parts = [d, d, _ones_and(zeros), _all_nibbles(levels, _SMALL)]
    elif kind == "Q5_K":
        parts = [d, d, _ones_and(zeros), _lanes(levels >> 4), _all_nibbles(levels, _SMALL)]
    elif kind == "Q6_K":
        ones = torch.ones_like(zeros).expand(-1, _SUB_BLOCKS)
        parts = [_all_nibbles(levels, 2 * _SMALL), _quarters(levels >> 4), ones, d]
    elif kind == "Q2_K":
        parts = [(zeros << 4 | 1).expand(-1, _SUB_BLOCKS), _quarters(levels), d, d]
    else:
        parts = [_lanes(levels >> 2), _quarters(levels & 3), _unit_scales(len(levels)), d]
    return torch.cat(parts, 1).reshape(rows, -1)


def _each_block(parameter: Tensor, rows: int, count: int) -> Tensor:
    """Return the scale or zero point of each block, ``[rows * count, 1]``."""
    whole = parameter.expand(rows, -1)
    return whole.repeat_interleave(count // whole.shape[1], 1).reshape(-1, 1)


def _half(values: Tensor, what: str) -> Tensor:
    """Return numbers ``[n, 1]`` as the bytes of float16, uint8 ``[n, 2]``."""
    halves = values.to(torch.float16)
    if not torch.equal(halves.to(torch.float32), values):
        raise ValueError(f"{what} is not a float16 number")
    return halves.contiguous().view(torch.uint8).reshape(-1, 2)


def _nibbles(levels: Tensor, half: int = _SMALL // 2) -> Tensor:
    """Pack the second half of each row above the first, uint8 ``[n, half]``."""
    return levels[:, :half] & 15 | levels[:, half:] << 4


def _all_nibbles(levels: Tensor, half: int) -> Tensor:
    """Pack codes ``[n, 256]``: of each two times ``half``, the second half above the first."""
    return _nibbles(levels.reshape(-1, 2 * half), half).reshape(len(levels), -1)


def _quarters(levels: Tensor) -> Tensor:
    """Pack numbers of 2 bits ``[n, 256]``: of each 128, four that lie 32 apart in a byte."""
    lanes = levels.reshape(len(levels), 2, 4, _SMALL)
    packed = lanes[:, :, 0] | lanes[:, :, 1] << 2 | lanes[:, :, 2] << 4 | lanes[:, :, 3] << 6
    return packed.reshape(len(levels), -1)


def _lanes(bits: Tensor) -> Tensor:
    """Pack bits ``[n, 256]``: bit ``i`` of byte ``j`` is that of 32 i + j."""
    return _bytes_of(bits.reshape(len(bits), 8, _SMALL).transpose(1, 2))


def _bytes_of(bits: Tensor) -> Tensor:
    """Pack bits ``[..., 8]``, the lowest first."""
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _ones_and(zeros: Tensor) -> Tensor:
    """Return the 12 bytes of eight scales of 1 and eight equal factors of at most 6 bits.

    The first four scales, the first four factors, and then the other four of both in nibbles; the
    upper two bits of those factors are above the first four.
    """
    ones = torch.ones_like(zeros)
    first = zeros | zeros >> 4 << 6
    return torch.cat([ones.expand(-1, 4), first.expand(-1, 4), (zeros << 4 | 1).expand(-1, 4)], 1)


def _unit_scales(count: int) -> Tensor:
    """Return the 12 bytes of sixteen scales of 1 in Q3_K, stored as 33 in 6 bits."""
    row = torch.tensor([0x11] * 8 + [0xAA] * 4, dtype=torch.uint8)
    return row.expand(count, -1)
