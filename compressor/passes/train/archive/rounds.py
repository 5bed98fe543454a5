"""Which round comes next in the search for the smallest archive, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

FIRST = 1 / 32  # of the bytes of the floats: what the first round aims at
_MORE = 2  # times the bytes, after first rounds that lost too much
_NEXT = 0.5  # of the bytes of a round: what the next aims at, until one has lost too much
_LAST = 0.93  # once a round is to take away less than that leaves, the search ends
_LONGEST = 16  # times the first round
_ALPHA = 0.05  # of the tests: what the gate takes

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


@dataclass(frozen=True)
class Step:
    """Instructions for a round.

    Attributes:
        start: the number of the round that it starts from; -1 for the floats.
        target: the bytes that it aims at.
        length: how many times as long as the first round it is.
    """

    start: int
    target: float
    length: int = 1


def verdicts(rounds: Sequence[Round], limit: float) -> list[Verdict]:
    """Judge rounds in their order, at the largest drop that is allowed."""
    found: list[Verdict] = []
    for one in rounds:
        found.append(one.verdict(limit, 1 + found.count("open")))
    return found


def best(rounds: Sequence[Round], limit: float) -> int:
    """Return the number of the smallest round that keeps the limit; -1 if none does."""
    kept = [n for n, verdict in enumerate(verdicts(rounds, limit)) if verdict == "kept"]
    return min(kept, key=lambda n: rounds[n].nbytes, default=-1)


def next_step(rounds: Sequence[Round], limit: float, nbytes: float, most: int) -> Step | None:
    """Return what the next round is to do; ``None`` if the search is over.

    Each round starts from the floats, as codes that were taken for more bytes are a worse start,
    and aims at half of the bytes of the smallest that was kept. One that may have been good enough
    is trained on, once, at the same bytes. After bytes that were not kept, rounds take away half as
    much, in logarithms; while none have been kept, they have twice the bytes. Each round that was
    not kept makes those after it twice as long: that fewer bytes are too few has been shown only
    for rounds so short.

    Args:
        rounds: those that are over, in their order.
        limit: the largest drop that is allowed.
        nbytes: of the floats.
        most: rounds, at most.
    """
    if len(rounds) >= most:
        return None
    judged, start = verdicts(rounds, limit), best(rounds, limit)
    length = min(2 ** sum(verdict != "kept" for verdict in judged), _LONGEST)
    last = len(rounds) - 1
    if rounds and judged[last] == "open" and not _is_trained_on(rounds, judged, last):
        return Step(last, rounds[last].target, length)
    failed = [
        verdict != "kept" and (n == last or not _is_trained_on(rounds, judged, n + 1))
        for n, verdict in enumerate(judged)
    ]
    if start < 0:
        target = FIRST * nbytes * _MORE ** sum(failed)
        return Step(-1, target, length) if target < nbytes else None
    left = _NEXT ** (0.5 ** sum(failed[judged.index("kept") :]))
    return Step(-1, left * rounds[start].nbytes, length) if left <= _LAST else None


def _is_trained_on(rounds: Sequence[Round], judged: Sequence[Verdict], number: int) -> bool:
    """Whether a round goes on at the bytes of the one before, which may have been good enough."""
    return number > 0 and rounds[number].start == number - 1 and judged[number - 1] == "open"
