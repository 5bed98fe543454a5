"""How sure a head must be: thresholds that keep to a wanted agreement with the full network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, floor, inf

import numpy as np
from numpy.typing import NDArray

from compressor.types.tensors import Array

_MOST_DIVISIONS = 1000  # of the samples that may differ among exits
_BELOW = 1e-4  # of the least confidence that leaves, where everybody does

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Thresholds:
    """When samples leave.

    Attributes:
        values: of each exit; infinite where nobody leaves.
        left: how many samples leave at each exit.
        wrong: how many of those get another answer than the full network's.
        samples: how many there are.
        cost: what a sample costs on average.
    """

    values: tuple[float, ...]
    left: tuple[int, ...]
    wrong: tuple[int, ...]
    samples: int
    cost: float

    @property
    def agreement(self) -> float:
        """Percent of the samples that get the full network's answer."""
        return 100.0 * (1 - sum(self.wrong) / self.samples)

    @property
    def shares(self) -> tuple[float, ...]:
        """Percent of the samples that leave at each exit, and of those that go all the way."""
        left = (*self.left, self.samples - sum(self.left))
        return tuple(100.0 * count / self.samples for count in left)


def choose_thresholds(
    confidences: Array, agrees: Flags, agreement: float, costs: Sequence[float]
) -> Thresholds:
    """Find the thresholds with which samples cost least, for a wanted agreement.

    A sample leaves at the first exit whose confidence is at least the threshold. Of the samples
    that may get another answer, each exit is given a part, and takes the lowest threshold that
    needs no more; all divisions are tried, in coarser steps where that were more than a thousand.
    Given a division that is the best choice: whoever leaves earlier with the same answer costs
    less and takes nothing from the exits behind.

    Args:
        confidences: ``[exits, samples]``.
        agrees: the head's answer is the full network's, likewise.
        agreement: wanted percentage of samples with the full network's answer.
        costs: of the parts of the network: up to and with the first exit, from there to the
            second, ..., and after the last.

    Raises:
        ValueError: there are no samples, or the arrays do not fit each other.
    """
    exits, samples = confidences.shape
    if agrees.shape != confidences.shape or len(costs) != exits + 1 or not samples:
        raise ValueError(f"{agrees.shape} and {len(costs)} costs for {confidences.shape}")
    budget = floor(samples * (1 - agreement / 100) + 1e-9)
    search = _Search(confidences.astype(np.float32), ~agrees, _step(exits, budget))
    best: Thresholds | None = None
    for values, left, wrong in search.divisions(np.ones(samples, bool), 0, budget):
        reaching = samples - np.cumsum([0, *left])
        cost = float(np.dot(reaching, costs)) / samples
        if best is None or cost < best.cost:
            best = Thresholds(values, left, wrong, samples, cost)
    assert best is not None
    return best


_Found = tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Search:
    """A search over thresholds.

    Attributes:
        sure: confidences ``[exits, samples]``.
        differs: the head's answer is another, likewise.
        step: from one tried part of the samples that may differ to the next.
    """

    sure: NDArray[np.float32]
    differs: Flags
    step: int

    def divisions(self, here: Flags, index: int, budget: int) -> Iterator[_Found]:
        """Yield thresholds, leavers and wrong ones of the exits from ``index`` on.

        Args:
            here: the samples that reach this exit.
            index: the exit.
            budget: how many of them may get another answer.
        """
        if index == len(self.sure):
            yield (), (), ()
            return
        rows = np.flatnonzero(here)
        order = rows[np.argsort(-self.sure[index, rows], kind="stable")]
        ranked, errors = self.sure[index, order], np.cumsum(self.differs[index, order])
        last = index == len(self.sure) - 1
        tried: set[int] = set()
        for given in [budget] if last else [*range(0, budget, self.step), budget]:
            count = _leavers(ranked, errors, given)
            if count in tried:
                continue
            tried.add(count)
            staying = here.copy()
            staying[order[:count]] = False
            wrong = int(errors[count - 1]) if count else 0
            own = _between(ranked, count)
            for values, left, others in self.divisions(staying, index + 1, budget - wrong):
                yield (own, *values), (count, *left), (wrong, *others)


def _step(exits: int, budget: int) -> int:
    """Return the least step with which there are not too many divisions."""
    step = 1
    while comb(budget // step + exits - 1, exits - 1) > _MOST_DIVISIONS:
        step += 1
    return step


def _leavers(ranked: NDArray[np.float32], errors: NDArray[np.int64], budget: int) -> int:
    """Return how many may leave, the surest first; those who are equally sure do so together."""
    count = int(np.searchsorted(errors, budget, side="right"))
    while 0 < count < len(ranked) and ranked[count - 1] == ranked[count]:
        count -= 1
    return count


def _between(ranked: NDArray[np.float32], count: int) -> float:
    """Return a threshold that the first ``count`` reach: halfway to the next."""
    if count == 0:
        return inf
    if count == len(ranked):
        return float(np.float32(ranked[-1] * (1 - _BELOW)))
    middle = np.float32((float(ranked[count - 1]) + float(ranked[count])) / 2)
    return float(middle if middle > ranked[count] else ranked[count - 1])
