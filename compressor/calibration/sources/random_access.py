"""Access to samples by number, through copies on disk for sources that are streams."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from compressor.calibration.sources.file_source import native
from compressor.calibration.sources.user_functions import TransformedSource
from compressor.errors import DataError
from compressor.files import damage, seal, staging, sync
from compressor.progress import Advance, nobody_watches
from compressor.types.data import IndexedSource, Source
from compressor.types.tensors import Array, Batch, samples_in

_NAMES = "names.json"
_FORMAT = 3
_BYTES = 16 << 20  # of one batch on its way to the disk
_MOST = 4096  # samples in such a batch


class Spool:
    """Arrays in files that are mapped into memory.

    Args:
        folder: holds what :func:`spooled` wrote.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            written = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
            self.samples: int = written["samples"]
            self._arrays = {
                name: _mapped(folder / _file(place), dtype, (self.samples, *row))
                for place, (name, dtype, row) in enumerate(written["arrays"])
            }
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"copy of data '{folder}'",
                f"cannot be read ({str(error) or type(error).__name__})",
                "remove it; it is then made again",
            ) from error

    def __reduce__(self) -> tuple[type[Spool], tuple[Path]]:
        """Open the files again where it is unpickled."""
        return Spool, (self._folder,)

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by number."""
        return {n: np.asarray(a[rows], native(a.dtype), order="C") for n, a in self._arrays.items()}


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    """Map a file's array into memory; one without elements has no bytes to map."""
    return np.memmap(path, dtype, "r", shape=shape) if all(shape) else np.empty(shape, dtype)


def spooled(
    source: Source,
    folder: Path,
    advance: Advance = nobody_watches,
    note: Callable[[str], None] = lambda _: None,
) -> Spool:
    """Return a copy of a source: the one that is in the folder already and whole, or a new one.

    A copy appears whole or not at all. One batch at a time is in memory.

    Args:
        source: read once from start to end; its digest names the copy.
        folder: where copies are kept; created if needed.
        advance: called with the number of samples copied so far.
        note: called with one line if the copy that is there is damaged.

    Raises:
        DataError: the source is unusable or empty, or an array's dtype takes pickle to store.
        InputError: the disk is full.
    """
    place = folder / f"data-{_FORMAT}-{source.digest()}"
    problem = damage(place) if place.is_dir() else ""
    if problem:
        note(f"the copy of the training data is damaged ({problem}): it is made again")
        shutil.rmtree(place)
    if not place.is_dir():
        with staging(folder) as staged:
            _write(source, staged, advance)
            seal(staged)
            staged.replace(place)
            sync(folder)
    return Spool(place)


def _write(source: Source, folder: Path, advance: Advance) -> None:
    files: dict[str, IO[bytes]] = {}
    arrays: list[tuple[str, str, tuple[int, ...]]] = []
    done = 0
    with ExitStack() as stack:
        for batch in source.batches(_batch_size(source)):
            for name, array in batch.items():
                if name not in files:
                    _check_dtype(name, array.dtype)
                    files[name] = stack.enter_context((folder / _file(len(files))).open("wb"))
                    arrays.append((name, _named(array.dtype), array.shape[1:]))
                files[name].write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            done += samples_in(batch)
            advance(done)
    if not done:
        raise DataError("training data", "has no samples", "check the source")
    text = json.dumps({"samples": done, "arrays": arrays})
    (folder / _NAMES).write_text(text, encoding="utf-8")


def _named(dtype: np.dtype[Any]) -> str:
    """Return what numpy makes the type of again: its name for bfloat16, which has no code."""
    return dtype.name if dtype == bfloat16 else dtype.str


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject or np.dtype(_named(dtype)) != dtype:
        raise DataError(
            f"training data, array {name!r}",
            f"has dtype {dtype}, which cannot be stored without pickle",
            "give bool, integers, floats (those of 8 bits as float32) or fixed-length text",
        )


def _file(place: int) -> str:
    return f"{place}.bin"  # an array's name may be none that a file can have


def _batch_size(source: Source) -> int:
    """Return how many samples take about 16 MiB if all are like the first."""
    first = next(source.batches(1, 1), {})
    each = sum(array.nbytes for array in first.values())
    return min(max(_BYTES // max(each, 1), 1), _MOST)


class RandomAccess:
    """Samples by number: from the source itself if it can, else from a copy on disk.

    A pickled copy opens the same files again, so that other processes can read, too.

    Args:
        source: where the samples come from, perhaps with a transform.
        folder: holds the copies, each under the digest of its source.
        advance: called with the number of samples copied so far.
        note: called with one line if a copy is damaged.

    Raises:
        SpecError: a file does not exist, or the folder cannot be written.
        DataError: the source is unusable or empty, or holds what cannot be copied.
        InputError: the disk is full.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        advance: Advance = nobody_watches,
        note: Callable[[str], None] = lambda _: None,
    ):
        self._transform = source if isinstance(source, TransformedSource) else None
        stored = source.source if isinstance(source, TransformedSource) else source
        samples = stored.info().samples if isinstance(stored, IndexedSource) else None
        if isinstance(stored, IndexedSource) and samples is not None:
            self._stored: IndexedSource | Spool = stored
            self.samples = samples
        else:
            self._stored = spooled(stored, folder, advance, note)
            self.samples = self._stored.samples
        if self._transform is not None:  # what it transforms comes from here
            self._transform = replace(self._transform, source=cast("Source", self._stored))

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
        return self._transform.transformed(batch, seed)
