"""Data: sources of batches, samples for passes that run models, and the processes that share
them."""

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


class Samples(Protocol):
    """What a pass may run models on: the calibration data, or where there are none, made-up ones.

    The same at each call, so that several models can be compared.
    """

    @property
    def made_up(self) -> bool:
        """There are no calibration data: :meth:`probe` is random and :meth:`batches` is empty."""
        ...

    def probe(self, count: int) -> Batch:
        """Return one batch of about ``count`` samples, as many as the model takes if that is fixed.

        The first calibration samples, or normally distributed floats and integers 0 and 1.
        """
        ...

    def batches(self) -> Iterator[Batch]:
        """Yield the calibration data, batch by batch."""
        ...


def calibration_batch(samples: Samples | None, count: int) -> Batch | None:
    """Return a batch of about ``count`` calibration samples; ``None`` if there are none."""
    return None if samples is None or samples.made_up else samples.probe(count)


ValueT = TypeVar("ValueT")


class Ranks(Protocol):
    """Processes that do the same work on different parts; the first writes what is left of it."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def wait(self) -> None:
        """Go on once all processes have come here."""
        ...

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return each process's value, in their order, to all of them."""
        ...


class Alone:
    """A run in one process."""

    rank = 0
    size = 1

    def wait(self) -> None:
        """Go on."""

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return the only value."""
        return [value]


ALONE = Alone()


def share(items: Iterable[ValueT], ranks: Ranks) -> Iterator[ValueT]:
    """Return every so-many-th item, so that each process has its own and all are had."""
    return islice(items, ranks.rank, None, ranks.size)
