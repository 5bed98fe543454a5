"""How much memory a call takes while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compressor.models.resident_memory import return_freed_memory


def growth(call: Callable[[], object]) -> int:
    """Return by how many bytes this process grows while it runs a call, at most.

    The kernel keeps the highest mark, so nothing is missed between two looks.
    """
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    before = _bytes("VmRSS")
    call()
    return _bytes("VmHWM") - before


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
