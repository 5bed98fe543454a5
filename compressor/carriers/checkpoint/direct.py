"""Parts of files read past the page cache, and whether they are in it.

A page of the cache has to be found, filled, mapped and freed again, for data that is used once;
in a virtual machine that can take longer than the arithmetic. A direct read fills one buffer again
and again.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

_ALIGNED = 4096  # what the ends of a direct read are multiples of, in the file and in memory
_REQUEST = 1 << 20  # bytes asked for at once: larger requests were not faster


class Buffer:
    """Memory that direct reads can fill.

    Args:
        nbytes: the longest range that will be read.
    """

    def __init__(self, nbytes: int):
        # An anonymous map starts at a page. The range may start and end within an aligned piece.
        self._memory = mmap.mmap(-1, nbytes + 2 * _ALIGNED)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self, handle: int, start: int, stop: int) -> torch.Tensor:
        """Read bytes ``start`` to ``stop`` of a file that was opened by :func:`open_direct`.

        Returns:
            A view of the buffer, uint8.

        Raises:
            OSError: the disk is broken, the file is shorter, or its system reads in other units.
        """
        first = start // _ALIGNED * _ALIGNED
        last = -(-stop // _ALIGNED) * _ALIGNED
        with memoryview(self._memory) as view:
            for at in range(first, last, _REQUEST):
                with view[at - first : min(at + _REQUEST, last) - first] as part:
                    if os.preadv(handle, [part], at) < min(len(part), stop - at):
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._bytes[start - first : stop - first]


def open_direct(path: Path) -> int:
    """Open a file for direct reads; return the handle, to be closed.

    Raises:
        OSError: the file cannot be opened, or its file system or this system has no direct reads.
    """
    if not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


def cached_share(mapped: torch.Tensor) -> float:
    """Return which share of a part of a mapped file is in the page cache.

    Args:
        mapped: a view of the map.

    Returns:
        From 0 to 1; 1 where the system does not tell.
    """
    first = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = mapped.data_ptr() + mapped.nbytes - first
    pages = -(-length // mmap.PAGESIZE)
    there = torch.zeros(pages, dtype=torch.uint8)
    with suppress(AttributeError):  # a C library without it
        arguments = (first, length, there.data_ptr())
        if not ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, arguments)):
            return int((there & 1).sum()) / max(pages, 1)
    return 1.0
