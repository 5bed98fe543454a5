"""Keep freed memory while blocks are computed, instead of giving it back to the system each time.

Every block needs the same few buffers of some megabytes. By default glibc maps such sizes anew, or
trims them from the end of its heap, whenever they are freed; the next block then takes its pages
from the system one by one, and page faults cost up to half as much again as the arithmetic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# From <malloc.h>. Setting either ends glibc's own adjustment of both; these are what it starts at.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_DEFAULT = 128 << 10
_LARGEST = 32 << 20  # the most that older versions take as bound between heap and maps


@contextmanager
def kept_memory(nbytes: int) -> Iterator[None]:
    """Keep up to so many freed bytes a thread within the block; give back what is free after it.

    Has no effect with a C library that is not glibc.

    Args:
        nbytes: at the end of each heap, of which a thread has one.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, nbytes)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _DEFAULT)
        libc.mallopt(_TRIM_THRESHOLD, _DEFAULT)
        libc.malloc_trim(ctypes.c_size_t(0))
