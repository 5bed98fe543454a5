"""k-means of single numbers, for codebooks of weights.

A cluster of numbers on a line is an interval of them. So they are sorted once; after that the sum
and the count of any interval are differences of two prefix sums, and a round of Lloyd's algorithm
costs a binary search for each centroid, however many numbers there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.types.layers import QuantizedTensor, Scheme

_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NOTABLE = 0.01  # share of zeros from which on they are taken to be meant
_ROUNDS = 300
_DONE = 1e-6  # of the spread: centroids that move less do not change an error that is measured
_CELLS = 256  # as many of equal width as of equal weight make the histogram of the start


@dataclass(frozen=True)
class _Sorted:
    """Numbers in rising order, with prefix sums."""

    values: Tensor  # the numbers, `[n]`
    counts: Tensor  # sum of the weights of all numbers before each place, float64 `[n + 1]`
    sums: Tensor  # that of weights times numbers
    squares: Tensor  # that of weights times squares

    def means(self, bounds: Tensor, empty: Tensor) -> Tensor:
        count = self.counts[bounds].diff()
        return torch.where(count > 0, self.sums[bounds].diff() / count, empty)

    def bounds(self, centroids: Tensor) -> Tensor:
        """Return where the interval of each centroid ends, with 0 before: ``[k + 1]``."""
        middles = ((centroids[1:] + centroids[:-1]) / 2).to(self.values.dtype)
        inner = torch.searchsorted(self.values, middles)
        ends = torch.tensor([0, self.values.numel()])
        return torch.cat([ends[:1], inner, ends[1:]])


def codebook(
    values: Tensor, size: int, importance: Tensor | None = None, *, zero: bool = False
) -> Tensor:
    """Find the numbers to which values are rounded with the least squared error.

    Lloyd's algorithm, as in Han et al. 2016 (arXiv:1510.00149, section 3), from the best division
    of a histogram, which dynamic programming finds: of 256 numbers for Gaussian values it
    leaves less than half of the error that the linear start of the paper leaves. The same values
    give the same codebook.

    Args:
        values: finite floats of any shape.
        size: how many numbers there may be.
        importance: what the squared error of each value counts, not negative, in the same shape;
            ``None`` counts all alike.
        zero: one of the numbers is to be zero, whatever that costs; values that are zero then
            remain so.

    Returns:
        The numbers in rising order, float32 ``[size]`` or fewer: no more than there are values
        that differ.
    """
    flat = values.detach().reshape(-1).to(torch.float32)
    weights = None if importance is None else importance.reshape(-1).to(torch.float64)
    if zero:
        others = flat != 0
        flat, weights = flat[others], None if weights is None else weights[others]
        size -= 1
    centroids = _free(_sorted(flat, weights), size, pinned=zero)
    if zero:
        centroids = torch.cat([centroids, centroids.new_zeros(1)])
    return _different(centroids.to(torch.float32))


def clustered(matrix: Tensor, scheme: Scheme, importance: Tensor | None = None) -> QuantizedTensor:
    """Cluster a weight, all of it or each group of rows by itself.

    Where one in a hundred weights or more is zero, as after pruning, zero is in the codebook of
    each group that holds one, so that zeros remain.

    The matrix is ``[rows, columns]``, finite, of any float dtype; ``importance``, in its shape, is
    what a squared error counts in each element.
    """
    rows, size = matrix.shape[0], 1 << scheme.bits
    zeros = matrix == 0
    sparse = int(zeros.sum()) >= _NOTABLE * matrix.numel()
    step = scheme.group or max(rows, 1)
    codes = torch.empty(matrix.shape, dtype=torch.uint8)
    books = torch.zeros(scheme.codebooks(rows), size)
    for group, start in enumerate(range(0, rows, step)):
        part = slice(start, start + step)
        weights = None if importance is None else importance[part]
        zero = sparse and bool(zeros[part].any())
        book = codebook(matrix[part], size, weights, zero=zero)
        book = _different(book.to(_TYPES[scheme.scale_type]))
        codes[part] = nearest(matrix[part], book)
        books[group, : book.numel()] = book
    return QuantizedTensor(
        codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), scheme, codebook=books
    )


def nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """Return which of ``numbers``, at most 256 in rising order, is nearest to each value.

    Places are uint8 in the shape of ``values``. Of two that are equally near it is the lower one; a
    value that is one of the numbers gets that.
    """
    wide = numbers.to(torch.float64)
    middles = (wide[1:] + wide[:-1]) / 2
    # Rounded down: a middle is then below every float32 that lies above it.
    lower = middles.to(torch.float32)
    above = lower > middles
    lower = torch.where(above, torch.nextafter(lower, torch.tensor(-torch.inf)), lower)
    return torch.bucketize(values.to(torch.float32).contiguous(), lower).to(torch.uint8)


def _sorted(flat: Tensor, weights: Tensor | None) -> _Sorted:
    if weights is None:
        # numpy sorts several times faster than torch does.
        ordered = torch.from_numpy(flat.contiguous().numpy().copy())
        ordered.numpy().sort()
        ordered_weights = torch.ones_like(ordered, dtype=torch.float64)
    else:
        ordered, order = torch.sort(flat, stable=True)
        ordered_weights = weights[order]
        if not bool((ordered_weights > 0).any()):
            ordered_weights = torch.ones_like(ordered_weights)
    moment = ordered_weights * ordered
    parts = (ordered_weights, moment, moment * ordered)
    counts, sums, squares = (pad(part.cumsum(0), (1, 0)) for part in parts)
    return _Sorted(ordered, counts, sums, squares)


def _free(data: _Sorted, size: int, *, pinned: bool) -> Tensor:
    """Find centroids in rising order; ``pinned`` adds one at zero that does not move."""
    different = _different(data.values)
    if different.numel() <= size or not size:
        return different[:size]
    return _lloyd(data, _divided(data, size), pinned=pinned)


def _lloyd(data: _Sorted, start: Tensor, *, pinned: bool) -> Tensor:
    """Move centroids to the means of the values nearest to them until they stay."""
    centroids, zero = start, start.new_zeros(1)
    least = _DONE * float(data.values[-1] - data.values[0])
    for _ in range(_ROUNDS):
        if pinned:
            place = int((centroids < 0).sum())
            whole = torch.cat([centroids[:place], zero, centroids[place:]])
            moved = data.means(data.bounds(whole), whole)
            moved = torch.cat([moved[:place], moved[place + 1 :]])
        else:
            moved = data.means(data.bounds(centroids), centroids)
        moved = moved.sort().values
        if float((moved - centroids).abs().max()) <= least:
            return moved
        centroids = moved
    return centroids


def _divided(data: _Sorted, size: int) -> Tensor:
    """Return the means of the best division of a histogram's cells, by dynamic programming.

    ``least[j]`` is the least error of the first ``j`` cells in so many intervals; one interval
    more ends at ``j`` and starts where the sum of both errors is least.
    """
    bounds = _cells(data)
    counts, sums, squares = data.counts[bounds], data.sums[bounds], data.squares[bounds]
    count = counts[None] - counts[:, None]
    total = sums[None] - sums[:, None]
    spread = squares[None] - squares[:, None] - total.square() / count.clamp(min=1e-300)
    forward = torch.ones_like(spread).triu().bool()  # from a cell to one that is not before it
    cost = torch.where(forward, spread.clamp(min=0.0), torch.inf)
    least, origins = cost[0], []
    for _ in range(size - 1):
        least, origin = (least[:, None] + cost).min(0)
        origins.append(origin)
    cuts = [bounds.numel() - 1]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    edges = bounds[torch.tensor([0, *reversed(cuts)])]
    lower = data.values[edges[:-1].clamp(max=data.values.numel() - 1)]
    return data.means(edges, lower).sort().values


def _cells(data: _Sorted) -> Tensor:
    """Return where cells of equal width and cells of equal weight end, with 0 before.

    The former see what few far values cost, the latter where most values are.
    """
    edges = torch.linspace(float(data.values[0]), float(data.values[-1]), _CELLS + 1)
    wide = torch.searchsorted(data.values, edges[:-1])
    heavy = torch.searchsorted(data.counts, torch.arange(_CELLS) * data.counts[-1] / _CELLS)
    ends = torch.tensor([0, data.values.numel()])
    return _different(torch.cat([ends, wide, heavy]))


def _different(values: Tensor) -> Tensor:
    unique: Tensor = values.unique()  # type: ignore[no-untyped-call]  # torch's own has no types
    return unique
