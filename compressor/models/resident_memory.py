"""Give back memory that this process does not need: freed blocks, and pages of files."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from compressor.types.tensors import Array

# From the kernel's documentation, admin-guide/mm/pagemap.rst: bit 63 is of pages in memory, 62 of
# those on the disk for want of it, 61 of those that are a file's; a private copy is not.
_PAGE_FLAGS = Path("/proc/self/pagemap")
_FLAG_BYTES, _KIND = 8, np.uint64(61)
_ABSENT, _OF_FILE = 0b000, 0b101


def return_freed_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where it can do that."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def forget_pages(arrays: Iterable[Array]) -> None:
    """Take pages of files that arrays lie in out of this process.

    Whoever reads them gets them again. Arrays of which a page has been changed, or that do not lie
    in a file, are left alone, as are all where the system does not tell.
    """
    with suppress(OSError, AttributeError), _PAGE_FLAGS.open("rb") as flags:
        madvise = ctypes.CDLL(None).madvise
        for array in arrays:
            start = array.__array_interface__["data"][0]
            first, last = -(-start // mmap.PAGESIZE), (start + array.nbytes) // mmap.PAGESIZE
            if last <= first or not array.flags.c_contiguous:
                continue
            flags.seek(first * _FLAG_BYTES)
            held = np.frombuffer(flags.read((last - first) * _FLAG_BYTES), np.uint64) >> _KIND
            if len(held) == last - first and np.isin(held & 7, (_ABSENT, _OF_FILE)).all():
                place = ctypes.c_void_p(first * mmap.PAGESIZE)
                size = ctypes.c_size_t((last - first) * mmap.PAGESIZE)
                madvise(place, size, mmap.MADV_DONTNEED)
