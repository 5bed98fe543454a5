"""The density of observed values, as the searches for a clipping range want it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressor.calibration.histogram import SIDE, Histogram


@dataclass(frozen=True, eq=False)
class Density:
    """A piecewise constant density in units of the histogram's bin width.

    Attributes:
        mass: float64 ``[last - first]``, the counts in ``[first, first + 1)`` and so on. A spike
            at zero is left out: zero is represented exactly, so it costs nothing and says
            nothing about where to clip.
        first: the left end, an integer, at most 0.
        last: the right end, an integer, at least 0.
    """

    mass: torch.Tensor
    first: int
    last: int

    @property
    def edges(self) -> torch.Tensor:
        """The ends of the bins, float64 ``[last - first + 1]``."""
        return torch.arange(self.first, self.last + 1, dtype=torch.float64)


def density(histogram: Histogram) -> Density:
    """Return the density of a histogram, without a spike at zero.

    The zero bin holds values near zero, of which there are about as many as in its neighbours,
    and the exact zeros that a ReLU leaves. Of its two halves each keeps at most what the
    neighbour on its side has; the rest is the spike.
    """
    counts = histogram.counts.to(torch.float64)
    mass = torch.empty_like(counts)
    mass[SIDE + 1 :] = counts[SIDE + 1 :]
    mass[: SIDE - 1] = counts[1:SIDE]  # bin -j is (-j - 1, -j]
    halves = torch.stack((counts[SIDE - 1], counts[SIDE + 1]))
    mass[SIDE - 1 : SIDE + 1] = halves * (counts[SIDE] / halves.sum().clamp(min=1)).clamp(max=1)
    occupied = mass.nonzero().flatten()
    if not len(occupied):
        return Density(mass[:0], 0, 0)
    first = min(int(occupied[0]), SIDE)
    last = max(int(occupied[-1]) + 1, SIDE)
    return Density(mass[first:last], first - SIDE, last - SIDE)


def mirror(density: Density) -> Density:
    """Return the density of ``-x``."""
    return Density(density.mass.flip(0), -density.last, -density.first)


def fold(density: Density) -> torch.Tensor:
    """Return the mass of ``|x|`` in the bins ``[0, 1), [1, 2), ...``."""
    zero = -density.first
    right, left = density.mass[zero:], density.mass[:zero].flip(0)
    folded = density.mass.new_zeros(max(len(right), len(left)))
    folded[: len(right)] += right
    folded[: len(left)] += left
    return folded
