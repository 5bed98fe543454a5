"""Data: sources of batches, samples for passes that run models, and processes that share work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from compressor.types.tensors import Batch, TensorSpec


@dataclass(frozen=True)
class SourceInfo:
    """What a source offers.

    Attributes:
        samples: the number of samples, limited by the option ``samples``; ``None`` if unknown.
        fields: the arrays of a batch, renamed but not transformed.
    """

    samples: int | None
    fields: tuple[TensorSpec, ...]


class Source(Protocol):
    """A repeatable stream of batches."""

    def info(self) -> SourceInfo:
        """Describe the source; reads headers only."""
        ...

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, with at most ``limit`` samples in total."""
        ...

    def digest(self) -> str:
        """Return a hash of the content: equal digests give equal batches."""
        ...


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source with random access to its samples."""

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by their position in the stream of :meth:`batches`.

        Args:
            rows: positions from 0, in any order, below ``info().samples``.
        """
        ...


class Samples(Protocol):
    """Samples on which a pass may run models: calibration data, or random ones without them.

    They are the same at each call, so that several models can be compared.
    """

    @property
    def made_up(self) -> bool:
        """Whether calibration data are missing: :meth:`probe` is random, :meth:`batches` empty."""
        ...

    def probe(self, count: int) -> Batch:
        """Return a batch of about ``count`` samples, or of the model's batch size if it is fixed.

        These are the first calibration samples, or normally distributed floats and integers 0
        and 1.
        """
        ...

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the calibration data."""
        ...


def calibration_batch(samples: Samples | None, count: int) -> Batch | None:
    """Return a batch of about ``count`` calibration samples; ``None`` if there are none."""
    return None if samples is None or samples.made_up else samples.probe(count)


ValueT = TypeVar("ValueT")


@runtime_checkable
class Ranks(Protocol):
    """Processes that do the same work on different parts; the first one writes the results."""

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def wait(self) -> None:
        """Wait until all processes have reached this point."""
        ...

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return the values of all processes by rank, to each of them."""
        ...


class Alone:
    """The only process of a run."""

    rank = 0
    size = 1

    def wait(self) -> None:
        """Return at once."""

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return the only value."""
        return [value]


ALONE = Alone()


def share(items: Iterable[ValueT], ranks: Ranks) -> Iterator[ValueT]:
    """Return this process's share of items; each item belongs to one process."""
    return islice(items, ranks.rank, None, ranks.size)
