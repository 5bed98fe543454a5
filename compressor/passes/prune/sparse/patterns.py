"""Which weights of a row stay: so many of all, or at most N of M that follow each other.

Masks are found from scores alone, whatever those measure. N of M: A. Mishra et al., Accelerating
Sparse Deep Neural Networks, 2021 (arXiv:2104.08378), section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SORTED = 16  # columns of a group from which on sorting is faster than comparing all pairs
_CHUNK = 1 << 16  # groups that are compared at once, so that they stay in the cache


@dataclass(frozen=True)
class Pattern:
    """How many weights stay."""

    # share of the weights that become zero; what `n` and `m` say, if they are given
    sparsity: float
    n: int = 0  # in each group of `m` weights, so many stay; 0 for no groups
    m: int = 0  # weights in a group; 0 for no groups

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.m else f"{100 * self.sparsity:g} % sparse"


def n_of_m(n: int, m: int) -> Pattern:
    """Return the pattern in which ``n`` of ``m`` weights stay."""
    return Pattern(1 - n / m, n, m)


def group_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """Keep the ``n`` highest scores of every ``m`` in a row that follow each other.

    Of equal scores the one further left stays.

    >>> group_mask(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), n=2, m=4).tolist()
    [[False, True, True, False]]

    Scores, and the mask that is true where a weight stays, are ``[rows, columns]``.

    Raises:
        ValueError: the columns do not divide into groups.
    """
    rows, columns = scores.shape
    if columns % m:
        raise ValueError(f"{columns} columns do not divide into groups of {m}")
    groups = scores.reshape(-1, m)
    if m > _SORTED:
        return _highest(groups, n).reshape(rows, columns)
    masks = [_first_ranks(part, n) for part in torch.split(groups, _CHUNK)]
    return torch.cat(masks).reshape(rows, columns)


def row_mask(scores: Tensor, sparsity: float) -> Tensor:
    """Keep each row's highest scores but a share ``sparsity``; of equal ones those further left."""
    return _highest(scores, scores.shape[1] - round(scores.shape[1] * sparsity))


def whole_mask(scores: Tensor, sparsity: float) -> Tensor:
    """Keep the highest scores of a matrix but a share ``sparsity``; of equal ones the first."""
    return row_mask(scores.reshape(1, -1), sparsity).reshape(scores.shape)


def pattern_mask(scores: Tensor, pattern: Pattern) -> Tensor:
    """Keep the highest scores of each group, or of each row if there are no groups.

    Scores are ``[rows, columns]``, the columns of a group side by side.
    """
    if pattern.m:
        return group_mask(scores, pattern.n, pattern.m)
    return row_mask(scores, pattern.sparsity)


def column_order(channels: Tensor, positions: int) -> Tensor:
    """Return the columns of a weight in the order in which groups are counted: channels innermost.

    A row of a convolution's weight holds channel by channel, and in each the kernel's positions.
    TensorRT's sparse kernels want at most two of four *input channels* that follow each other, at
    one output channel and one position (TensorRT Developer Guide, section Structured Sparsity).

    Args:
        channels: the input channels in the order in which groups are counted; of a convolution
            with groups, those of one of its groups.
        positions: elements of the kernel; 1 for a linear layer.
    """
    return (torch.arange(positions)[:, None] + channels * positions).reshape(-1)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` highest of each row; of equal ones those further left."""
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    mask.scatter_(1, order[:, :count], True)
    return mask


def _first_ranks(scores: Tensor, count: int) -> Tensor:
    """Do the same as :func:`_highest`, by comparing every column with every other."""
    columns = scores.T.contiguous().unbind()
    ranks = torch.zeros(len(columns), len(scores), dtype=torch.uint8)
    for right, score in enumerate(columns):
        for left in range(right):
            wins = columns[left] < score
            ranks[left] += wins
            ranks[right] += ~wins
    return (ranks < count).T


_DEAD = 1e-6  # of the mean norm: what a column without input counts, so that sizes still rank


def wanda_scores(matrix: Tensor, norms: Tensor) -> Tensor:
    """Return ``|W|`` times the norm of each column's input.

    >>> wanda_scores(torch.tensor([[1.0, -2.0]]), norms=torch.tensor([3.0, 1.0])).tolist()
    [[3.0, 2.0]]

    A column whose input was always zero comes after all others; within such columns the weights'
    sizes decide.

    Args:
        matrix: the weight, ``[rows, columns]``.
        norms: l2 norm of each column's input over the calibration data, ``[columns]``.

    Returns:
        Scores, float32 ``[rows, columns]``. They are to be compared within a row.
    """
    floor = _DEAD * float(norms.mean()) or 1.0
    return matrix.to(torch.float32).abs() * norms.to(torch.float32).clamp(min=floor)
