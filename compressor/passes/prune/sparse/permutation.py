"""An order of channels in which N of M keeps more.

Any order of a layer's input channels computes the same function if what writes them has the same
order. J. Pool and C. Yu, Channel Permutations for N:M Sparsity, 2021 (NeurIPS), search for one by
exchanging two channels at a time, the pair that gains most first; here many pairs are exchanged in
a round, each from groups that no other touches, so that their gains add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.passes.prune.sparse.patterns import group_mask

_ROUNDS = 100
_CHANNELS = 2048  # that are searched together; memory grows with the square
_WORK = 2e9  # differences of two weights that are looked at, all rounds together
_LEAST_ROWS = 64  # weights of a channel that are looked at whatever that costs
_LEAST_GAIN = 1e-5  # of what a group keeps on average; less may be an error of rounding


def kept_share(scores: Tensor, n: int, m: int) -> float:
    """Return the share of the sum of all magnitudes ``[rows, columns]`` that N of M keeps.

    >>> kept_share(torch.tensor([[1.0, 3.0, 4.0, 2.0]]), n=2, m=4)
    0.7
    """
    total = float(scores.sum(dtype=torch.float64))
    kept = scores.where(group_mask(scores, n, m), 0.0)
    return float(kept.sum(dtype=torch.float64)) / total if total else 1.0


def search_order(scores: Tensor, n: int, m: int) -> Tensor:
    """Find an order of channels in which N of M keeps more of the scores.

    Deterministic, and bounded in work: where there are many channels, only those within 2048 of
    each other are exchanged, and an even sample of the rows is looked at.

    Args:
        scores: magnitudes, ``[rows, channels]``; each row is a place where one weight of each
            channel is compared with the others.
        n: how many stay.
        m: channels in a group.

    Returns:
        The channel at each position, int64 ``[channels]``; the order as it was, if none is found
        that keeps more.

    Raises:
        ValueError: the channels do not divide into groups.
    """
    channels = scores.shape[1]
    if channels % m:
        raise ValueError(f"{channels} channels do not divide into groups of {m}")
    same = torch.arange(channels)
    if not 0 < n < m or channels == m:
        return same
    width = max(_CHANNELS // m, 2) * m
    spans = [slice(s, min(s + width, channels)) for s in range(0, channels, width)]
    order = torch.cat([_searched(scores[:, span], n, m) + span.start for span in spans])
    gained = kept_share(scores[:, order], n, m) > kept_share(scores, n, m)
    return order if gained else same


def _searched(scores: Tensor, n: int, m: int) -> Tensor:
    """Exchange channels until nothing is gained, or enough work is done."""
    sampled = _sampled(scores).to(torch.float32).T.contiguous()  # a channel is a row
    channels, rows = sampled.shape
    groups = torch.arange(channels).reshape(-1, m)  # the channels in each group
    sums = sampled.sum(1, dtype=torch.float64)
    rest = torch.empty(channels, dtype=torch.float64)  # what its group keeps without a channel
    least = torch.empty_like(sampled)  # the least score that is kept then
    above = torch.empty(channels, channels, dtype=torch.float64)
    kept = torch.empty(len(groups), dtype=torch.float64)
    changed = torch.arange(len(groups))
    work = 0.0
    for _ in range(_ROUNDS):
        _look_at(sampled, groups, changed, n, (rest, least, kept))
        columns = groups[changed].reshape(-1)
        # The sum of max(b - a, 0) is half that of |b - a| + b - a.
        distance = torch.cdist(least[columns], sampled, p=1)
        above[columns] = (distance + sums - least[columns].sum(1, dtype=torch.float64)[:, None]) / 2
        work += len(columns) * channels * rows
        changed = _exchange(groups, rest, above, kept)
        if not len(changed) or work > _WORK:
            break
    return groups.reshape(-1)


def _sampled(scores: Tensor) -> Tensor:
    """Return as many rows as can be looked at ten times, evenly spread."""
    rows, channels = scores.shape
    count = max(int(_WORK / 10 / channels**2), _LEAST_ROWS)
    if rows <= count:
        return scores
    return scores[torch.linspace(0, rows - 1, count).round().to(torch.int64)]


def _look_at(
    scores: Tensor, groups: Tensor, changed: Tensor, n: int, best: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Find again what some groups keep: as they are, and without each of their channels."""
    rest, least, kept = best
    members = groups[changed]
    kept[changed] = scores[members].topk(n, dim=1).values.sum((1, 2), dtype=torch.float64)
    for place in range(members.shape[1]):
        others = torch.cat([members[:, :place], members[:, place + 1 :]], dim=1)
        highest = scores[others].topk(n, dim=1).values
        rest[members[:, place]] = highest.sum((1, 2), dtype=torch.float64)
        least[members[:, place]] = highest[:, -1]


def _exchange(groups: Tensor, rest: Tensor, above: Tensor, kept: Tensor) -> Tensor:
    """Exchange the pairs of channels that gain most; returns the groups that have changed."""
    count, m = groups.shape
    order = groups.reshape(-1)
    # A group that loses channel a and gets b keeps rest[a] + above[a, b].
    gets = (rest[:, None] + above)[order][:, order]
    gain = (gets + gets.T).reshape(count, m, count, m)
    gain = gain - (kept[:, None] + kept)[:, None, :, None]
    best, places = gain.permute(0, 2, 1, 3).reshape(count, count, m * m).max(2)
    threshold = _LEAST_GAIN * float(kept.mean())
    first, second = torch.triu_indices(count, count, 1)
    gains = best[first, second]
    candidates = torch.nonzero(gains > threshold)[:, 0]
    ranked = candidates[torch.argsort(gains[candidates], descending=True, stable=True)]
    busy: set[int] = set()
    for a, b in zip(first[ranked].tolist(), second[ranked].tolist(), strict=True):
        if a in busy or b in busy:
            continue
        busy |= {a, b}
        i, j = divmod(int(places[a, b]), m)
        groups[a, i], groups[b, j] = groups[b, j].clone(), groups[a, i].clone()
    return torch.tensor(sorted(busy), dtype=torch.int64)
