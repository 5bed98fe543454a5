"""Search for the least pruning that makes a model fast enough, by measuring candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compressor.errors import SpecError
from compressor.passes.prune.selection import Ranking
from compressor.types.channels import Flags

_MOST_STEPS = 6
_CLOSE = 0.02  # of the float model's time; timings repeat no better than that


@dataclass(frozen=True)
class Timed:
    """A candidate that was measured.

    Attributes:
        length: how much of the order is removed.
        ratio: its time over the whole model's.
    """

    length: int
    ratio: float


def search_latency(
    ranking: Ranking,
    macs: Callable[[Flags], float],
    measured: Callable[[Flags], float],
    target: float,
) -> Timed:
    """Return the mildest measured candidate whose latency ratio is at most ``target``.

    Bisects over multiply-accumulates, of which time is roughly a function, and starts at the
    target itself. At most seven models are measured.

    Args:
        ranking: the order in which units go.
        macs: of the model without some units.
        measured: its time over the whole model's; noisy.
        target: the ratio that is wanted.

    Raises:
        SpecError: even with the whole order gone, the model is slower than that.
    """
    whole, least = macs(ranking.removed(0)), macs(ranking.removed(len(ranking)))
    low, high = least / whole, 1.0  # shares of MACs: of the last too small, and too large
    best: Timed | None = None
    share = max(target, low)
    for _ in range(_MOST_STEPS):
        length = ranking.cut(macs, share * whole)
        ratio = measured(ranking.removed(length))
        if ratio <= target:
            if best is None or length < best.length:
                best = Timed(length, ratio)
            low = share
            if ratio > target - _CLOSE:
                break
        else:
            high = share
        if high - low < _CLOSE / 2:
            break
        share = (low + high) / 2
    if best is not None:
        return best
    ratio = measured(ranking.removed(len(ranking)))
    if ratio <= target:
        return Timed(len(ranking), ratio)
    raise SpecError(
        "target.latency",
        f"is {target:g}, and {ratio:.2f} was measured with every removable unit but the minimum "
        "gone",
        f"set it to {ratio + _CLOSE:.2f} or more, or lower minimum",
    )
