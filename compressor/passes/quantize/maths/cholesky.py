"""Factors of a damped second moment, and their inverses, in little more memory than one of them.

The moment ``M`` of a layer with thousands of inputs takes hundreds of megabytes. So there is one
matrix of its size beside it here: what is computed takes the place of what it is computed from,
some columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_AT_ONCE = 512  # columns of an inverse
_TURNED = 64  # rows that change places at once
_RETRIES = (1.0, 10.0, 100.0)  # factors on the damping


def check_finite(moment: Tensor) -> None:
    """Check that a moment is finite; raises ``ValueError``."""
    if not _is_finite(moment):
        raise ValueError("the moment holds values that are not finite")


def upper_factor(moment: Tensor, damping: float, order: Tensor | None = None) -> Tensor | None:
    """Upper triangular ``F`` with ``F Fᵀ = M + d I``, or ``None`` where there is none.

    ``d`` is ``damping`` times the mean input power, and more if the sum is not positive definite.
    With the order of rows and columns reversed, ``F`` is Cholesky's factor ``L``. ``order`` is that
    of the columns; ``None`` is the one they have.
    """
    order = torch.arange(len(moment)) if order is None else order
    return _factored(moment, order, damping, lambda factor: factor)


def inverse_factor(moment: Tensor, damping: float) -> Tensor | None:
    """Upper triangular ``U`` with ``Uᵀ U = (M + d I)⁻¹``, the inverse of :func:`upper_factor`.

    That takes one factorization in place of two and an inverse.
    """
    return _factored(moment, torch.arange(len(moment)), damping, _inverted)


def costs_of_columns(factor: Tensor) -> Tensor:
    """What a squared error in each column costs after compensation, ``1 / (M⁻¹)ⱼⱼ``.

    Section 3.2 of E. Frantar and D. Alistarh, Optimal Brain Compression, 2022 (arXiv:2208.11580).

    Args:
        factor: that of :func:`upper_factor`, ``[columns, columns]``.
    """
    costs = torch.empty(len(factor))
    for start, columns in _inverse_columns(factor):
        costs[start : start + columns.shape[1]] = 1 / columns.square().sum(0)
    return costs


def _factored(
    moment: Tensor, order: Tensor, damping: float, made: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Apply ``made`` to ``F`` with its columns in this order; ``None`` if there is no factor."""
    power = moment.diagonal()[order]
    alive = power > 0
    if not bool(alive.any()):
        return None
    mean = power[alive].mean()
    # A dead column has no input: any positive power serves, for nothing is passed on from it.
    extra = torch.where(alive, 0.0, mean).flip(0)
    turned = order.flip(0)
    for retry in _RETRIES:
        for dtype in (torch.float32, torch.float64):
            damped = _in_order(moment, turned).to(dtype)
            damped.diagonal().add_(extra + retry * damping * mean)
            lower = damped.mT  # the same numbers, in the order that is factorized in place
            failed = torch.empty((), dtype=torch.int32)
            torch.linalg.cholesky_ex(lower, out=(lower, failed))
            if int(failed):
                continue
            factor = made(_turned(lower))
            del damped, lower
            factor = factor.to(torch.float32)
            if _is_finite(factor):
                return factor
    return None


def _in_order(moment: Tensor, order: Tensor) -> Tensor:
    """Return a moment with its rows and columns in an order.

    Some whole rows are taken at a time: pairs of indices take four times as long.
    """
    ordered = torch.empty_like(moment, memory_format=torch.contiguous_format)
    for start in range(0, len(order), _TURNED):
        part = slice(start, start + _TURNED)
        torch.index_select(moment[order[part]], 1, order, out=ordered[part])
    return ordered


def _is_finite(matrix: Tensor) -> bool:
    """Whether all numbers are finite, without a copy of a large matrix."""
    if not matrix.is_contiguous():
        matrix = matrix.mT  # what is reduced has to be contiguous, or it is copied
    return not matrix.numel() or all(bool(end.isfinite()) for end in matrix.aminmax())


def _turned(matrix: Tensor) -> Tensor:
    """Reverse the order of rows and of columns, in place but for some rows."""
    size, rows = len(matrix), matrix if matrix.is_contiguous() else matrix.mT
    for start in range(0, (size + 1) // 2, _TURNED):
        end = min(start + _TURNED, (size + 1) // 2)
        first = rows[start:end].flip(0, 1)
        rows[start:end] = rows[size - end : size - start].flip(0, 1)
        rows[size - end : size - start] = first
    return matrix


def _inverted(upper: Tensor) -> Tensor:
    """Turn an upper triangular matrix into its inverse, in place."""
    for start, columns in _inverse_columns(upper):
        upper[: len(columns), start : start + columns.shape[1]] = columns
    return upper


def _inverse_columns(upper: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield columns of an upper triangular matrix's inverse, the last ones first.

    They are computed without what is zero below them, and from what lies above them and to the
    left: who has them may put them in their place. A solver would copy a part of the matrix, so it
    is given blocks on the diagonal alone.

    Yields:
        The number of the first column, and ``[rows, columns]`` as far down as the diagonal.
    """
    size = len(upper)
    for start in reversed(range(0, size, _AT_ONCE)):
        end = min(start + _AT_ONCE, size)
        columns = torch.zeros(end, end - start, dtype=upper.dtype)
        columns[start:].fill_diagonal_(1.0)
        for first in reversed(range(0, end, _AT_ONCE)):
            last = min(first + _AT_ONCE, end)
            right = columns[first:last]
            if last < end:
                right.addmm_(upper[first:last, last:end], columns[last:], alpha=-1)
            block = upper[first:last, first:last]
            columns[first:last] = torch.linalg.solve_triangular(block, right, upper=True)
        yield start, columns
