"""Choose one option of each class, at the least loss within a budget of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_MOST_POINTS = 4000
_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Options:
    """What one class offers.

    Attributes:
        times: of each option, ``[n]``; they may be negative where they are differences.
        losses: of each option, ``[n]``.
    """

    times: Numbers
    losses: Numbers


def cheapest(classes: Sequence[Options], budget: float) -> list[int] | None:
    """Return the option of each class whose times fit a budget at the least sum of losses.

    >>> half = Options(np.array([2.0, 1.0]), np.array([0.0, 1.0]))
    >>> cheapest([half, half], 3.0)
    [0, 1]

    Returns:
        The option of each class; ``None`` if even the fastest of each take longer.
    """
    sums, chosen = combined(classes, budget)
    if not len(chosen):
        return None
    place = int(np.lexsort((sums.times, sums.losses))[0])
    return [int(option) for option in chosen[place]]


def combined(
    classes: Sequence[Options], budget: float = np.inf, most: int | None = None
) -> tuple[Options, NDArray[np.int64]]:
    """Return the Pareto-optimal choices of one option of each class.

    The multiple-choice knapsack problem, by dynamic programming over dominance (H. Kellerer,
    U. Pferschy and D. Pisinger, Knapsack Problems, 2004, section 11.5): of all choices among the
    first classes, those remain that no other choice dominates in time and loss. If more than
    ``most`` remain (default: 4,000), times are distinguished at a resolution of their range over
    ``most``; sums stay exact, so a choice never exceeds the budget.

    Returns:
        What each choice takes and loses, by ascending time, and its options ``[n, classes]``.
    """
    times, losses = np.zeros(1), np.zeros(1)
    chosen = np.zeros((1, 0), np.int64)
    least = [float(options.times.min()) for options in classes]
    for index, options in enumerate(classes):
        rest = sum(least[index + 1 :])
        total = (times[:, None] + options.times).ravel()
        loss = (losses[:, None] + options.losses).ravel()
        stay = _undominated(total, loss, budget - rest, most or _MOST_POINTS)
        before, option = np.divmod(stay, len(options.times))
        chosen = np.column_stack([chosen[before], option])
        times, losses = total[stay], loss[stay]
    return Options(times, losses), chosen


def _undominated(times: Numbers, losses: Numbers, budget: float, most: int) -> NDArray[np.int64]:
    """Return the places of points that no other beats in both, by ascending time."""
    order: NDArray[np.int64] = np.lexsort((losses, times))
    order = order[times[order] <= budget + _TOLERANCE * abs(budget)]
    if not order.size:
        return order
    below = np.minimum.accumulate(losses[order])
    places: NDArray[np.int64] = order[np.append(True, below[1:] < below[:-1])]
    if places.size <= most:
        return places
    # The best of each stretch of times is its last; the fastest of all stays, too.
    span = times[places[-1]] - times[places[0]]
    stretch = ((times[places] - times[places[0]]) / span * (most - 1)).astype(np.int64)
    last = np.append(stretch[1:] != stretch[:-1], True)
    last[0] = True
    stay: NDArray[np.int64] = places[last]
    return stay
