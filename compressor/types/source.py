"""Data sources: where batches come from, described before any of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compressor.types.tensors import Batch, TensorSpec


@dataclass(frozen=True)
class SourceInfo:
    """What a source offers.

    Attributes:
        samples: how many there are (after the ``samples`` option), or ``None`` if unknown.
        fields: the arrays of a batch after renaming and before ``transform``.
    """

    samples: int | None
    fields: tuple[TensorSpec, ...]


class Source(Protocol):
    """A stream of batches, the same one at each call."""

    def info(self) -> SourceInfo:
        """Describe the source by reading headers only."""
        ...

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit`` samples in all."""
        ...

    def digest(self) -> str:
        """Return a hash of the content: equal digests give equal batches."""
        ...


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source that gives any of its samples at the cost of reading these alone."""

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by their place in the stream of :meth:`batches`.

        Args:
            rows: places from 0, in any order, less than ``info().samples``.
        """
        ...
