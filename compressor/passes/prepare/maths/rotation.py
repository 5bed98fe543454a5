"""Orthogonal matrices that spread a vector over all of its channels, or sort them by their power.

A randomized Hadamard matrix is ``diag(signs) @ H / sqrt(n)``; QuIP# (Tseng et al. 2024,
arXiv:2402.04396) and QuaRot (Ashkboos et al. 2024, arXiv:2404.00456) rotate weights and activations
by it. Where no matrix of Sylvester and Paley has a size, an odd factor of it is turned by a random
orthogonal matrix instead, and the power of two by Hadamard's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

_LARGEST_PALEY = 256


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix ``diag(signs) @ (H kron small)``, never stored as a whole.

    Attributes:
        signs: float64 ``[n]``, each 1 or -1.
        small: orthogonal, float64 ``[m, m]``; ``n / m`` is a power of two, and ``H`` the orthogonal
            matrix of Sylvester of that size.
    """

    signs: Tensor
    small: Tensor

    def __len__(self) -> int:
        """Return ``n``."""
        return len(self.signs)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return torch.float64

    def times(self, rows: Tensor) -> Tensor:
        """Return ``rows @ R``, float64 ``[..., n]``; takes ``n log n`` additions a row."""
        size, width = len(self.signs), len(self.small)
        turned = (rows.to(torch.float64) * self.signs).reshape(-1, size // width, width)
        return sylvester(turned @ self.small).reshape(rows.shape)

    def back(self, rows: Tensor) -> Tensor:
        """Return ``rows @ R.T``, float64 ``[..., n]``."""
        size, width = len(self.signs), len(self.small)
        turned = rows.to(torch.float64).reshape(-1, size // width, width) @ self.small.T
        return sylvester(turned).reshape(rows.shape) * self.signs

    def rotated_rows(self, matrix: Tensor) -> Tensor:
        """Return ``R.T @ matrix``, float64, for a matrix ``[n, columns]``."""
        return self.times(matrix.T).T


@dataclass(frozen=True, eq=False)
class DenseRotation:
    """An orthogonal matrix, all of it.

    Attributes:
        matrix: ``[n, n]``; what is multiplied with it becomes of its dtype.
    """

    matrix: Tensor

    def __len__(self) -> int:
        """Return ``n``."""
        return len(self.matrix)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.matrix.dtype

    def times(self, rows: Tensor) -> Tensor:
        """Return ``rows @ R``, ``[..., n]``."""
        return rows.to(self.dtype) @ self.matrix

    def rotated_rows(self, matrix: Tensor) -> Tensor:
        """Return ``R.T @ matrix``, for a matrix ``[n, columns]``."""
        return self.matrix.T @ matrix.to(self.dtype)


def principal_components(moment: Tensor) -> tuple[DenseRotation, Tensor]:
    """Return the basis in which channels are uncorrelated, and what each then has of the power.

    Of all bases, the first ``k`` channels of this one have the most power together, for each ``k``
    (Hotelling 1933). Signs are such that the largest entry of each component is positive.

    >>> turn, powers = principal_components(torch.tensor([[1.0, 0.0], [0.0, 4.0]]))
    >>> turn.times(torch.tensor([0.0, 2.0])).tolist(), powers.tolist()
    ([2.0, 0.0], [4.0, 1.0])

    Args:
        moment: the second moment ``Σ x xᵀ`` of what flows, ``[n, n]``.

    Returns:
        The matrix, float64, with components as columns, and their powers, float64 ``[n]``, falling.
    """
    powers, components = torch.linalg.eigh(moment.to(torch.float64))
    powers, components = powers.flip(0).clamp(min=0), components.flip(1)
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return DenseRotation(components * largest.sign()), powers


def components_beside_mean(moment: Tensor) -> tuple[DenseRotation, Tensor]:
    """Return a basis that a layer norm does not see, whose first channels hold most of the power.

    A layer norm commutes with an orthogonal matrix that leaves the mean over channels alone. Beside
    the mean there are ``n - 1`` principal components, and channels to write them in. The ``j``-th
    is written with the ``j``-th row of Helmert's matrix (1876), ``(1, ..., 1, -j, 0, ..., 0)``: of
    the first ``k`` channels alone, the first ``k - 1`` components are all there, and of every
    other one there is but a mean, which a layer norm of ``k`` channels takes off. So for each ``k``
    the first channels are those that hold most.

    >>> turn, powers = components_beside_mean(torch.diag(torch.tensor([4.0, 4.0, 0.0])))
    >>> bool((turn.times(torch.ones(3)) - 1).abs().max() < 1e-12), powers[2].item() < powers[0]
    (True, True)

    Args:
        moment: the second moment ``Σ x xᵀ`` of what flows, ``[n, n]``, ``n`` at least 2.

    Returns:
        The matrix, float64, and for each channel the power of the component that ends there,
        float64 ``[n]``, falling; the first channel has a part of all, and is given that of the
        second, with which the first component begins.
    """
    basis = helmert(len(moment))
    inner, powers = principal_components(basis.T @ moment.to(torch.float64) @ basis)
    mean = torch.full(moment.shape, 1 / len(moment), dtype=torch.float64)
    turn = DenseRotation(basis @ inner.matrix @ basis.T + mean)
    return turn, torch.cat([powers[:1], powers])


def helmert(size: int) -> Tensor:
    """Return Helmert's orthonormal basis of all vectors without a mean, float64 ``[n, n - 1]``."""
    ends = torch.arange(1, size, dtype=torch.float64)
    basis = torch.triu(torch.ones((size, size), dtype=torch.float64))[:, :-1]
    basis = basis - torch.nn.functional.pad(torch.diag(ends), (0, 0, 1, 0))
    return basis / (ends * (ends + 1)).sqrt()


def rotation(size: int, seed: int) -> Rotation:
    """Return a randomized Hadamard matrix, or what comes nearest to one of a size.

    >>> made = rotation(24, seed=0)
    >>> bool(made.times(torch.eye(24)).abs().sub(24**-0.5).abs().max() < 1e-12)
    True
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (size,), generator=generator).to(torch.float64) * 2 - 1
    width = size
    while width % 2 == 0:
        width //= 2
    small = torch.ones((1, 1), dtype=torch.float64)
    if width > 1:
        found = _smallest_paley(size, width)
        if found is None:
            normal = torch.randn((width, width), generator=generator, dtype=torch.float64)
            small = torch.linalg.qr(normal)[0]
        else:
            small = found / len(found) ** 0.5
    return Rotation(signs, small)


def sylvester(values: Tensor) -> Tensor:
    """Multiply the second-last axis, a power of two, with Sylvester's matrix, made orthogonal.

    Args:
        values: ``[..., 2^k, columns]``.
    """
    count, columns = values.shape[-2:]
    flat = values.reshape(-1, count * columns)
    half = 1
    while half < count:
        pairs = flat.reshape(len(flat), -1, 2, half * columns)
        both = (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1])
        flat = torch.stack(both, 2).reshape(len(flat), -1)
        half *= 2
    whole: Tensor = flat.reshape(values.shape) / count**0.5
    return whole


def _smallest_paley(size: int, odd: int) -> Tensor | None:
    """Return the smallest Hadamard matrix of Paley of a size between ``odd`` and ``size``."""
    width = odd
    while width <= min(size, _LARGEST_PALEY):
        if size % width == 0 and (found := paley(width)) is not None:
            return found
        width *= 2
    return None


def paley(size: int) -> Tensor | None:
    """Return a matrix of 1 and -1 with orthogonal rows, float64, by squares modulo a prime.

    Paley 1933: sizes ``q + 1`` for primes ``q`` of the form ``4 k + 3``, and ``2 (q + 1)`` for
    those of the form ``4 k + 1``. ``None`` for others.
    """
    prime = size - 1
    if _is_prime(prime) and prime % 4 == 3:
        bordered = _bordered(prime)
        bordered[1:, 0] = -1
        return torch.eye(size) + bordered
    prime = size // 2 - 1
    if size % 4 == 0 and _is_prime(prime) and prime % 4 == 1:
        symmetric, one = _bordered(prime), torch.eye(prime + 1)
        first = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        second = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(symmetric, first) + torch.kron(one, second)
    return None


def _bordered(prime: int) -> Tensor:
    """Return Jacobsthal's matrix with a border of ones, ``[prime + 1, prime + 1]``."""
    numbers = torch.arange(prime)
    character = torch.full((prime,), -1.0)
    character[numbers * numbers % prime] = 1.0
    character[0] = 0.0
    matrix = torch.zeros((prime + 1, prime + 1), dtype=torch.float64)
    matrix[0, 1:] = matrix[1:, 0] = 1.0
    matrix[1:, 1:] = character[(numbers[:, None] - numbers) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % other for other in range(2, isqrt(number) + 1))
