"""The weights that stay where others are zero, solved so that a layer's output changes least.

Each row keeps other weights, and so is a least-squares problem of its own. All rows are solved at
once by conjugate gradients that are projected on what stays, with the diagonal as preconditioner:
X. Meng et al., ALPS, 2024 (arXiv:2406.07831), section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = 1024  # columns up to which it is done in float64
_STEPS = 50
_CLOSE = 1e-10  # of the first residual, squared: where a row is solved


def solve_kept(weight: Tensor, start: Tensor, moment: Tensor, damping: float = 0.01) -> Tensor:
    """Solve the weights that are not zero; a row for which that gains nothing stays as it starts.

    >>> moment = torch.tensor([[2.0, 1.0], [1.0, 2.0]])  # of inputs that are alike
    >>> solve_kept(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 3.0]]), moment)
    tensor([[0.0000, 3.4975]])

    It minimizes ``tr((X - W) (M + d I) (X - W)ᵀ)`` for the weight ``W`` as it was.

    Args:
        weight: the weight before pruning, ``[rows, columns]``.
        start: the pruned weight; where it is zero, it stays zero.
        moment: ``M = Σ x xᵀ`` of the layer's inputs, ``[columns, columns]``.
        damping: ``d`` as a share of the mean power of inputs that are not always zero.

    Returns:
        The weights in float32, as others stay.
    """
    dtype = torch.float64 if weight.shape[1] <= _WIDE else torch.float32
    wide, first, moment = weight.to(dtype), start.to(dtype), moment.to(dtype)
    power = moment.diagonal()
    alive = power > 0
    if not bool(alive.any()):
        return start.to(torch.float32)
    damped = moment.clone()
    damped.diagonal().add_(damping * power[alive].mean())
    solved = _descended(wide, first, damped)
    better = _errors(solved - wide, moment) < _errors(first - wide, moment)
    return torch.where(better[:, None], solved, first).to(torch.float32)


def _descended(weight: Tensor, start: Tensor, damped: Tensor) -> Tensor:
    keep, scale = start != 0, damped.diagonal()
    solved = start.clone()
    left = ((weight - solved) @ damped) * keep
    direction = left / scale
    size = first = (left * direction).sum(1)
    for _ in range(_STEPS):
        curved = (direction @ damped) * keep
        step = _share(size, (direction * curved).sum(1))
        solved += step[:, None] * direction
        left -= step[:, None] * curved
        scaled = left / scale
        before, size = size, (left * scaled).sum(1)
        if bool((size <= _CLOSE * first).all()):
            break
        direction = scaled + _share(size, before)[:, None] * direction
    return solved


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Divide; 0 where there is nothing to divide by."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0)


def _errors(change: Tensor, moment: Tensor) -> Tensor:
    """Return each row's squared error of the output, ``[rows]``."""
    return ((change @ moment) * change).sum(1)
