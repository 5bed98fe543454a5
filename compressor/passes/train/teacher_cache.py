"""What a teacher gave, kept on the disk: one entry a sample, each with a checksum of its own.

A row without its checksum is not there, so a process that is killed while it writes, or a disk
that loses what was written last, leaves nothing that would be taken for a result.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.files import disk_errors, json_sha256, json_text, staging
from compressor.types.tensors import Array
from compressor.types.training import Rows

_CHECKSUMS = "checksums.bin"
_KEY = "key.json"
_FORMAT = 1
_MARK = 1 << 32  # tells a checksum of zero from none


@dataclass(frozen=True)
class Field:
    """One of the things that a teacher gives for a sample.

    Attributes:
        name: such as ``logits``.
        shape: of one sample.
        dtype: a numpy dtype name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def page_bytes(fields: Sequence[Field], samples: int) -> int:
    """Return how large a page is on the disk, once it is full."""
    return samples * (sum(field.row_bytes for field in fields) + 8)


class Page:
    """Memory-mapped arrays ``[samples, ...]``, of which some rows are there.

    Args:
        folder: pages lie in it, each in a folder named by what its content depends on.
        key: what that is; JSON values.
        fields: what a row consists of.
        samples: how many rows there may be.

    Raises:
        InputError: the disk is full.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], fields: Sequence[Field], samples: int):
        self._fields = tuple(fields)
        self._samples = samples
        described = [[f.name, list(f.shape), f.dtype] for f in fields]
        whole = {"format": _FORMAT, "samples": samples, "fields": described, **key}
        self.folder = folder / f"teacher-{json_sha256(whole)[:32]}"
        if not self._is_whole():
            self._create(whole)
        self._sums = self._mapped(_CHECKSUMS, (samples,), "uint64")
        self._arrays = {
            field.name: self._mapped(f"{index}.bin", (samples, *field.shape), field.dtype)
            for index, field in enumerate(self._fields)
        }

    def _sizes(self) -> dict[str, int]:
        own = {f"{i}.bin": self._samples * f.row_bytes for i, f in enumerate(self._fields)}
        return {_CHECKSUMS: self._samples * 8, **own}

    def _is_whole(self) -> bool:
        paths = {self.folder / name: size for name, size in self._sizes().items()}
        return all(path.is_file() and path.stat().st_size == n for path, n in paths.items())

    def _create(self, key: Mapping[str, Any]) -> None:
        """Make files without rows, all at once; another process may do the same."""
        with staging(self.folder.parent) as staged:
            own = staged / "page"
            own.mkdir()
            (own / _KEY).write_text(json_text(json.loads(json.dumps(key))), encoding="utf-8")
            for name, size in self._sizes().items():
                with (own / name).open("wb") as file:
                    file.truncate(size)
            try:
                own.rename(self.folder)
            except OSError:
                if not self._is_whole():  # damaged; otherwise another process was faster
                    shutil.rmtree(self.folder)
                    own.rename(self.folder)

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        return np.memmap(self.folder / name, dtype, "r", shape=shape)

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """Tell which rows have a checksum; whether it is right is seen when they are read."""
        return np.asarray(self._sums[rows] != 0)

    def read(self, rows: Rows) -> dict[str, Array] | None:
        """Return rows by field, or ``None`` where one is not there or damaged."""
        sums = self._sums[rows]
        if not sums.all():
            return None
        found = {name: np.asarray(array[rows]) for name, array in self._arrays.items()}
        return found if np.array_equal(self._checksums(found), sums) else None

    def write(self, rows: Rows, values: Mapping[str, Array]) -> None:
        """Put rows into the files.

        Written as to any file, not through the mapping: a full disk is then an error with a
        message, and no signal that ends the process.

        Raises:
            InputError: the disk is full.
        """
        own = {
            field.name: np.ascontiguousarray(values[field.name], field.dtype)
            for field in self._fields
        }
        files = [(f"{i}.bin", own[f.name], f.row_bytes) for i, f in enumerate(self._fields)]
        with disk_errors(self.folder):
            for name, array, size in [*files, (_CHECKSUMS, self._checksums(own), 8)]:
                with (self.folder / name).open("r+b", buffering=0) as file:
                    for row, value in zip(rows, array, strict=True):
                        file.seek(int(row) * size)
                        _write_all(file, value.tobytes())

    def _checksums(self, values: Mapping[str, Array]) -> NDArray[np.uint64]:
        arrays = [values[field.name] for field in self._fields]
        found = np.zeros(len(arrays[0]), np.uint64)
        for index in range(len(found)):
            total = 0
            for array in arrays:
                total = zlib.crc32(array[index].tobytes(), total)
            found[index] = total | _MARK
        return found


def _write_all(file: Any, data: bytes) -> None:
    """Write everything: an unbuffered file may take a part only, such as where the disk is full."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
