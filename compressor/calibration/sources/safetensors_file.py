"""Arrays in a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from compressor.calibration.sources.file_source import IndexedFileSource
from compressor.calibration.sources.headers import Header
from compressor.calibration.sources.rows import ReadAt, Rows
from compressor.types.tensors import Array

_DTYPES: dict[str, Any] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class SafetensorsSource(IndexedFileSource):
    """Named arrays of a safetensors file, memory-mapped.

    Formats that numpy itself does not have (BF16, F8 and smaller) are refused.
    """

    kind: ClassVar[str] = "safetensors file"

    def headers(self) -> dict[str, Header]:
        """Return the headers of all arrays."""
        with safe_open(self.path, framework="numpy") as file:
            return {name: _header(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118

    @contextmanager
    def open_rows(self, chosen: Mapping[str, str]) -> Iterator[dict[str, Rows]]:
        """Map the file."""
        with safe_open(self.path, framework="numpy") as file:
            yield {name: _SliceRows(file.get_slice(stored)) for name, stored in chosen.items()}

    def open_at(self, chosen: Mapping[str, str]) -> dict[str, ReadAt]:
        """Map the file."""
        file: Any = safe_open(self.path, framework="numpy")
        return {name: _rows_at(file.get_slice(stored)) for name, stored in chosen.items()}

    def files(self) -> list[tuple[str, Path]]:
        """Return the file."""
        return [("", self.path)]


class _SliceRows:
    def __init__(self, tensor: Any):
        self._tensor = tensor
        self._position = 0

    def take(self, count: int) -> Array:
        start, self._position = self._position, self._position + count
        return np.array(self._tensor[start : self._position])


def _rows_at(tensor: Any) -> ReadAt:
    def read_at(rows: NDArray[np.int64]) -> Array:
        # The library knows slices only.
        parts = [tensor[row : row + 1] for row in rows.tolist()]
        return np.concatenate([tensor[0:0], *parts])

    return read_at


def _header(tensor: Any) -> Header:
    dtype = np.dtype(_DTYPES.get(tensor.get_dtype(), "V1"))
    return Header(tuple(tensor.get_shape()), dtype)
