"""Extrema and histograms of many values, in steps that stay in one thread and its cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compressor.types.parallel import one_thread_each

CHUNK = 1 << 17
"""Values in a step: they stay in the L2 cache."""


def extrema(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and greatest of finite values, ``(inf, -inf)`` if there are none.

    >>> extrema(torch.tensor([1.0, -2.0]))
    (-2.0, 1.0)

    Raises:
        ValueError: a value is not finite.
    """
    low, high = math.inf, -math.inf
    with one_thread_each():
        for chunk in chunks(values):
            least, greatest = chunk_extrema(chunk)
            low, high = min(low, least), max(high, greatest)
    return low, high


def chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in float32 or float64 vectors, none of them empty."""
    flat = values.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield _exact(flat[start : start + CHUNK])


def chunk_extrema(chunk: torch.Tensor) -> tuple[float, float]:
    """Return the least and greatest of one chunk; raises as ``extrema`` does."""
    values = chunk.numpy()  # whose extrema take a fifth of the time of torch's
    return _finite(float(values.min())), _finite(float(values.max()))


class Ends(NamedTuple):
    """The least and the greatest value of each row of the first axis; one number is one row."""

    low: list[float]
    high: list[float]


def row_ends(values: torch.Tensor) -> Ends:
    """Return the ends of each row, none where a row has no values; raises as ``extrema`` does."""
    rows = values.detach().flatten(1) if values.ndim > 1 else values.detach().reshape(-1, 1)
    ends = Ends([], [])
    if not rows.numel():
        return ends
    step = CHUNK // rows.shape[1]
    if not step:  # a row has several chunks
        for row in rows:
            low, high = extrema(row)
            ends.low.append(low)
            ends.high.append(high)
        return ends
    for start in range(0, len(rows), step):
        some = _exact(rows[start : start + step]).numpy()
        ends.low.extend(map(_finite, some.min(1).tolist()))
        ends.high.extend(map(_finite, some.max(1).tolist()))
    return ends


def _exact(values: torch.Tensor) -> torch.Tensor:
    """Return values as float32, which half precisions fit, or float64, as integers to 2 ** 53."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.float32 if values.is_floating_point() else torch.float64)


def _finite(bound: float) -> float:
    if not math.isfinite(bound):  # an extremum is NaN if any value is
        raise ValueError("some of the values are not finite")
    return bound + 0.0  # -0.0 + 0.0 is 0.0


BITS = 12
"""``2 ** BITS`` bins lie on each side of zero."""
SIDE = 1 << BITS

# Below this exponent the factor 2 ** -exponent would not be a float32.
_LEAST_EXPONENT = -126
# Above this exponent the factor would be a denormal float32, which some processors flush to zero.
_FLOAT32_EXPONENT = 126


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of values in bins whose width is a power of two.

    The value ``x`` counts in bin ``trunc(x / 2 ** exponent)``: bin ``j > 0`` is ``[j, j + 1)``,
    bin ``-j`` its mirror image and bin 0 the open interval ``(-1, 1)``, in units of the width.
    The exponent is the least (from -126) that gives every value ``|j| < SIDE``. When a value
    falls outside, the exponent grows and neighbouring bins are added, bin ``j`` to bin
    ``trunc(j / 2)``. Truncation composes and scaling by a power of two does not round, so the
    state is a function of the multiset of values alone: updates and merges in any order and
    any grouping give the same bits.
    """

    # int64 `[2 * SIDE]`; `counts[SIDE + j]` belongs to bin `j`. Never written to
    counts: torch.Tensor
    exponent: int  # binary logarithm of the bin width
    low: float  # the least value seen, `inf` before any
    high: float  # the greatest value seen, `-inf` before any

    @property
    def empty(self) -> bool:
        """Whether no value has been seen."""
        return self.low > self.high

    @property
    def total(self) -> int:
        """How many values have been seen."""
        return int(self.counts.sum())

    def unit(self, value: float) -> float:
        """Return ``value`` in units of the bin width."""
        return math.ldexp(value, -self.exponent)

    def value(self, unit: float) -> float:
        """Return the value at ``unit`` bin widths from zero."""
        return math.ldexp(unit, self.exponent)


def empty() -> Histogram:
    """Return the histogram of no values."""
    counts = torch.zeros(2 * SIDE, dtype=torch.int64)
    return Histogram(counts, _LEAST_EXPONENT, math.inf, -math.inf)


def observe(
    state: Histogram, values: torch.Tensor, ends: tuple[float, float] | None = None
) -> Histogram:
    """Return ``state`` with the values of a real tensor of any shape counted as well.

    One pass in steps that fit the cache: extrema, scaling, truncation, counting.

    Args:
        ends: the least and greatest of the values, if they are known.

    Raises:
        ValueError: a value is not finite.
    """
    counts = state.counts.clone()
    exponent, low, high = state.exponent, state.low, state.high
    with one_thread_each():
        for chunk in chunks(values):
            least, greatest = ends or chunk_extrema(chunk)
            low, high = min(low, least), max(high, greatest)
            needed = _exponent(least, greatest)
            if needed > exponent:
                counts = coarsen(counts, needed - exponent)
                exponent = needed
            _count(counts, chunk, exponent, least)
    return Histogram(counts, exponent, low, high)


def merge(first: Histogram, second: Histogram) -> Histogram:
    """Return the histogram of the values of both."""
    exponent = max(first.exponent, second.exponent)
    counts = coarsen(first.counts, exponent - first.exponent)
    counts = counts + coarsen(second.counts, exponent - second.exponent)
    return Histogram(counts, exponent, min(first.low, second.low), max(first.high, second.high))


def coarsen(counts: torch.Tensor, doublings: int) -> torch.Tensor:
    """Return the counts of bins ``2 ** doublings`` times as wide."""
    if doublings == 0:
        return counts
    shift = min(doublings, BITS)
    kept = SIDE >> shift
    # Both sides outward from zero; the zero bin goes with the positive one.
    right = counts[SIDE:].view(kept, -1).sum(1)
    left = counts[: SIDE + 1].flip(0)[:SIDE].clone()
    left[0] = 0
    left = left.view(kept, -1).sum(1)
    result = torch.zeros_like(counts)
    result[SIDE : SIDE + kept] = right
    result[SIDE - kept + 1 : SIDE] = left[1:].flip(0)
    result[SIDE] += left[0]
    return result


def _exponent(low: float, high: float) -> int:
    """Return the least exponent with ``|x| < SIDE * 2 ** exponent`` for all x in the interval."""
    largest = max(-low, high)
    if largest == 0:
        return _LEAST_EXPONENT
    _, exponent = math.frexp(largest)  # |x| < 2 ** exponent, strictly
    return max(exponent - BITS, _LEAST_EXPONENT)


# Where a ReLU leaves many zeros, each would wait until the one before it is counted. So neighbours
# are counted in different copies of the bins.
_COPIES = 4
_PLACES = torch.arange(_COPIES, dtype=torch.int16).mul(SIDE).repeat(CHUNK // _COPIES)


def _count(counts: torch.Tensor, chunk: torch.Tensor, exponent: int, least: float) -> None:
    if exponent > _FLOAT32_EXPONENT:
        chunk = chunk.to(torch.float64)
    index = chunk.mul(math.ldexp(1.0, -exponent)).to(torch.int16)  # the conversion truncates
    if least < 0:
        counts += torch.bincount(index.add_(SIDE), minlength=2 * SIDE)
    else:
        copies = torch.bincount(index.add_(_PLACES[: len(index)]), minlength=_COPIES * SIDE)
        counts[SIDE:] += copies.view(_COPIES, SIDE).sum(0)
