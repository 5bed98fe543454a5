"""Figures of a whole corpus as means of one value a sample.

An F1 score or a rank correlation is no mean over samples, but every comparison here is paired by
sample. To first order, a figure moves with each sample's weight by its influence on it. The figure
plus a sample's influence is that sample's value (the infinitesimal jackknife: Jaeckel 1972; Efron
1982, "The Jackknife, the Bootstrap and Other Resampling Plans", chapter 6): the values' mean is
exactly the figure, and their spread gives its standard error, so intervals and paired tests of
means hold for it.
"""

from __future__ import annotations

import numpy as np

from compressor.types.tensors import Array


def ratio(parts: Array) -> Array:
    """Return values of the sum of one column over the sum of another.

    Args:
        parts: numerator and denominator of each sample, ``[N, 2]``.

    Returns:
        One value a sample, ``[N]``.

    Raises:
        ValueError: the denominators are all zero.
    """
    above, below = parts.T
    whole = below.sum()
    if whole == 0:
        raise ValueError("no sample has anything to count")
    figure = above.sum() / whole
    return np.asarray(figure + (above - figure * below) * len(parts) / whole)


def f1(parts: Array) -> Array:
    """Return values of the F1 score: of two classes the second's, of more the mean of all.

    A class's score is ``2 TP / (2 TP + FP + FN)``. Classes that no sample has and none is given
    are left out.

    Args:
        parts: for each sample and class, twice the decisions that are right, and the decisions for
            the class plus those that should be, ``[N, 2 * classes]``.

    Raises:
        ValueError: nothing is counted.
    """
    hits, sizes = np.split(parts, 2, axis=1)
    chosen = np.array([1]) if hits.shape[1] == 2 else np.flatnonzero(sizes.sum(axis=0))
    scores = [ratio(np.stack([hits[:, c], sizes[:, c]], axis=1)) for c in chosen]
    if not scores:
        raise ValueError("no sample has anything to count")
    return np.asarray(np.mean(scores, axis=0))


def rank_correlation(parts: Array) -> Array:
    """Return values of Spearman's correlation: that of ranks; equal values have their mean rank.

    Args:
        parts: the two values of each sample, ``[N, 2]``.

    Raises:
        ValueError: one of the two is the same for all samples.
    """
    x, y = (_Ranks(column) for column in parts.T)
    joint = (x.ranks * y.ranks).mean() - 0.25  # ranks are shares, whose mean is one half
    spread_x, spread_y = ((r.ranks**2).mean() - 0.25 for r in (x, y))
    if min(spread_x, spread_y) <= 0:
        raise ValueError("the scores of all samples are equal: there is no order to compare")
    scale = np.sqrt(spread_x * spread_y)
    figure = joint / scale
    # How the three moments move with a sample's weight: by its own term, and by the ranks of
    # the samples above it.
    moved = x.ranks * y.ranks + x.above(y.ranks) + y.above(x.ranks) - 3 * (joint + 0.25)
    moved_x, moved_y = (
        r.ranks**2 + 2 * r.above(r.ranks) - 3 * (spread + 0.25)
        for r, spread in ((x, spread_x), (y, spread_y))
    )
    change = moved / scale - figure / 2 * (moved_x / spread_x + moved_y / spread_y)
    return np.asarray(figure + change)


class _Ranks:
    """The ranks of a column, as shares of the samples: those below, and half of those equal."""

    def __init__(self, column: Array):
        values, self._place, counts = np.unique(column, return_inverse=True, return_counts=True)
        below = np.cumsum(counts) - counts
        self._samples = len(column)
        self._values = len(values)
        self.ranks = ((below + counts / 2) / self._samples)[self._place]

    def above(self, weights: Array) -> Array:
        """Return for each sample the mean over all of the weights of those above it.

        Those equal to it count half.
        """
        sums = np.bincount(self._place, weights, self._values)
        above = sums[::-1].cumsum()[::-1] - sums / 2
        return np.asarray(above[self._place] / self._samples)


def edit_distance(first: Array, second: Array) -> int:
    """Return how many entries to insert, remove or replace make one sequence of another.

    Levenshtein 1966, by rows of the table of Wagner and Fischer 1974.
    """
    places = np.arange(len(second) + 1)
    row = places
    for number, entry in enumerate(first, 1):
        best = np.empty_like(row)
        best[0] = number
        best[1:] = np.minimum(row[1:] + 1, row[:-1] + (second != entry))
        row = np.minimum.accumulate(best - places) + places  # insertions
    return int(row[-1])
