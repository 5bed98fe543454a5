"""Which round comes next in the search for the smallest archive, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, TypeAlias

FIRST = 1 / 32  # of the bytes of the floats: what the first round aims at
_NEXT = 0.5  # of the bytes of a round: what the next aims at, until too few are found
_LAST = 0.93  # once a round is to take away less than that leaves, the search ends
_ALPHA = 0.05  # of the tests: what the gate takes

_BETTER = 0.5  # of a drop: what more training leaves of it at best

Verdict: TypeAlias = Literal["kept", "open", "lost"]


@dataclass(frozen=True)
class Round:
    """A round that is over: weights lost bytes, and then the network was trained.

    Attributes:
        target: bytes that it aimed at.
        nbytes: bytes that weights take after it.
        drop: of the metric, against the network that the pass was given, on the search data.
        error: the standard error of the drop.
        price: loss for each byte, at the end.
        start: the number of the round that it began with; -1 for the floats.
    """

    target: float
    nbytes: float
    drop: float
    error: float
    price: float
    start: int = -1

    def verdict(self, limit: float, tries: int) -> Verdict:
        """Return whether other samples are to show no significant loss.

        As many samples as these again measure a drop that differs from this one by ``sqrt(2)``
        standard errors, and their one-sided test finds a loss where it is ``z`` of them above the
        limit. A round is ``kept`` if this is to be so for 5 % of such samples at most. Each try
        after one that was near is one more chance for a network that is too small, so the 5 % are
        shared among these tries (Bonferroni). A round is ``lost`` if these samples show a loss
        already: it had no chance.

        Args:
            limit: the largest drop that is allowed.
            tries: at the limit, this one included.
        """
        z = NormalDist().inv_cdf
        usual = z(1 - _ALPHA)
        if self.drop + (math.sqrt(2) * z(1 - _ALPHA / tries) - usual) * self.error <= limit:
            return "kept"
        return "lost" if self.drop - usual * self.error > limit else "open"

    def hopeless(self, limit: float) -> bool:
        """Return whether more training would not make up for what was lost."""
        after = replace(self, drop=_BETTER * self.drop)
        return after.verdict(limit, 1) == "lost"


@dataclass(frozen=True)
class Step:
    """What a round is to do.

    Attributes:
        start: the number of the round that it starts from; -1 for the floats.
        target: the bytes that it aims at.
        length: how many times as long as the first round it is.
    """

    start: int
    target: float
    length: int = 1


@dataclass(frozen=True)
class Found:
    """What rounds have shown.

    Attributes:
        verdicts: of each.
        failed: the most bytes of which it is known that they are too few; 0 if it is of none.
        again: the last round is to go on at the same bytes.
        length: of the next round, in first rounds.
    """

    verdicts: tuple[Verdict, ...] = ()
    failed: float = 0.0
    again: bool = False
    length: int = 1

    @classmethod
    def by(cls, rounds: Sequence[Round], limit: float) -> Found:
        """Judge rounds in their order, at the largest drop that is allowed."""
        verdicts: list[Verdict] = []
        failed, again, length = 0.0, False, 1
        for one in rounds:
            verdict = one.verdict(limit, 1 + verdicts.count("open"))
            verdicts.append(verdict)
            if verdict == "kept" or (verdict == "open" and not failed):
                again = False
                continue
            again = not (again or one.hopeless(limit))
            if not again:
                failed = max(failed, one.target)
            length += 1
        return cls(tuple(verdicts), failed, again, length)


def best(rounds: Sequence[Round], limit: float) -> int:
    """Return the number of the smallest round that keeps the limit; -1 if none does."""
    verdicts = Found.by(rounds, limit).verdicts
    kept = [n for n, verdict in enumerate(verdicts) if verdict == "kept"]
    return min(kept, key=lambda n: rounds[n].nbytes, default=-1)


def next_step(rounds: Sequence[Round], limit: float, nbytes: float, most: int) -> Step | None:
    """Return what the next round is to do; ``None`` if the search is over.

    Rounds halve the bytes until one has lost too much, also after it has been trained for longer.
    From then on the search looks between the bytes that are too few and the fewest that were not:
    these are to be kept for sure, if need be after more training, and then the middle is tried.
    Each round that is not kept makes those after it longer by the length of the first.

    Args:
        rounds: those that are over, in their order.
        limit: the largest drop that is allowed.
        nbytes: of the floats.
        most: rounds, at most.
    """
    found = Found.by(rounds, limit)
    if len(rounds) >= most:
        return None
    if found.again:
        last = rounds[-1]  # training alone may have taken away more than was asked for
        return Step(len(rounds) - 1, min(last.target, last.nbytes), found.length)
    if not found.failed:
        if not rounds:
            return Step(-1, FIRST * nbytes)
        return Step(len(rounds) - 1, _NEXT * rounds[-1].nbytes, found.length)
    above = [
        n
        for n, one in enumerate(rounds)
        if one.nbytes > found.failed and found.verdicts[n] != "lost"
    ]
    if not above:
        more = found.failed / _NEXT
        return Step(-1, more, found.length) if more < nbytes else None
    start = min(above, key=lambda n: (rounds[n].nbytes, -n))
    size = rounds[start].nbytes
    if found.verdicts[start] != "kept":
        return Step(start, size, found.length)
    middle = math.sqrt(found.failed * size)
    return Step(start, middle, found.length) if middle <= _LAST * size else None
