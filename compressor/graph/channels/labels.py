"""Numbers for the channels of values, and which of them are united.

The channels of a value are a *family*: an array of as many axes as the value, each as long as the
value's axis, or 1 where the channels do not depend on it. Its numbers are the channels at each
position, -1 where there is none. A family that depends on several axes is *joint*, such as the
features of a transformer once they are divided into heads. A value has several families where its
axes hold channels that have nothing to do with each other, as those of a weight do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from compressor.types.channels import Units

Family: TypeAlias = Units
Shape: TypeAlias = tuple[int, ...]


class Unions:
    """Numbers, some of which are united (a union-find structure)."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[Units] = []
        self._second: list[Units] = []
        self._roots: Units | None = None

    def fresh(self, shape: Shape) -> Family:
        """Return unused numbers."""
        start, self.count = self.count, self.count + prod(shape)
        self._roots = None
        return np.arange(start, self.count, dtype=np.int64).reshape(shape)

    def join(self, first: Units, second: Units) -> None:
        """Unite pairs of numbers, none of them -1."""
        different = first != second
        self._first.append(first[different])
        self._second.append(second[different])
        self._roots = None

    def roots(self) -> Units:
        """Return for each number the least that it is united with."""
        if self._roots is None:
            self._roots = _components(
                self.count,
                np.concatenate([np.empty(0, np.int64), *self._first]),
                np.concatenate([np.empty(0, np.int64), *self._second]),
            )
        return self._roots

    def resolved(self, family: Family) -> Family:
        """Replace numbers by their roots."""
        return np.where(family < 0, -1, self.roots()[family])


def _components(count: int, first: Units, second: Units) -> Units:
    """Return connected components: the least number spreads along edges until nothing changes."""
    least = np.arange(count, dtype=np.int64)
    while len(first):
        lower = np.minimum(least[first], least[second])
        np.minimum.at(least, least[first], lower)
        np.minimum.at(least, least[second], lower)
        while not np.array_equal(shorter := least[least], least):
            least = shorter
        open_edges = least[first] != least[second]
        first, second = first[open_edges], second[open_edges]
    return least


def depends_on(family: Family, axis: int) -> bool:
    """Return whether channels differ along an axis."""
    return bool(family.shape[axis] > 1)


def spread(family: Family, rank: int) -> Family:
    """Return a family with the rank that its value is broadcast to."""
    return family.reshape((1,) * (rank - family.ndim) + family.shape)


def along(family: Family, axis: int) -> Units:
    """Return the channels along an axis, where they depend on no other.

    Args:
        family: not joint.
        axis: the one it depends on.
    """
    return family.reshape(family.shape[axis])


def placed(units: Units, axis: int, rank: int) -> Family:
    """Return a family along one axis of a value."""
    shape = [1] * rank
    shape[axis] = len(units)
    return units.reshape(shape)


def compressed(family: Family) -> Family:
    """Drop the axes along which channels are the same; one axis remains at least."""
    for axis in reversed(range(family.ndim)):
        rest = [i for i in range(family.ndim) if i != axis and family.shape[i] > 1]
        first = family.take([0], axis)
        if family.shape[axis] > 1 and rest and bool((family == first).all()):
            family = first
    return family


def reshaped(family: Family, before: Shape, after: Shape) -> Family:
    """Follow a family through a reshape.

    Only the axes that are divided or merged with others are looked at; the channels of all other
    axes stay what they are.

    Args:
        family: of a value of shape ``before``.
        after: its shape afterwards; of as many elements.
    """
    parts: list[Shape] = []
    full: list[Shape] = []
    for old, new in _matching(before, after):
        lengths = tuple(before[i] for i in old)
        needed = any(family.shape[i] > 1 for i in old)
        full.append(lengths if needed else (1,) * len(old))
        parts.append(tuple(after[i] for i in new) if needed else (1,) * len(new))
    whole = np.broadcast_to(family, tuple(n for part in full for n in part))
    return compressed(whole.reshape(tuple(n for part in parts for n in part)))


def _matching(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Return the shortest runs of both shapes' axes with equally many elements."""
    runs: list[tuple[range, range]] = []
    old = new = 0
    while old < len(before) or new < len(after):
        first_old, first_new = old, new
        left = right = 1
        while True:
            if left == right and (old > first_old or new > first_new):
                break
            if left <= right and old < len(before):
                left, old = left * before[old], old + 1
            elif new < len(after):
                right, new = right * after[new], new + 1
            else:
                left, old = left * before[old], old + 1
        runs.append((range(first_old, old), range(first_new, new)))
    return runs


def overlap(first: Family, second: Family) -> bool:
    """Return whether two families of the same rank depend on an axis that both depend on."""
    pairs = zip(first.shape, second.shape, strict=True)
    return any(a > 1 and b > 1 for a, b in pairs)


def joined(parts: Sequence[Family | None], lengths: Sequence[int], axis: int) -> Family | None:
    """Concatenate families along an axis; ``None`` stands for no channels."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    shape = list(np.broadcast_shapes(*(_without(part.shape, axis) for part in present)))
    pieces = []
    for part, length in zip(parts, lengths, strict=True):
        piece_shape = [*shape]
        piece_shape[axis] = length
        empty = np.full(piece_shape, -1, dtype=np.int64)
        pieces.append(empty if part is None else np.broadcast_to(part, piece_shape))
    return np.concatenate(pieces, axis)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], 1, *shape[axis + 1 :])
