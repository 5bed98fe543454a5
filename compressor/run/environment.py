"""The machine and the versions that latencies were measured with."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from compressor.store import compute_versions


def environment() -> dict[str, Any]:
    """Describe versions and machine, as in ``report.json``."""
    return {
        "python": platform.python_version(),
        "versions": dict(compute_versions()),
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Describe what a latency holds for, and no other."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
