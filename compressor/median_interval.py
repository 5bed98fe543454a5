"""An interval for the median of values that come in groups.

Within a group values may hang together in any way. All that is asked for is that a whole group is
as likely to lie on one side of the median as it lies on the other. So the interval holds every
value at which the signs of the differences, summed up in each group, could as well have been those
with the signs of some groups turned over: a randomization test (R. A. Fisher, "The Design of
Experiments", 1935, section 21) on groups (I. A. Canay, J. P. Romano and A. M. Shaikh,
"Randomization Tests under an Approximate Symmetry Assumption", Econometrica 85, 2017). Signs are
bounded: half of the values may be wild, and the interval stays narrow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

import numpy as np

from compressor.types.tensors import Array

_ALL = 10  # groups up to which every choice of signs is looked at
_DRAWN = 2000


def median_interval(groups: Sequence[Array], level: float) -> tuple[float, float]:
    """Return bounds of the median of all values.

    Args:
        groups: one array each, ``[values]``, none empty.
        level: the least probability that the bounds hold the median. So few groups as cannot
            reach it (six reach 0.969) give the smallest and the largest value.
    """
    ordered = [np.sort(group) for group in groups]
    pooled = np.sort(np.concatenate(ordered))
    turned = _turned(len(groups))

    def kept(index: int) -> bool:
        sums = np.array([_signs(group, pooled[index]) for group in ordered])
        as_far = np.abs(turned @ sums) >= abs(sums.sum())
        return bool(as_far.mean() > 1 - level)

    last, middle = (pooled.size - 1) // 2, pooled.size // 2
    low = bisect_left(range(last), True, key=kept)
    high = bisect_left(range(middle + 1, pooled.size), True, key=lambda i: not kept(i)) + middle
    return float(pooled[low]), float(pooled[high])


def _signs(ordered: Array, bound: float) -> int:
    """Return by how many more values lie above the bound than below."""
    below, not_above = np.searchsorted(ordered, bound), np.searchsorted(ordered, bound, "right")
    return int(ordered.size - not_above - below)


@cache
def _turned(count: int) -> Array:
    """Return choices of signs, ``[choices, count]``; the one that turns nothing is among them."""
    if count <= _ALL:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, (_DRAWN, count))
        bits[0] = 0
    return 1 - 2 * bits
