"""Descent over orthogonal matrices, for what rounding costs behind them.

The Cayley transform ``(I + S / 2)^-1 (I - S / 2)`` of a skew-symmetric matrix ``S`` is orthogonal,
so that steps along it need no projection (Li et al. 2020, arXiv:2002.01113; SpinQuant, Liu et al.
2024, arXiv:2405.16406, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MOMENTUM = 0.9
_LEAST = 1e-30  # in place of a range of 0, whose error is 0


@dataclass(frozen=True)
class Rounding:
    """How values are rounded, along their last axis.

    Attributes:
        nearest: returns what values ``[..., n]`` become.
        group: how many neighbours share a scale; ``None`` where all of a row do.
        symmetric: there is no zero point.
    """

    nearest: Callable[[Tensor], Tensor]
    group: int | None = None
    symmetric: bool = True

    def __call__(self, values: Tensor) -> Tensor:
        """Round values so that a gradient says what their error will be elsewhere.

        The error of rounding has no useful gradient of its own. It is taken to stay as it is for
        what comes later (the straight-through estimator; Bengio et al. 2013, arXiv:1308.3432), and
        to grow with the range of its group, since a step is a share of that.
        """
        fixed = values.detach()
        error = self._grouped(self.nearest(fixed) - fixed)
        span = self._span(values)
        growth = span / span.detach().clamp(min=_LEAST)
        return values + (error * growth).reshape(values.shape)

    def _grouped(self, values: Tensor) -> Tensor:
        return torch.unflatten(values, -1, (-1, self.group or values.shape[-1]))

    def _span(self, values: Tensor) -> Tensor:
        groups = self._grouped(values)
        if self.symmetric:
            return groups.abs().amax(-1, keepdim=True)
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        return high.clamp(min=0) - low.clamp(max=0)


class OrthogonalDescent:
    """Steepest descent with momentum from one orthogonal matrix to the next.

    Attributes:
        matrix: orthogonal, float64 ``[n, n]``.
        momentum: skew-symmetric, float64 ``[n, n]``: the mean of past gradients, later ones first.
    """

    def __init__(self, matrix: Tensor, momentum: Tensor | None = None):
        self.matrix = matrix
        self.momentum = torch.zeros_like(matrix) if momentum is None else momentum

    def step(self, gradient: Tensor, angle: float) -> None:
        """Turn the matrix against a gradient.

        Args:
            gradient: of what is to become less, by each entry of the matrix, ``[n, n]``.
            angle: how far an axis is turned, in radians, as the root of the mean square of all.
        """
        product = gradient.to(torch.float64) @ self.matrix.T
        self.momentum = _MOMENTUM * self.momentum + (1 - _MOMENTUM) * (product - product.T)
        size = float(self.momentum.square().sum(1).mean().sqrt())
        if size == 0.0:
            return
        half = self.momentum * (angle / size / 2)
        identity = torch.eye(len(half), dtype=torch.float64)
        moved = torch.linalg.solve(identity + half, (identity - half) @ self.matrix)
        self.matrix = moved.contiguous()  # the same layout as after it was kept in a file
