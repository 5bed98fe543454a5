"""Affine maps of channels, such as batch normalization in evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Affine:
    """The map ``y = scale * x + shift`` of every channel."""

    scale: torch.Tensor  # `[channels]` or `[1]`, float64
    shift: torch.Tensor  # `[channels]` or `[1]`, float64

    def weight(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the weight ``[rows, columns]`` of the layer followed by this map."""
        return matrix * self.scale[:, None]

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return the bias ``[rows]`` of the layer followed by this map."""
        return bias * self.scale + self.shift


def identity() -> Affine:
    """Return the map that changes nothing."""
    return Affine(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def batch_norm(
    gamma: torch.Tensor,
    beta: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
) -> Affine:
    """Return batch normalization in evaluation mode as an affine map.

    ``y = gamma * (x - mean) / sqrt(variance + epsilon) + beta``, all ``[channels]``, float64
    (S. Ioffe, C. Szegedy, Batch Normalization, 2015, algorithm 2).

    Raises:
        ValueError: ``variance + epsilon`` of a channel is not positive.
    """
    spread = variance + epsilon
    bad = torch.nonzero(~(spread > 0)).flatten()
    if len(bad):
        channel = int(bad[0])
        raise ValueError(f"variance + epsilon is {float(spread[channel]):g} in channel {channel}")
    scale = gamma / torch.sqrt(spread)
    return Affine(scale, beta - mean * scale)
