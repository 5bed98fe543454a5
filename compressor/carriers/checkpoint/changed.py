"""Tensors of a checkpoint that a pass has changed: computed from the file as they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

import torch

from compressor.carriers.checkpoint.reading import RowReader, Span
from compressor.types.carrier import WeightChange


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a tensor in a file, changed a few at a time.

    Attributes:
        before: the tensor as it was.
        change: what becomes of it.
        step: rows that the change wants together.
        count: rows of the tensor.
    """

    before: RowReader
    change: WeightChange
    step: int
    count: int

    @property
    def multiple(self) -> int:
        """Rows that are best read together."""
        return lcm(self.step, self.before.multiple)

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        return self.rows(0, self.count)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows."""
        first, last = self._whole(start, stop)
        rows = self.before.rows(first, last)
        changed = self.change.compute(rows.flatten(1), first).reshape(rows.shape)
        return changed[start - first : stop - first]

    def span(self, start: int, stop: int) -> Span:
        """Return the bytes of the file that these rows are computed from."""
        return self.before.span(*self._whole(start, stop))

    def _whole(self, start: int, stop: int) -> tuple[int, int]:
        """Widen a range of rows to those that the change wants together."""
        first = start // self.step * self.step
        return first, min(-(-stop // self.step) * self.step, self.count)


@dataclass(frozen=True, eq=False)
class ChangedWhole:
    """A tensor that is changed as a whole whenever it is read."""

    before: Callable[[], torch.Tensor]
    change: WeightChange

    def __call__(self) -> torch.Tensor:
        """Return all of it."""
        return self.change.stored(self.before())


def changed(before: Callable[[], torch.Tensor], change: WeightChange) -> Callable[[], torch.Tensor]:
    """Return a reader of what a tensor becomes; by rows, where both sides can be had so."""
    layer = change.layer
    if change.multiple is None or not isinstance(before, RowReader) or not layer.rows_first:
        return ChangedWhole(before, change)
    return ChangedRows(before, change, change.multiple, layer.rows)
