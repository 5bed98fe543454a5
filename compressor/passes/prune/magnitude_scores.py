"""Scores of single weights and of blocks, as integers that rank alike.

The bit pattern of a float that is not negative, read as an integer, grows with the float. So a
score is the 31-bit pattern of a float32: it is compared and counted exactly, and does not depend
on how a weight is divided among blocks of rows, threads or passes over a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Norm = Literal["l1", "l2", "random"]

FINE_BITS = 12
"""Bits of a score that bfloat16 and float16 leave zero: they have 10 bits of mantissa at most."""
COARSE = 1 << (31 - FINE_BITS)
"""Number of values that the bits before them take."""

_INFINITY = 0x7F800000
_HALF = ("bfloat16", "float16")
_CHUNK = 1 << 18  # elements worked on at once, so that what is in between stays in the cache


@dataclass(frozen=True)
class Criterion:
    """What a weight's units are, and by what they are ranked.

    Attributes:
        norm: ``l1``: mean magnitude of a unit; ``l2``: root of the mean square; ``random``: any
            order, but zeros first. For single weights both norms are the magnitude.
        block: rows and columns of a unit; ``(1, 1)`` for single weights.
        key: picks the order of ``random``, 64 bits.
    """

    norm: Norm = "l1"
    block: tuple[int, int] = (1, 1)
    key: int = 0

    @property
    def single(self) -> bool:
        """Units are single weights."""
        return self.block == (1, 1)

    def coarse_only(self, dtype: str) -> bool:
        """Whether the fine bits of all scores are zero, of weights in a dtype (its numpy name)."""
        return self.norm == "random" or (self.single and dtype in _HALF)


def scores(matrix: Tensor, criterion: Criterion, row: int = 0) -> tuple[Tensor, int]:
    """Return the score of each unit.

    Args:
        matrix: whole units of a weight, ``[rows, columns]``.
        criterion: what is ranked by what.
        row: the number of the first row in the whole weight.

    Returns:
        Integers ``[rows / height, columns / width]``, and by how many bits to shift them to the
        left: the score is that. bfloat16 weights have 16-bit scores shifted by 16.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    if criterion.norm == "random":
        if not bool(matrix.isfinite().all()):
            raise ValueError("values are not finite")
        return _random(matrix, criterion, row), 0
    if criterion.single and matrix.dtype == torch.bfloat16:
        found, shift = matrix.view(torch.int16) & 0x7FFF, 16
    elif criterion.single:
        bits = matrix.to(torch.float32).contiguous().view(torch.int32)
        found, shift = bits & 0x7FFFFFFF, 0
    else:
        found, shift = _in_chunks(matrix, criterion).view(torch.int32), 0
    if found.numel() and int(found.max()) << shift >= _INFINITY:
        raise ValueError("values are not finite")
    return found, shift


def value_of(score: int) -> float:
    """Return the float whose bit pattern a score is."""
    return float(np.array(score, np.int32).view(np.float32))


def _in_chunks(matrix: Tensor, criterion: Criterion) -> Tensor:
    rows, columns = matrix.shape
    height, width = criterion.block
    result = torch.empty(rows // height, columns // width)
    step = max(1, _CHUNK // max(columns * height, 1))
    for start in range(0, len(result), step):
        stop = min(start + step, len(result))
        part = matrix[start * height : stop * height]
        result[start:stop] = _block_norms(part.to(torch.float64), criterion)
    return result


def _block_norms(matrix: Tensor, criterion: Criterion) -> Tensor:
    """Mean magnitude, or root mean square, of each block; float64 ``[blocks, blocks]``.

    In float64 the squares of all float32 numbers exist. Numbers are added in one order, whatever
    else is in the matrix: torch's own sums change theirs with the shape.
    """
    height, width = criterion.block
    rows, columns = matrix.shape
    values = matrix.abs() if criterion.norm == "l1" else matrix.square()
    by_width = values.reshape(rows, columns // width, width).unbind(2)
    total = by_width[0].clone()
    for part in by_width[1:]:
        total += part
    by_height = total.reshape(rows // height, height, columns // width).unbind(1)
    total = by_height[0].clone()
    for part in by_height[1:]:
        total += part
    total /= height * width
    return total if criterion.norm == "l1" else total.sqrt_()


def _random(matrix: Tensor, criterion: Criterion, row: int) -> Tensor:
    """Random scores without fine bits, above zero where a unit has a weight that is not.

    They are hashes of the unit's place (the finalizer of splitmix64: G. Steele, D. Lea and C.
    Flood, Fast splittable pseudorandom number generators, 2014).
    """
    height, width = criterion.block
    rows, columns = matrix.shape[0] // height, matrix.shape[1] // width
    first = row // height * columns
    place = np.arange(first, first + rows * columns, dtype=np.uint64)
    mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(criterion.key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    top = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - 18)
    # 18 bits and one: below every pattern that is not finite, and never 0.
    drawn = torch.from_numpy(((top + np.uint64(1)) << np.uint64(FINE_BITS)).astype(np.int32))
    alive = (matrix != 0).reshape(rows, height, columns, width).any(3).any(1)
    return torch.where(alive, drawn.reshape(rows, columns), 0)
