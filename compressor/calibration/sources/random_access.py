"""Samples of any source in any order, as training wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compressor.calibration.sources.regroup import length
from compressor.calibration.sources.spool import Spool, spooled
from compressor.calibration.sources.transformed import TransformedSource
from compressor.errors import DataError
from compressor.progress import Advance, nobody_watches
from compressor.types.data import IndexedSource, Source
from compressor.types.tensors import Batch


class RandomAccess:
    """Samples by number: from the source itself where it can, else from a copy on disk.

    It can be pickled, and then opens the same files again, so that other processes can read too.

    Args:
        source: where the samples come from, perhaps with a transform behind it.
        folder: keeps the copies, each under the digest of its source.
        advance: told how many samples have been copied.

    Raises:
        SpecError: a file does not exist, or the folder cannot be written.
        DataError: the source is unusable or empty, or holds what cannot be copied.
        InputError: the disk is full.
    """

    def __init__(self, source: Source, folder: Path, advance: Advance = nobody_watches):
        self._transform = source if isinstance(source, TransformedSource) else None
        stored = source.source if isinstance(source, TransformedSource) else source
        samples = stored.info().samples if isinstance(stored, IndexedSource) else None
        if isinstance(stored, IndexedSource) and samples is not None:
            self._stored: IndexedSource | Spool = stored
            self.samples = samples
        else:
            self._stored = spooled(stored, folder, advance)
            self.samples = self._stored.samples

    @property
    def random(self) -> bool:
        """The transform draws random numbers."""
        return self._transform is not None and self._transform.random

    def batch(self, rows: NDArray[np.int64], seed: Sequence[int]) -> Batch:
        """Return samples in the order of ``rows``, transformed.

        Args:
            rows: numbers of samples, from 0.
            seed: of the transform's random numbers.

        Raises:
            DataError: the source cannot be read, or the transform fails or returns another number
                of samples.
            IndexError: there is no sample of such a number.
        """
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.samples:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {self.samples} samples")
        batch = self._stored.take(rows)
        if self._transform is None:
            return batch
        batch = self._transform.transformed(batch, seed)
        if length(batch) != len(rows):
            raise DataError(
                self._transform.subject,
                f"returned {length(batch)} samples for {len(rows)}",
                "return one sample for each that is given, as training needs",
            )
        return batch
