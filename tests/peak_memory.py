"""How much memory a call takes while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.models import resident_memory

_trim = resident_memory._trim  # before tests keep freed memory
_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGEST = 32 << 20  # where its own adjustment ends


def growth(call: Callable[[], object]) -> int:
    """Return by how many bytes this process grows while it runs a call, at most.

    The kernel keeps the highest mark, so nothing is missed between two looks. Larger blocks are
    mapped meanwhile: in a heap that tests before have left in pieces, freed ones would stay.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    set_option(_MMAP_THRESHOLD, 128 << 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_memory, "_trim", _trim)
        resident_memory.return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
        before = _bytes("VmRSS")
        try:
            call()
            return _bytes("VmHWM") - before
        finally:
            set_option(_MMAP_THRESHOLD, _LARGEST)


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
