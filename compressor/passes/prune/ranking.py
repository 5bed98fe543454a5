"""Find, by counting, the score up to which units go, and the last of those that share it.

Units are ranked by score, then by place. Counting the coarse bits of all scores tells in which
coarse bin the last unit to go lies; counting the fine bits of that bin's scores, which one it is.
So the choice is exact, in memory that does not grow with the number of units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.passes.prune.magnitude_scores import COARSE, FINE_BITS, Criterion, scores

_CHUNK = 1 << 18  # elements worked on at once, so that what is in between stays in the cache
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Cut:
    """Which units of one weight go: those with scores below ``score``, and some that equal it.

    Attributes:
        score: the threshold.
        last: units whose score is the threshold go up to this place, the last one included; units
            are counted along the rows. -1 if none of them go.
    """

    score: int
    last: int


@dataclass(frozen=True)
class Counts:
    """How often scores occur.

    Attributes:
        values: coarse bins of scores (or whole scores), rising, int64 ``[n]``.
        counts: how often each occurs, int64 ``[n]``.
    """

    values: Tensor
    counts: Tensor

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


def count_coarse(found: Tensor, shift: int) -> Counts:
    """Count scores by their coarse bits.

    Args:
        found: as :func:`compressor.passes.prune.magnitude_scores.scores` returns them.
        shift: likewise.
    """
    lift = max(shift - FINE_BITS, 0)
    bins = (found if lift else found >> (FINE_BITS - shift)).reshape(-1)
    if bins.numel() < COARSE >> (lift + 2):  # sorting few is faster than counting in many bins
        values, counts = torch.unique(bins, return_counts=True)
        return Counts(values.to(torch.int64) << lift, counts)
    return _occurring(torch.bincount(bins, minlength=COARSE >> lift), lift)


def count_fine(found: Tensor, shift: int, coarse: int) -> Counts:
    """Count, of the scores in one coarse bin, the whole scores.

    Args:
        found: as :func:`compressor.passes.prune.magnitude_scores.scores` returns them.
        shift: likewise.
        coarse: the bin.
    """
    low, over = coarse << FINE_BITS, (coarse + 1) << FINE_BITS
    # low <= score < over, said of scores without their shift.
    first, end = -(-low >> shift), -(-over >> shift)
    # The first and the last bin take what lies outside: choosing what to count would take longer.
    bins = found.clamp(first - 1, end).sub_(first - 1).reshape(-1)
    counted = torch.bincount(bins, minlength=end - first + 2)[1:-1]
    held = counted.nonzero()[:, 0]
    return Counts((held + first) << shift, counted[held])


def _occurring(counted: Tensor, lift: int) -> Counts:
    held = counted.nonzero()[:, 0]
    return Counts(held << lift, counted[held])


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
    for own in held:
        given.append(min(own, quota))
        quota -= given[-1]
    return given


def place_of(found: Tensor, shift: int, score: int, rank: int) -> int:
    """Return the place of the ``rank``-th unit (from 1) that has a score, counted along the rows.

    Raises:
        ValueError: there are not so many.
    """
    equal = (found.reshape(-1).to(torch.int64) << shift == score).nonzero()[:, 0]
    if not 0 < rank <= len(equal):
        raise ValueError(f"there is no unit {rank} of {len(equal)}")
    return int(equal[rank - 1])


def dropped(matrix: Tensor, criterion: Criterion, cut: Cut, row: int = 0) -> Tensor:
    """Tell which units of some rows go, bool ``[rows / height, columns / width]``.

    Args:
        matrix: whole units of a weight, ``[rows, columns]``.
        criterion: by what they are ranked.
        cut: which units of the weight go.
        row: the number of the first row in the whole weight.
    """
    found, shift = scores(matrix, criterion, row)
    # score <= cut and score < cut, said of scores without their shift.
    most, least = cut.score >> shift, -(-cut.score >> shift)
    first = row // criterion.block[0] * found.shape[1]
    among = cut.last + 1 - first  # units here that may go if they equal the threshold
    if among >= found.numel():
        return found <= most
    gone = (found < least).contiguous()
    if among > 0:
        gone.view(-1)[:among] |= found.reshape(-1)[:among] <= most
    return gone


def without(matrix: Tensor, criterion: Criterion, cut: Cut, row: int = 0) -> Tensor:
    """Return rows in which the units that go are zero, all others as they were.

    Args:
        matrix: whole units of a weight, ``[rows, columns]``; it is not changed.
        criterion: by what they are ranked.
        cut: which units of the weight go.
        row: the number of the first row in the whole weight.
    """
    height = criterion.block[0]
    step = max(1, _CHUNK // max(matrix.shape[1] * height, 1)) * height
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
