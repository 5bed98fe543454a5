"""A fold: every so-many-th sample of a source, so that several roles share one source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compressor.calibration.sources.class_folders import ClassFolderSource
from compressor.errors import DataError
from compressor.files import json_sha256
from compressor.types.data import IndexedSource, Source, SourceInfo
from compressor.types.tensors import Batch, samples_in


@dataclass(frozen=True)
class Fold:
    """Samples ``number - 1``, ``number - 1 + of``, … of a source.

    Folds of one source with the same ``of`` have no sample in common, and the same mixture of
    classes even where samples are sorted by class.

    Attributes:
        number: which of them, from 1.
        of: how many there are.
        samples: at most so many; of files in class folders, spread evenly over the fold.
    """

    source: Source
    number: int
    of: int
    samples: int | None = None

    def info(self) -> SourceInfo:
        """Describe the source.

        Raises:
            DataError: the source is unusable, or has too few samples for this fold.
        """
        info = self.source.info()
        if info.samples is None:
            return info
        whole = len(range(self.number - 1, info.samples, self.of))
        if not whole:
            raise DataError(
                f"fold {self.number}/{self.of}",
                f"holds nothing of {info.samples} samples",
                "give more samples, or fewer folds",
            )
        return replace(info, samples=whole if self.samples is None else min(whole, self.samples))

    def digest(self) -> str:
        """Return a hash of the content and of which part of it this is."""
        return json_sha256([self.source.digest(), "fold", self.number, self.of, self.samples])

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit`` samples in all."""
        known = [n for n in (limit, self.samples) if n is not None]
        left = min(known, default=None)
        # Single samples are read singly: lines of text then stay without padding.
        stride = 1 if size == 1 else size * self.of
        place = 0
        for batch in self.source.batches(stride):
            if left == 0:
                return
            first = (self.number - 1 - place) % self.of
            place += samples_in(batch)
            picked = {name: array[first :: self.of][:left] for name, array in batch.items()}
            count = samples_in(picked)
            left = None if left is None else left - count
            if count:
                yield picked


@dataclass(frozen=True)
class IndexedFold(Fold):
    """A fold of a source whose samples can be read by number."""

    source: IndexedSource

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by their place in the fold."""
        return self.source.take(self._places[rows])

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit`` samples in all."""
        count = len(self._places) if limit is None else min(limit, len(self._places))
        for start in range(0, count, size):
            yield self.take(np.arange(start, min(start + size, count)))

    @property
    def _places(self) -> NDArray[np.int64]:
        """The places of the fold's samples in the source."""
        places = np.arange(self.number - 1, self.source.info().samples or 0, self.of)
        count = self.info().samples or 0
        if isinstance(self.source, ClassFolderSource):  # sorted by class
            return places[np.arange(count) * len(places) // max(count, 1)]
        return places[:count]


def fold_of(source: Source, fold: str, samples: int | None) -> Fold:
    """Return a fold of a source.

    Args:
        fold: ``NUMBER/OF``, such as ``1/4``.
    """
    if isinstance(source, IndexedSource):
        return IndexedFold(source, *fold_numbers(fold), samples)
    return Fold(source, *fold_numbers(fold), samples)


def fold_numbers(fold: str | None) -> tuple[int, int]:
    """Return ``NUMBER/OF`` as numbers; 1 and 1 without a fold."""
    number, of = map(int, (fold or "1/1").split("/"))
    return number, of
