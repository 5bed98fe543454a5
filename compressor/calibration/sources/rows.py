"""Reading an array a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compressor.calibration.sources.headers import Header, native
from compressor.types.tensors import Array

ReadAt: TypeAlias = Callable[[NDArray[np.int64]], Array]
"""Returns the rows with these numbers, in that order, as an array that the caller owns."""
_PART = 1 << 20  # bytes asked for at a time


class Rows(Protocol):
    """The rows of an array, in order."""

    def take(self, count: int) -> Array:
        """Return the next ``count`` rows, as an array that the caller owns."""
        ...


class StreamRows:
    """Rows from a stream that stands behind an npy header.

    Only the rows asked for are in memory. An array in Fortran order is the exception: its rows
    lie scattered over the whole of it, so it is read at once.
    """

    def __init__(self, stream: IO[bytes], header: Header):
        self._stream = stream
        self._header = header
        self._whole: Array | None = None
        self._position = 0

    def take(self, count: int) -> Array:
        """Return the next rows; raises ``EOFError`` where the stream ends before."""
        if not self._header.fortran:
            return self._read((count, *self._header.shape[1:]))
        if self._whole is None:
            self._whole = self._read(self._header.shape[::-1]).T
        start, self._position = self._position, self._position + count
        return self._whole[start : self._position].copy()

    def _read(self, shape: tuple[int, ...]) -> Array:
        array = np.empty(shape, self._header.dtype)
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            part = self._stream.read(min(len(rest), _PART))
            if not part:
                raise EOFError("the data end early")
            rest[: len(part)] = part
            rest = rest[len(part) :]
        return array.astype(native(array.dtype), copy=False)


def read_header(stream: IO[bytes]) -> Header:
    """Read an npy header; the stream then stands at the data.

    Raises:
        ValueError: the stream does not start with an npy header of version 1 or 2 (version 3 is
            only written for structured dtypes), or the header is malformed.
    """
    version = np.lib.format.read_magic(stream)
    readers: dict[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"npy version {version[0]}.{version[1]} is not supported")
    shape, fortran, dtype = readers[version](stream)
    if any(axis < 0 for axis in shape):
        raise ValueError(f"shape {list(shape)} is negative")
    return Header(shape, dtype, fortran and len(shape) > 1)
