"""How much of each channel integers of few bits should represent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.observers.channels import Sum, observed

_SHIFT = 19  # bits of a float32 that are left out: of its mantissa, four stay
_LEAST, _GREATEST = 2.0**-24, 2.0**24  # magnitudes that have bins of their own
_POINTS = 4  # a bin's errors are looked at in so many places
_TRIED = 48  # thresholds, from the greatest magnitude on downwards
_STEP = 2 ** (1 / 16)  # between two of them


def _place(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the bin of each magnitude; four bits of the mantissa make 16 of an octave."""
    inside = magnitudes.to(torch.float32).clamp(_LEAST, _GREATEST)
    return inside.view(torch.int32) >> _SHIFT


_FIRST = int(_place(torch.tensor([_LEAST])))
_BINS = int(_place(torch.tensor([_GREATEST]))) - _FIRST + 1


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """How often channels had which magnitudes."""

    counts: torch.Tensor  # int64 `[channels, bins]`; zeros are not counted
    highest: torch.Tensor  # the greatest magnitude, float32 `[channels]`


class ChannelClip(Sum[Magnitudes, torch.Tensor]):
    """The greatest magnitude that integers of few bits should represent, along an axis.

    It pays to clip what is rare: all other values then have finer steps. Of thresholds from the
    greatest magnitude down to an eighth of it, the result is that of least squared error of values
    that are rounded to the nearest of ``2 ** bits - 1`` symmetric steps. Banner et al. 2019
    (arXiv:1810.05723, section 3) compute it for a distribution; here magnitudes are counted in 16
    bins an octave. The result is float32 ``[channels]``; planning gets ``None``.
    """

    name: ClassVar[str] = "channel-clip"

    axis: int = Field(default=1, ge=0, description="the axis that runs over channels")
    bits: int = Field(default=4, ge=2, le=8, description="width of an integer")

    def update(self, state: Magnitudes | None, values: torch.Tensor) -> Magnitudes | None:
        """Return the counts with ``values`` added, whose axis is as long as before.

        Raises:
            ValueError: a value is not finite, or the axis is missing or of another length.
        """
        if self.axis >= values.ndim:
            raise ValueError(f"axis {self.axis} of values of rank {values.ndim}")
        if not values.numel():
            return state
        size = values.movedim(self.axis, 0).reshape(values.shape[self.axis], -1)
        size = size.to(torch.float32).abs()
        highest = size.amax(1)
        if not bool(torch.isfinite(highest).all()):
            raise ValueError("some of the values are not finite")
        places = _place(size).to(torch.int64) - _FIRST
        places += torch.arange(len(size))[:, None] * _BINS
        counts = torch.bincount(places[size > 0], minlength=len(size) * _BINS)
        return self.merge(state, Magnitudes(counts.view(len(size), _BINS), highest))

    def added(self, first: Magnitudes, second: Magnitudes) -> Magnitudes:
        """Return the counts of both streams; raises ``ValueError`` where their channels differ."""
        if first.highest.shape != second.highest.shape:
            lengths = f"{first.highest.numel()} and {second.highest.numel()}"
            raise ValueError(f"the axis of channels is {lengths} long")
        highest = torch.maximum(first.highest, second.highest)
        return Magnitudes(first.counts + second.counts, highest)

    def result(self, state: Magnitudes | None) -> torch.Tensor | None:
        """Return the thresholds; raises ``ValueError`` if nothing was observed."""
        seen = observed(state)
        used = seen.counts.sum(0).nonzero().flatten()
        if not len(used):
            return seen.highest
        counts = seen.counts[:, used].to(torch.float64)
        edges = ((torch.stack((used, used + 1)) + _FIRST) << _SHIFT).to(torch.int32)
        low, high = edges.view(torch.float32).to(torch.float64)
        shares = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
        points = low[:, None] + (high - low)[:, None] * shares
        last = (1 << (self.bits - 1)) - 1
        least = torch.full((len(counts),), torch.inf, dtype=torch.float64)
        best = seen.highest.to(torch.float64)
        threshold = best.clone()
        for _ in range(_TRIED + 1):
            steps = (threshold / last).clamp(min=torch.finfo(torch.float64).tiny)
            error = torch.zeros_like(least)
            for point in points.T:
                codes = (point / steps[:, None]).round().clamp(max=last)
                error += ((codes * steps[:, None] - point).square() * counts).sum(1)
            better = error < least
            least = torch.where(better, error, least)
            best = torch.where(better, threshold, best)
            threshold = threshold / _STEP
        return best.to(torch.float32)
