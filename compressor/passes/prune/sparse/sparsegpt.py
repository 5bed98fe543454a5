"""SparseGPT: pruning in which the weights further right make up for those that go.

E. Frantar and D. Alistarh, SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot, 2023 (arXiv:2301.00774), section 3 and algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.passes.prune.sparse.patterns import Pattern, group_mask, whole_mask
from compressor.passes.quantize.maths.cholesky import check_finite, inverse_factor

_BLOCK = 128  # columns whose mask is chosen together
_DEAD = 1e-12  # what the score of a weight without input is multiplied with


@dataclass(frozen=True, eq=False)
class Curvature:
    """Curvature of a layer's squared error, which all weights with the same inputs share."""

    factor: Tensor  # upper triangular `U` with `Uᵀ U = (M + d I)⁻¹`, `[columns, columns]`
    alive: Tensor  # columns whose input was not always zero, `[columns]`


def curvature(moment: Tensor, damping: float = 0.01) -> Curvature | None:
    """Return the curvature of the layer's squared output error.

    Args:
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``, in the order in which
            columns are pruned.
        damping: share of the mean input power that is added to every diagonal element.

    Returns:
        ``None`` where all inputs were zero.

    Raises:
        ValueError: the moment is not finite.
    """
    check_finite(moment)
    factor = inverse_factor(moment, damping)
    return None if factor is None else Curvature(factor, moment.diagonal() > 0)


def sparsegpt(matrix: Tensor, curved: Curvature, pattern: Pattern) -> Tensor:
    """Prune a weight, and change what stays so that the layer's output changes least.

    >>> moment = torch.tensor([[2.0, 1.0], [1.0, 2.0]])  # of inputs that are alike
    >>> sparsegpt(torch.tensor([[1.0, 3.0]]), curvature(moment), Pattern(0.5, n=1, m=2))
    tensor([[0.0000, 3.4950]])

    Columns are visited from left to right. A weight costs ``w² / U_jj²``, where ``U_jj²`` is its
    diagonal element in the inverse for the columns from its own on. Without groups the cheapest
    of a block of 128 columns go, whichever rows they are in, so rows may keep different numbers;
    with groups the cheapest of each group, chosen when its first column is reached. A weight that
    goes is exactly zero and passes its error on to all columns further right.

    The weight, and the result in float32, are ``[rows, columns]``, columns of a group side by side.

    Raises:
        ValueError: the columns do not divide into groups.
    """
    columns = matrix.shape[1]
    if pattern.m and columns % pattern.m:
        raise ValueError(f"{columns} columns do not divide into groups of {pattern.m}")
    width = _BLOCK if not pattern.m else max(_BLOCK // pattern.m, 1) * pattern.m
    factor = curved.factor
    # Columns first: one column of all rows is then contiguous.
    left = matrix.T.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    costs = torch.where(curved.alive, 1.0, _DEAD) / factor.diagonal().square()
    for start in range(0, columns, width):
        end = min(start + width, columns)
        part = slice(start, end)
        errors = _pruned_block(left[part], factor[part, part], costs[part], pattern)
        if end < columns:
            left[end:].addmm_(factor[part, end:].T, errors, alpha=-1)
    return left.T.contiguous()


def _pruned_block(block: Tensor, factor: Tensor, costs: Tensor, pattern: Pattern) -> Tensor:
    """Prune some columns in place, ``[columns, rows]``; returns the errors to pass on."""
    errors = torch.zeros_like(block)
    keep = torch.ones_like(block, dtype=torch.bool)
    if not pattern.m:
        keep = whole_mask(_scores(block, costs), pattern.sparsity)
    pivots = factor.diagonal().tolist()
    for column in range(len(block)):
        if pattern.m and column % pattern.m == 0:
            group = slice(column, column + pattern.m)
            scores = _scores(block[group], costs[group])
            keep[group] = group_mask(scores.T.contiguous(), pattern.n, pattern.m).T
        gone = torch.where(keep[column], 0.0, block[column])
        error = gone / pivots[column]
        errors[column] = error
        block[column + 1 :].addcmul_(factor[column, column + 1 :, None], error, value=-1)
        block[column] -= gone
    return errors


def _scores(block: Tensor, costs: Tensor) -> Tensor:
    return block.square() * costs[:, None]
