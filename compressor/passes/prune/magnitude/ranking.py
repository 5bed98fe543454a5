"""Scores of single weights and of blocks, as integers that rank alike.

The bit pattern of a float that is not negative, read as an integer, grows with the float. So a
score is the 31-bit pattern of a float32: it is compared and counted exactly, and does not depend
on how a weight is divided among blocks of rows, threads or passes over a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
_AT_ONCE = 1 << 18  # elements worked on, so that what is in between stays in the cache


@dataclass(frozen=True)
class Criterion:
    """What a weight's units are, and by what they are ranked."""

    # `l1`: mean magnitude of a unit; `l2`: root of the mean square; `random`: any order, but
    # zeros first. For single weights both norms are the magnitude
    norm: Norm = "l1"
    block: tuple[int, int] = (1, 1)  # rows and columns of a unit; `(1, 1)` for single weights
    key: int = 0  # picks the order of `random`, 64 bits

    @property
    def single(self) -> bool:
        """Units are single weights."""
        return self.block == (1, 1)

    def coarse_only(self, dtype: str) -> bool:
        """Whether the fine bits of all scores are zero, of weights in a dtype (its numpy name)."""
        return self.norm == "random" or (self.single and dtype in _HALF)


def scores(matrix: Tensor, criterion: Criterion, row: int = 0) -> tuple[Tensor, int]:
    """Return the score of each unit.

    ``matrix [rows, columns]`` holds whole units; ``row`` is the first row's number in the weight.

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
        values, shift = matrix.view(torch.int16) & 0x7FFF, 16
    elif criterion.single:
        bits = matrix.to(torch.float32).contiguous().view(torch.int32)
        values, shift = bits & 0x7FFFFFFF, 0
    else:
        values, shift = _in_chunks(matrix, criterion).view(torch.int32), 0
    if values.numel() and int(values.max()) << shift >= _INFINITY:
        raise ValueError("values are not finite")
    return values, shift


def value_of(score: int) -> float:
    """Return the float whose bit pattern a score is.

    >>> values, shift = scores(torch.tensor([[-1.5]]), Criterion())
    >>> value_of(int(values) << shift)
    1.5
    """
    return float(np.array(score, np.int32).view(np.float32))


def _in_chunks(matrix: Tensor, criterion: Criterion) -> Tensor:
    rows, columns = matrix.shape
    height, width = criterion.block
    result = torch.empty(rows // height, columns // width)
    step = max(1, _AT_ONCE // max(columns * height, 1))
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


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Cut:
    """Which units of one weight go: those with scores below ``score``, and some that equal it."""

    score: int
    # units whose score is the threshold go up to this place, the last one included; units are
    # counted along the rows. -1 if none of them go
    last: int


@dataclass(frozen=True)
class Counts:
    """How often scores occur."""

    values: Tensor  # coarse bins of scores (or whole scores), rising, int64 `[n]`
    counts: Tensor  # how often each occurs, int64 `[n]`

    @property
    def total(self) -> int:
        """Number of units."""
        return int(self.counts.sum())

    def of(self, value: int) -> int:
        """Return how often a value occurs."""
        return int(self.counts[self.values == value].sum())

    def below(self, value: int) -> int:
        """Return how many lie below a value."""
        return int(self.counts[self.values < value].sum())


def count_coarse(scored: Tensor, shift: int) -> Counts:
    """Count scores, as :func:`scores` returns them, by their coarse bits."""
    lift = max(shift - FINE_BITS, 0)
    bins = (scored if lift else scored >> (FINE_BITS - shift)).reshape(-1)
    if bins.numel() < COARSE >> (lift + 2):  # sorting few is faster than counting in many bins
        values, counts = torch.unique(bins, return_counts=True)
        return Counts(values.to(torch.int64) << lift, counts)
    counted = torch.bincount(bins, minlength=COARSE >> lift)
    held = counted.nonzero()[:, 0]
    return Counts(held << lift, counted[held])


def count_fine(values: Tensor, shift: int, coarse: int) -> Counts:
    """Count whole scores, as :func:`scores` returns them, in the coarse bin ``coarse``."""
    low, over = coarse << FINE_BITS, (coarse + 1) << FINE_BITS
    # low <= score < over, said of scores without their shift.
    first, end = -(-low >> shift), -(-over >> shift)
    # The first and the last bin take what lies outside: choosing what to count would take longer.
    bins = values.clamp(first - 1, end).sub_(first - 1).reshape(-1)
    counted = torch.bincount(bins, minlength=end - first + 2)[1:-1]
    held = counted.nonzero()[:, 0]
    return Counts((held + first) << shift, counted[held])


def merged(parts: Iterable[Counts]) -> Counts:
    """Add counts up."""
    every = list(parts)
    none = torch.empty(0, dtype=torch.int64)
    values = torch.cat([none, *(part.values for part in every)])
    counts = torch.cat([none, *(part.counts for part in every)])
    distinct, places = torch.unique(values, return_inverse=True)
    return Counts(distinct, torch.zeros_like(distinct).index_add_(0, places, counts))


def select(counts: Counts, number: int) -> tuple[int, int]:
    """Return the value of the ``number``-th smallest unit, and its rank among those that equal it.

    Raises:
        ValueError: there are not so many units, or the number is not positive.
    """
    if not 0 < number <= counts.total:
        raise ValueError(f"there is no unit {number} of {counts.total}")
    reached = counts.counts.cumsum(0)
    index = int(torch.searchsorted(reached, number))
    before = int(reached[index]) - int(counts.counts[index])
    return int(counts.values[index]), number - before


def shares(quota: int, held: Sequence[int]) -> list[int]:
    """Hand out a quota in order, to each as much as it holds, until none is left."""
    given = []
    for count in held:
        given.append(min(count, quota))
        quota -= given[-1]
    return given


def place_of(values: Tensor, shift: int, score: int, rank: int) -> int:
    """Return the place of the ``rank``-th unit (from 1) that has a score, counted along the rows.

    Raises:
        ValueError: there are not so many.
    """
    equal = (values.reshape(-1).to(torch.int64) << shift == score).nonzero()[:, 0]
    if not 0 < rank <= len(equal):
        raise ValueError(f"there is no unit {rank} of {len(equal)}")
    return int(equal[rank - 1])


def dropped(matrix: Tensor, criterion: Criterion, cut: Cut, row: int = 0) -> Tensor:
    """Return which units of some rows go, bool ``[rows / height, columns / width]``.

    Rows are whole units; ``row`` is the first one's number in the whole weight.
    """
    values, shift = scores(matrix, criterion, row)
    # score <= cut and score < cut, said of scores without their shift.
    most, least = cut.score >> shift, -(-cut.score >> shift)
    first = row // criterion.block[0] * values.shape[1]
    among = cut.last + 1 - first  # units here that may go if they equal the threshold
    if among >= values.numel():
        return values <= most
    gone = (values < least).contiguous()
    if among > 0:
        gone.view(-1)[:among] |= values.reshape(-1)[:among] <= most
    return gone


def without(matrix: Tensor, criterion: Criterion, cut: Cut, row: int = 0) -> Tensor:
    """Return rows in which the units that go are zero; arguments as in :func:`dropped`."""
    height = criterion.block[0]
    step = max(1, _AT_ONCE // max(matrix.shape[1] * height, 1)) * height
    result = torch.empty_like(matrix)
    for start in range(0, len(matrix), step):
        part = matrix[start : start + step]
        result[start : start + step] = _without(part, criterion, cut, row + start)
    return result


def _without(matrix: Tensor, criterion: Criterion, cut: Cut, row: int) -> Tensor:
    gone = dropped(matrix, criterion, cut, row)
    height, width = criterion.block
    # An "and" of bits: to fill where a random mask says so takes five times as long.
    bits = matrix.view(_INTEGERS[matrix.itemsize])
    kept = gone.to(bits.dtype).sub_(1)  # all bits set, or none
    if width > 1:
        kept = kept[:, :, None].expand(-1, -1, width).reshape(len(kept), -1)
    by_height = bits.reshape(len(kept), height, -1) & kept[:, None]
    return by_height.reshape(matrix.shape).view(matrix.dtype)
