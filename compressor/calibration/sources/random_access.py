"""Access to samples by number, through copies on disk for sources that are streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from compressor.calibration.sources.arrays import mapped_rows
from compressor.calibration.sources.user_functions import TransformedSource, length
from compressor.errors import DataError
from compressor.files import staging, sync
from compressor.progress import Advance, nobody_watches
from compressor.types.data import IndexedSource, Source
from compressor.types.tensors import Array, Batch

_NAMES = "names.json"
_BYTES = 16 << 20  # of one batch on its way to the disk
_MOST = 4096  # samples in such a batch


class Spool:
    """Arrays in npy files that are mapped into memory.

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
            names = enumerate(written["names"])
            self._readers = {name: mapped_rows(folder / _file(place)) for place, name in names}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"copy of data '{folder}'",
                f"cannot be read ({str(error) or type(error).__name__})",
                "remove it: it is made again",
            ) from error

    def __reduce__(self) -> tuple[type[Spool], tuple[Path]]:
        """Open the files again where it is unpickled."""
        return Spool, (self._folder,)

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Return samples by number."""
        return {name: read_at(rows) for name, read_at in self._readers.items()}


def spooled(source: Source, folder: Path, advance: Advance = nobody_watches) -> Spool:
    """Return a copy of a source: the one that is in the folder already, or a new one.

    A copy appears whole or not at all. One batch at a time is in memory.

    Args:
        source: read once from start to end; its digest names the copy.
        folder: where copies are kept; created if needed.
        advance: called with the number of samples copied so far.

    Raises:
        DataError: the source is unusable or empty, or an array's dtype is none that npy files
            can hold without pickle.
        InputError: the disk is full.
    """
    place = folder / f"data-{source.digest()}"
    if not place.is_dir():
        with staging(folder) as staged:
            _write(source, staged, advance)
            for file in staged.iterdir():
                sync(file)
            staged.replace(place)
            sync(folder)
    return Spool(place)


def _write(source: Source, folder: Path, advance: Advance) -> None:
    files: dict[str, _GrowingFile] = {}
    done = 0
    with ExitStack() as stack:
        for batch in source.batches(_batch_size(source)):
            for name, array in batch.items():
                if name not in files:
                    file = _GrowingFile(folder / _file(len(files)), name, array)
                    files[name] = stack.enter_context(file)
                files[name].append(array)
            done += length(batch)
            advance(done)
    if not done:
        raise DataError("training data", "has no samples", "check the source")
    text = json.dumps({"samples": done, "names": list(files)})
    (folder / _NAMES).write_text(text, encoding="utf-8")


def _file(place: int) -> str:
    return f"{place}.npy"  # an array's name may be none that a file can have


def _batch_size(source: Source) -> int:
    """Return how many samples take about 16 MiB if all are like the first."""
    first = next(source.batches(1, 1), {})
    each = sum(array.nbytes for array in first.values())
    return min(max(_BYTES // max(each, 1), 1), _MOST)


class _GrowingFile:
    """An npy file that is written a few rows at a time, with the number of rows at the end.

    Raises:
        DataError: npy files cannot hold the dtype.
    """

    def __init__(self, path: Path, name: str, like: Array):
        self._descr = np.lib.format.dtype_to_descr(like.dtype)
        if like.dtype.hasobject or np.lib.format.descr_to_dtype(self._descr) != like.dtype:
            raise DataError(
                f"training data, array {name!r}",
                f"has dtype {like.dtype}, which cannot be kept on disk without pickle",
                "give bool, integers, floats (bfloat16 as float32) or fixed-length text",
            )
        self._row = like.shape[1:]
        self._rows = 0
        self._stream = path.open("wb")

    def __enter__(self) -> _GrowingFile:
        self._write_header()
        self._start = self._stream.tell()
        return self

    def append(self, array: Array) -> None:
        """Write more rows."""
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._rows += len(array)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stream:
            if error is None:
                self._stream.seek(0)
                self._write_header()
                # NumPy leaves room in a header for the first axis to grow.
                assert self._stream.tell() == self._start

    def _write_header(self) -> None:
        header = {
            "descr": self._descr,
            "fortran_order": False,
            "shape": (self._rows, *self._row),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)


class RandomAccess:
    """Samples by number: from the source itself if it can, else from a copy on disk.

    A pickled copy opens the same files again, so that other processes can read, too.

    Args:
        source: where the samples come from, perhaps with a transform.
        folder: holds the copies, each under the digest of its source.
        advance: called with the number of samples copied so far.

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
