"""Clipping ranges of a distribution: least divergence, least squared error, a percentage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from compressor.calibration.histogram import SIDE, Histogram


def percentile_symmetric(histogram: Histogram, percentile: float) -> tuple[float, float]:
    """Return ``(-t, t)`` with ``percentile`` percent of all ``|x|`` below t."""
    counts = histogram.counts
    magnitudes = counts[SIDE:].clone()
    magnitudes[1:] += counts[1:SIDE].flip(0)
    threshold = quantile(magnitudes, histogram.total * (1 - percentile / 100))
    return -threshold, threshold


def percentile_affine(histogram: Histogram, percentile: float) -> tuple[float, float]:
    """Return a range outside which lie ``100 - percentile`` percent of all values.

    Half of them lie below and half above, or all on one side if there are no others.
    """
    sides = (histogram.low < 0) + (histogram.high > 0)
    beyond = histogram.total * (1 - percentile / 100) / max(sides, 1)
    left = torch.cat((histogram.counts[SIDE:][:1], histogram.counts[1:SIDE].flip(0)))
    low = -quantile(left, beyond) if histogram.low < 0 else 0.0
    high = quantile(histogram.counts[SIDE:], beyond) if histogram.high > 0 else 0.0
    return low, high


def quantile(counts: torch.Tensor, beyond: float) -> float:
    """Return the t above which ``beyond`` values lie, linear within bins, and at least 1.

    ``counts`` are those of the bins ``[0, 1), [1, 2), ...``; where the values of the
    first lie is not known, so the result never falls there.
    """
    tails = counts.flip(0).cumsum(0).flip(0)
    inside = int((tails > beyond).sum())  # bins, from zero, that reach into the range
    if inside <= 1:
        return 1.0
    rest = float(tails[inside]) if inside < len(tails) else 0.0
    return inside - (beyond - rest) / float(counts[inside - 1])


@dataclass(frozen=True, eq=False)
class Density:
    """A piecewise constant density in units of the histogram's bin width."""

    # float64 `[last - first]`, the counts in `[first, first + 1)` and so on. A spike at zero is
    # left out: zero is represented exactly, so it costs nothing and says nothing about where to
    # clip
    mass: torch.Tensor
    first: int  # the left end, an integer, at most 0
    last: int  # the right end, an integer, at least 0

    @cached_property
    def edges(self) -> torch.Tensor:
        """The ends of the bins, float64 ``[last - first + 1]``."""
        return torch.arange(self.first, self.last + 1, dtype=torch.float64)


@lru_cache(maxsize=1)  # observers of one value look at it one after the other
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


# Windows tried in each search along a line; with 256 levels torch starts no threads for them.
_CANDIDATES = 120
_ROUNDS = 2  # how often high and low take turns


def entropy_symmetric(density: Density, bits: int) -> tuple[int, int]:
    """Return the range ``(-t, t)`` of least divergence; ``2 ** (bits - 1)`` levels hold ``|x|``."""
    levels = 2 ** (bits - 1)
    table = _Table.of(fold(density))
    stops = _spread(min(levels, table.bins), table.bins)
    threshold = int(stops[divergence(table, torch.zeros_like(stops), stops, levels).argmin()])
    return -threshold, threshold


def entropy_affine(density: Density, bits: int) -> tuple[int, int]:
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
        end_mass = table.mass[end]
        # An end bin that only holds what lies outside is not empty in P, so Q spreads to it;
        # and a group has at least one value: Q is nowhere zero where P is not.
        bins[:, group] += (end_mass == 0) & (extra > 0)
        density = mass[:, group].clamp(min=1) / bins[:, group].clamp(min=1)
        result += torch.xlogy(end_mass + extra, end_mass + extra) - torch.xlogy(end_mass, end_mass)
        result -= extra * density.log()
    result -= torch.xlogy(mass, mass / bins.clamp(min=1)).sum(1)
    return result / total - (total / mass.sum(1).clamp(min=1)).log()


def _spread(first: int, last: int) -> torch.Tensor:
    ends = torch.linspace(first, last, _CANDIDATES, dtype=torch.float64).round().long()
    return torch.tensor(sorted(set(ends.tolist())))


Span = tuple[float, float]

_GRID = 96  # thresholds a side in the coarse search, in about equal ratios
_FIRST_STEP = 0.06  # the local search's first step, as a share of the threshold ...
_LAST_STEP = 1 / 256  # ... and the step below which it ends


def mse_affine(density: Density, extrema: Span, bits: int) -> Span:
    """Return the range with which an affine quantizer errs least; zero lies on its grid.

    Low and high are searched together: first on a coarse grid with the error approximated by
    clipping plus ``scale ** 2 / 12``, then by descent on the exact ``expected_error``. The range
    between the ``extrema`` competes too, so the result is never worse than min-max.
    """
    steps = 2**bits - 1
    highs, lows = _thresholds(density.last), _thresholds(-density.first)
    scale = (highs[None, :] + lows[:, None]).to(torch.float64) / steps
    error = scale**2 / 12 * density.mass.sum()
    error += clip_error(density, highs)[None, :] + clip_error(mirror(density), lows)[:, None]
    error[scale == 0] = torch.inf
    row, column = divmod(int(error.argmin()), len(highs))
    starts = [extrema, (-float(lows[row]), float(highs[column]))]

    def around(span: Span, step: float) -> list[Span]:
        factors = (1 - step, 1.0, 1 + step)
        return [(span[0] * a, span[1] * b) for a in factors for b in factors if a != 1 or b != 1]

    return _descend(density, starts, around, steps)


def mse_symmetric(density: Density, extrema: Span, bits: int) -> Span:
    """Return the range ``(-t, t)`` with which a symmetric quantizer errs least.

    Its levels are ``-n .. n`` with ``n = 2 ** (bits - 1) - 1``.
    """
    steps = 2**bits - 2
    thresholds = _thresholds(max(density.last, -density.first))
    scale = 2 * thresholds.to(torch.float64) / steps
    error = scale**2 / 12 * density.mass.sum()
    error += clip_error(density, thresholds) + clip_error(mirror(density), thresholds)
    error[scale == 0] = torch.inf
    coarse = float(thresholds[error.argmin()])
    largest = max(-extrema[0], extrema[1])
    starts = [(-largest, largest), (-coarse, coarse)]

    def around(span: Span, step: float) -> list[Span]:
        return [(-span[1] * factor, span[1] * factor) for factor in (1 - step, 1 + step)]

    return _descend(density, starts, around, steps)


def snap(span: Span, steps: int) -> Span:
    """Return the range that an affine quantizer of ``steps`` steps makes of a range."""
    low, high = span
    scale = (high - low) / steps
    zero = round(-low / scale)
    return -zero * scale, (steps - zero) * scale


def expected_error(density: Density, span: Span, steps: int) -> float:
    """Return the sum of ``(x - q(x)) ** 2`` over the density, in squared bin widths.

    ``q`` clips to the span ``(low, high)`` and rounds to multiples of the scale
    ``s = (high - low) / steps``; both ends must be multiples (see ``snap``). With ``c = clip(x)``
    and ``r = c / s - round(c / s)``, a primitive of ``(x - q(x)) ** 2`` is
    ``s ** 3 * (round(c / s) / 12 + r ** 3 / 3) + (x - c) ** 3 / 3``, so nothing is sampled.
    """
    low, high = span
    scale = (high - low) / steps
    edges = density.edges.numpy()
    clipped = edges.clip(low, high)
    rest = clipped / scale
    level = np.rint(rest)
    rest -= level
    outside = np.subtract(edges, clipped, out=clipped)
    primitive = (level / 12 + rest * rest * rest / 3) * scale**3
    primitive += outside * outside * outside / 3
    errors = np.subtract(primitive[1:], primitive[:-1], out=rest[1:])
    errors *= density.mass.numpy()
    return float(torch.from_numpy(errors).sum())  # @ would start threads


def clip_error(density: Density, thresholds: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``(x - t) ** 2`` over ``x > t`` for integers ``t >= 0``: float64."""
    right = density.mass[-density.first :]
    j = torch.arange(len(right), dtype=torch.float64)
    moments = torch.stack((right, right * (j + 1 / 2), right * (j * j + j + 1 / 3)))
    tails = torch.zeros(3, int(thresholds.max()) + len(right) + 1, dtype=torch.float64)
    tails[:, : len(right)] = moments.flip(1).cumsum(1).flip(1)
    count, first, second = tails[:, thresholds]
    t = thresholds.to(torch.float64)
    error: torch.Tensor = second - 2 * t * first + t * t * count
    return error.clamp(min=0)


def _thresholds(end: int) -> torch.Tensor:
    """Return zero and integers up to ``end`` in about equal ratios."""
    if end == 0:
        return torch.zeros(1, dtype=torch.int64)
    ratios = torch.logspace(0, 1, _GRID, base=float(end), dtype=torch.float64)
    return torch.tensor(sorted({0, *ratios.round().long().tolist()}))


def _descend(
    density: Density,
    starts: list[Span],
    around: Callable[[Span, float], list[Span]],
    steps: int,
) -> Span:
    """Move from the best start to the best neighbour, halving the step where none is better."""
    errors: dict[Span, float] = {}  # of a range that begins at zero, most neighbours are equal

    def best_of(spans: list[Span]) -> tuple[float, Span]:
        snapped = [snap(span, steps) for span in spans]
        for span in snapped:
            if span not in errors:
                errors[span] = expected_error(density, span, steps)
        return min((errors[span], span) for span in snapped)

    error, best = best_of(starts)
    step = _FIRST_STEP
    while step > _LAST_STEP:
        new_error, candidate = best_of(around(best, step))
        if new_error < error:
            error, best = new_error, candidate
        else:
            step /= 2
    return best
