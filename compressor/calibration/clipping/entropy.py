"""The range that keeps a distribution most like itself: least Kullback-Leibler divergence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressor.calibration.density import Density, fold

# Windows tried in each search along a line; with 256 levels torch starts no threads for them.
_CANDIDATES = 120
_ROUNDS = 2  # how often high and low take turns


def search_symmetric(density: Density, bits: int) -> tuple[int, int]:
    """Return the range ``(-t, t)`` of least divergence; ``2 ** (bits - 1)`` levels hold ``|x|``."""
    levels = 2 ** (bits - 1)
    table = _Table.of(fold(density))
    stops = _spread(min(levels, table.bins), table.bins)
    threshold = int(stops[divergence(table, torch.zeros_like(stops), stops, levels).argmin()])
    return -threshold, threshold


def search_affine(density: Density, bits: int) -> tuple[int, int]:
    """Return the range of least divergence with ``2 ** bits`` levels between its ends.

    High is searched with low where it is, then low with high where it is, twice; where the
    data lie on one side of zero only, zero is the other end. A window has at least one bin for
    each level.
    """
    levels = 2**bits
    table = _Table.of(density.mass)
    zero, least = -density.first, min(levels, table.bins)
    start, stop = 0, table.bins
    for _ in range(_ROUNDS if zero and density.last else 1):
        if density.last:
            stops = _spread(min(max(start + least, zero), table.bins), table.bins)
            starts = torch.full_like(stops, start)
            stop = int(stops[divergence(table, starts, stops, levels).argmin()])
        if zero:
            starts = _spread(0, max(min(stop - least, zero), 0))
            stops = torch.full_like(starts, stop)
            start = int(starts[divergence(table, starts, stops, levels).argmin()])
    return start + density.first, stop + density.first


@dataclass(frozen=True, eq=False)
class _Table:
    """Sums over the first bins, each float64 ``[bins + 1]``, and the bins themselves."""

    mass: torch.Tensor
    sums: torch.Tensor
    logs: torch.Tensor
    filled: torch.Tensor

    @classmethod
    def of(cls, mass: torch.Tensor) -> _Table:
        terms = torch.stack((mass, torch.xlogy(mass, mass), (mass > 0).to(torch.float64)))
        table = torch.zeros(3, len(mass) + 1, dtype=torch.float64)
        table[:, 1:] = terms.cumsum(1)
        return cls(mass, *table)

    @property
    def bins(self) -> int:
        return len(self.mass)


def divergence(
    table: _Table, starts: torch.Tensor, stops: torch.Tensor, levels: int
) -> torch.Tensor:
    """Return KL(P || Q) for the windows ``[starts, stops)`` of bins, float64 ``[windows]``.

    P is the window, with what lies outside added to its end bins. Q is the window without
    that, each of its ``levels`` groups of bins spread evenly over the group's non-empty bins
    (Migacz, "8-bit inference with TensorRT", GTC 2017). All windows come from cumulative sums:
    sum(p log p) over bins less sum(S log(S / n)) over groups of mass S in n bins.

    A finite sample makes a flat group look uneven: n bins of equal mass seem to diverge by
    (n - 1) / 2 counts, which would favour narrow windows; that is subtracted (Miller 1955).
    """
    width = (stops - starts)[:, None]
    bounds = starts[:, None] + torch.arange(levels + 1)[None, :] * width // levels
    mass, bins = table.sums[bounds].diff(dim=1), table.filled[bounds].diff(dim=1)
    result = table.logs[stops] - table.logs[starts] - (bins - 1).clamp(min=0).sum(1) / 2
    total = table.sums[-1]
    outside = ((0, starts, table.sums[starts]), (-1, stops - 1, total - table.sums[stops]))
    for group, end, extra in outside:
        own = table.mass[end]
        # An end bin that only holds what lies outside is not empty in P, so Q spreads to it;
        # and a group has at least one value: Q is nowhere zero where P is not.
        bins[:, group] += (own == 0) & (extra > 0)
        density = mass[:, group].clamp(min=1) / bins[:, group].clamp(min=1)
        result += torch.xlogy(own + extra, own + extra) - torch.xlogy(own, own)
        result -= extra * density.log()
    result -= torch.xlogy(mass, mass / bins.clamp(min=1)).sum(1)
    return result / total - (total / mass.sum(1).clamp(min=1)).log()


def _spread(first: int, last: int) -> torch.Tensor:
    """Return integers from ``first`` to ``last``, both included, evenly spread."""
    ends = torch.linspace(first, last, _CANDIDATES, dtype=torch.float64).round().long()
    return torch.tensor(sorted(set(ends.tolist())))
