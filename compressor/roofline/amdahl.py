"""The roofline and Amdahl's law.

Williams, Waterman and Patterson 2009, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures": what does so many operations on so many bytes takes at least the longer
of the two times. Amdahl 1967, "Validity of the single processor approach to achieving large scale
computing capabilities": what is not made faster bounds the speed-up of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence


def roof_seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """Return the least time that the machine allows.

    Args:
        flops: operations.
        moved: bytes.
        peak: operations a second.
        bandwidth: bytes a second.
    """
    return max(flops / peak, moved / bandwidth)


def is_memory_bound(flops: float, moved: float, peak: float, bandwidth: float) -> bool:
    """Tell whether moving the bytes takes longer than computing."""
    return moved / bandwidth > flops / peak


def overall_speedup(whole: float, parts: Sequence[float], speedups: Sequence[float]) -> float:
    """Return how much faster the whole becomes.

    Args:
        whole: seconds, at least the sum of the parts.
        parts: seconds of what becomes faster.
        speedups: how much faster each becomes; 1 where it does not.
    """
    saved = sum(t - t / s for t, s in zip(parts, speedups, strict=True))
    return whole / (whole - saved)


def limit(whole: float, parts: Sequence[float]) -> float | None:
    """Return the speed-up if the parts took no time; ``None`` where nothing else takes any."""
    rest = whole - sum(parts)
    return whole / rest if rest > 0 else None
