"""Which round comes next in the search for the smallest archive, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FIRST = 1 / 16  # of the bytes of the floats: what the first round aims at
_NEXT = 0.5  # of the bytes that the last kept round has
_LAST = 0.93  # once a round is to take away less than that leaves, the search ends


@dataclass(frozen=True)
class Round:
    """A round that is over: weights lost bytes, and then the network was trained.

    Attributes:
        target: bytes that it aimed at.
        nbytes: bytes that weights take after it.
        drop: of the metric, against the network that the pass was given, on the search data.
        least: the lower end of its 95 % interval.
        start: the number of the round that it began with; -1 for the floats.
    """

    target: float
    nbytes: float
    drop: float
    least: float
    start: int = -1

    def verdict(self, limit: float) -> Literal["kept", "lost", "open"]:
        """Return whether the drop keeps a limit, or is known to be above it.

        ``lost`` is the paired test's word: the whole interval lies above the limit. Between the two
        it is ``open``.
        """
        if self.drop <= limit:
            return "kept"
        return "lost" if self.least > limit else "open"


@dataclass(frozen=True)
class Step:
    """What a round is to do: start from the end of an earlier one, and aim at so many bytes."""

    start: int
    target: float


def best(rounds: Sequence[Round], limit: float) -> int:
    """Return the number of the smallest round that keeps the limit; -1 if none does."""
    kept = [n for n, one in enumerate(rounds) if one.verdict(limit) == "kept"]
    return min(kept, key=lambda n: rounds[n].nbytes, default=-1)


def next_step(rounds: Sequence[Round], limit: float, nbytes: float, most: int) -> Step | None:
    """Return what the next round is to do; ``None`` if the search is over.

    A round that keeps the limit is the start of the next. One whose verdict is open is trained for
    another round at the same bytes. After that, or if the limit is known to be broken, the search
    goes back to the smallest round that kept it and takes away less: the square root of the share.

    Args:
        rounds: those that are over, in their order.
        limit: the largest drop that is allowed.
        nbytes: of the floats.
        most: rounds, at most.
    """
    share, again = FIRST, False
    for one in rounds:
        verdict = one.verdict(limit)
        if verdict == "kept":
            share, again = max(share, _NEXT), False
        elif verdict == "open" and not again:
            again = True
        else:
            share, again = math.sqrt(share), False
    if len(rounds) >= most or share > _LAST:
        return None
    if again:
        last = rounds[-1]  # training alone may have taken away more than was asked for
        return Step(len(rounds) - 1, min(last.target, last.nbytes))
    start = best(rounds, limit)
    return Step(start, share * (nbytes if start < 0 else rounds[start].nbytes))
