"""Two matrices whose product is close to a given one, in all ranks at once.

The best approximation of rank ``r`` in the Frobenius norm keeps the ``r`` largest singular values
(Eckart & Young 1936). What counts is not the weight ``W`` but what the layer computes from its
inputs ``x``: with their second moment ``M = S Sᵀ``, the mean of ``‖(W - W') x‖²`` is
``‖(W - W') S‖²``. So ``W S`` is truncated and ``S`` undone (X. Wang et al., SVD-LLM, 2024,
arXiv:2403.07378, section 3). Where there are no more rows than columns, that is the projection of
``W`` on the main directions of the layer's output (X. Zhang et al., 2015, arXiv:1505.06798,
section 3.1), for which nothing has to be undone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 1e-12  # of the energy: anything less is rounding error


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A matrix as a sum of products of a column and a row, the most important first."""

    # what each product contributes to the sum of squares, `[min(rows, columns)]`, float64,
    # descending
    energies: Tensor
    up: Tensor  # the first columns, `[rows, most]`
    # the rows that belong to them, `[most, columns]`; the two of each pair have the same norm
    down: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``up`` and ``down`` of a rank; their product is the approximation.

        Raises:
            ValueError: there are not that many products.
        """
        if not 1 <= rank <= self.up.shape[1]:
            raise ValueError(f"rank {rank} is not from 1 to {self.up.shape[1]}")
        return self.up[:, :rank], self.down[:rank]

    def kept(self, rank: int) -> float:
        """Return the share of the energy that a rank keeps, from 0 to 1."""
        return float(shares(self.energies)[rank - 1])


def shares(energies: Tensor) -> Tensor:
    """Return the share of the energy that each rank from 1 keeps; 1 where there is none."""
    sums = energies.cumsum(0)
    return sums / sums[-1] if float(sums[-1]) > 0 else torch.ones_like(sums)


def rank_for(energies: Tensor, share: float) -> int:
    """Return the least rank that keeps a share, 0 to 1, of descending energies.

    >>> rank_for(torch.tensor([8.0, 1.0, 1.0]), share=0.85)
    2
    """
    enough = shares(energies) >= share - _ROUNDING
    return int(enough.to(torch.int8).argmax()) + 1


def decompose(
    matrix: Tensor, most: int, moment: Tensor | None = None, damping: float = 0.01
) -> Decomposition:
    """Decompose a weight, by its own singular values or by what it does to its inputs.

    >>> up, down = decompose(torch.ones(3, 4), most=1).factors(1)
    >>> up.shape, down.shape
    (torch.Size([3, 1]), torch.Size([1, 4]))

    Args:
        matrix: the weight, ``[rows, columns]``, finite.
        most: the highest rank that is needed.
        moment: ``Σ x xᵀ`` over the layer's inputs, ``[columns, columns]``; any positive multiple
            gives the same. ``None``, or zeros, stands for inputs of the same power throughout.
        damping: share of the mean input power that is added to every diagonal element, so that
            inputs that calibration did not see also count.

    Raises:
        ValueError: the moment has another shape or is not finite.
    """
    wide = matrix.to(torch.float64).contiguous()
    rows, columns = wide.shape
    inputs = None if moment is None else _damped(moment, columns, damping)
    if rows <= columns:
        response = wide if inputs is None else wide @ inputs
        energies, basis = _main_directions(response @ wide.T, most)
        up, down = basis, basis.T @ wide
    elif inputs is None:
        energies, basis = _main_directions(wide.T @ wide, most)
        up, down = wide @ basis, basis.T
    else:
        powers, axes = torch.linalg.eigh(inputs)
        roots = powers.clamp(min=float(powers[-1]) * _ROUNDING).sqrt()
        white = wide @ (axes * roots)
        energies, basis = _main_directions(white.T @ white, most)
        up, down = white @ basis, basis.T @ (axes / roots).T
    up, down = _balanced(up, down)
    return Decomposition(energies, up.to(matrix.dtype), down.to(matrix.dtype))


def _damped(moment: Tensor, columns: int, damping: float) -> Tensor | None:
    if moment.shape != (columns, columns):
        raise ValueError(f"moment {list(moment.shape)} does not fit {columns} columns")
    if not bool(torch.isfinite(moment).all()):
        raise ValueError("the moment holds values that are not finite")
    result = moment.to(torch.float64)
    power = float(result.diagonal().mean())
    if power <= 0:
        return None
    result = (result + result.T) / 2
    result.diagonal().add_(damping * power)
    return result


def _main_directions(gram: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return all eigenvalues of ``A Aᵀ``, descending, and the first eigenvectors as columns."""
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return values.flip(0).clamp(min=0), vectors.flip(1)[:, :most]


def _balanced(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Give both parts of each pair the same norm, and the first one a positive largest value.

    Gradients and ranges of the two are then alike, and the sign that the eigenvector routine
    happens to choose does not matter.
    """
    left, right = up.norm(dim=0), down.norm(dim=1)
    nonzero = (left > 0) & (right > 0)
    scale = torch.where(nonzero, (right / left.where(nonzero, 1.0)).sqrt(), 1.0)
    largest = up.gather(0, up.abs().argmax(0, keepdim=True))[0]
    scale = torch.where(largest < 0, -scale, scale)
    return up * scale, down / scale[:, None]
