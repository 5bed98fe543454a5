"""Groups of channels that keep the same share of their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from compressor.passes.prune.criteria import Queue
from compressor.types.channels import Units


@dataclass(frozen=True)
class Tie:
    """Some of the groups that can lose units.

    Attributes:
        places: their places among these groups.
        shares: what may remain of each, ascending; the last is all.
    """

    places: tuple[int, ...]
    shares: tuple[Fraction, ...]

    def queue(self, queues: Sequence[Queue]) -> Queue:
        """Merge the queues of the groups: a step takes of each what comes next in its own order.

        What a step is worth is the mean over groups of what its units are.

        Args:
            queues: those of all groups that can lose units.
        """
        members = [queues[place] for place in self.places]
        units, values, left = list[Units](), list[float](), [sum(len(q.units) for q in members)]
        ends = [len(q.units) for q in members]
        for share in reversed((Fraction(0), *self.shares[:-1])):
            starts, ends = ends, [int(share * len(q.units)) for q in members]
            parts = [
                slice(len(q.units) - start, len(q.units) - end)
                for q, start, end in zip(members, starts, ends, strict=True)
            ]
            taken = [q.units[part] for q, part in zip(members, parts, strict=True)]
            worth = np.mean([q.values[p].mean() for q, p in zip(members, parts, strict=True)])
            units += taken
            values += [float(worth)] * sum(map(len, taken))
            if share:
                left.append(sum(ends))
        ascending = np.maximum.accumulate(np.array(values))
        return Queue(np.concatenate(units), ascending, np.array(left[::-1], np.int64))


def tied(places: Sequence[int], remaining: Sequence[Units]) -> Tie | None:
    """Tie groups; ``None`` where no share can remain of all of them.

    Args:
        places: their places among the groups that can lose units.
        remaining: how many units may remain of each of them, ascending; the last is all of them.
    """
    every = [{Fraction(int(n), int(counts[-1])) for n in counts} for counts in remaining]
    common = tuple(sorted(every[0].intersection(*every[1:])))
    return Tie(tuple(places), common) if len(common) > 1 else None
