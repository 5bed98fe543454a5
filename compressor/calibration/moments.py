"""Statistics of inputs: the patches that convolutions see, their moments, and grids of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from compressor.types.statistics import Moments

_POSITIONS = 64  # of a feature map that are looked at in each sample


def patch_vectors(
    values: Tensor,
    kernel: tuple[int, int],
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilations: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Return about 64 patches of each feature map, as vectors ``[groups, columns, rows]``.

    They lie on an even grid, since neighbouring patches are almost the same.

    >>> patch_vectors(torch.zeros(2, 3, 8, 8), kernel=(3, 3)).shape
    torch.Size([1, 27, 72])

    Args:
        values: ``[batch, channels, height, width]``.
        kernel: lengths over the spatial axes.
        strides: steps between patches.
        pads: zeros before and after, as ONNX orders them: all beginnings, then all ends.
        dilations: steps between the elements of a patch.
        groups: channel groups.
    """
    top, left, bottom, right = pads
    values = values.to(torch.float32)
    if any(pads):
        values = functional.pad(values, (left, right, top, bottom))
    spans = [gap * (length - 1) + 1 for length, gap in zip(kernel, dilations, strict=True)]
    positions = 1
    for length, span, stride in zip(values.shape[2:], spans, strides, strict=True):
        positions *= max(1, (length - span) // stride + 1)
    step = max(1, round(math.sqrt(positions / _POSITIONS)))  # so that about 64 patches remain
    for axis in (0, 1):  # a view of the map, so that all is copied once
        values = values.unfold(2 + axis, spans[axis], strides[axis] * step)[..., :: dilations[axis]]
    columns = values.shape[1] // groups * kernel[0] * kernel[1]
    return values.permute(1, 4, 5, 0, 2, 3).reshape(groups, columns, -1)


_BLOCK = 128  # columns: half of a large symmetric matrix need not be computed
_MANY = 1024  # columns from which vectors are summed many at a time
_WAITING = 1 / 8  # vectors for each column that wait to be summed


@dataclass(frozen=True, eq=False)
class MomentSums:
    """Moments of a stream of vectors.

    A product of few vectors costs as much as to read and write the matrix it is added to. So those
    of many columns wait for others: until they are as many as the columns, and would take more
    memory than the matrix; and then for an eighth as many.

    Attributes:
        second: ``Σ x xᵀ`` on and above the diagonal, ``[groups, columns, columns]``, without the
            vectors that wait; ``None`` if all do.
        first: ``Σ x``, ``[groups, columns]``.
        rows: how many vectors there were.
        waiting: vectors, each ``[1, columns, vectors]``.
    """

    second: Tensor | None
    first: Tensor
    rows: int
    waiting: tuple[Tensor, ...] = ()

    def with_vectors(self, vectors: Tensor) -> MomentSums:
        """Return the moments with further vectors ``[groups, columns, vectors]``.

        The matrix is changed in place.
        """
        groups, columns, rows = vectors.shape
        first, rows = self.first + vectors.sum(2), self.rows + rows
        if groups > 1 or columns < _MANY:
            return MomentSums(_with_products(self.second, vectors), first, rows)
        # Copied, as they may be a view of all values.
        return MomentSums(self.second, first, rows, (*self.waiting, vectors.clone()))._summed()

    def merged(self, other: MomentSums) -> MomentSums:
        """Return the moments of both streams."""
        matrices = [m for m in (self.second, other.second) if m is not None]
        return MomentSums(
            torch.stack(matrices).sum(0) if matrices else None,
            self.first + other.first,
            self.rows + other.rows,
            (*self.waiting, *other.waiting),
        )._summed()

    def moments(self) -> Moments:
        """Return the moments; the matrix is changed in place."""
        if self.second is None:
            vectors = torch.cat(self.waiting, 2)
            return Moments(partial(_moment, None, vectors), self.first, self.rows, vectors[0])
        return Moments(_moment(self.second, *self.waiting), self.first, self.rows)

    def _summed(self) -> MomentSums:
        """Sum what waits, if it is enough."""
        columns, most = self.first.shape[1], 1.0 if self.second is None else _WAITING
        if sum(part.shape[2] for part in self.waiting) < most * columns:
            return self
        return replace(self, second=_with_products(self.second, *self.waiting), waiting=())


def _with_products(second: Tensor | None, *parts: Tensor) -> Tensor:
    """Add the products of vectors to a matrix, in place, on and above the diagonal.

    As many vectors are put together as make a product worth its reading of the matrix, and no more:
    all that wait for the first sum would take as much memory as the matrix once again.
    """
    together: list[Tensor] = []
    for index, part in enumerate(parts):
        together.append(part)
        columns, last = part.shape[1], index == len(parts) - 1
        if last or sum(p.shape[2] for p in together) >= _WAITING * columns:
            vectors = torch.cat(together, 2) if len(together) > 1 else part
            second = with_product(second, vectors)
            together = []
    assert second is not None
    return second


def with_product(second: Tensor | None, vectors: Tensor) -> Tensor:
    """Add products of vectors ``[groups, columns, count]`` on and above the diagonal, in place."""
    groups, columns, _ = vectors.shape
    if second is None:
        second = torch.zeros(groups, columns, columns)
    for start in range(0, columns, _BLOCK):
        above = second[:, start : start + _BLOCK, start:]
        above.baddbmm_(vectors[:, start : start + _BLOCK], vectors[:, start:].transpose(1, 2))
    return second


def _moment(second: Tensor | None, *parts: Tensor) -> Tensor:
    return mirror(_with_products(second, *parts))


def mirror(second: Tensor) -> Tensor:
    """Fill in what is below the diagonal of ``[groups, columns, columns]``, in place."""
    for start in range(0, second.shape[1], _BLOCK):
        end = start + _BLOCK
        second[:, end:, start:end] = second[:, start:end, end:].transpose(1, 2)
    return second


MOST_LEVELS = 256
_FEWEST = 32  # distinct levels below which a grid could be a coincidence
_TOLERANCE = 0.01  # of a step


def fit_grid(levels: Tensor) -> tuple[float, float] | None:
    """Return step and offset of the grid that sorted levels lie on, or ``None``.

    Levels that were not seen are left half below and half above those that were.
    """
    if levels.numel() < _FEWEST:
        return None
    least = float(levels[0])
    span = float(levels[-1]) - least
    gap = float(levels.diff().min())
    steps = round(span / gap)
    if steps >= MOST_LEVELS:
        return None
    step = span / steps
    places = (levels - least) / step
    if float((places - places.round()).abs().max()) > _TOLERANCE:
        return None
    spare = (MOST_LEVELS - 1 - steps) // 2
    return step, least - spare * step
