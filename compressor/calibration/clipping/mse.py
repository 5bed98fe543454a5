"""The range of least expected squared quantization error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compressor.calibration.density import Density, mirror

Span = tuple[float, float]

_GRID = 96  # thresholds a side in the coarse search, in about equal ratios
_FIRST_STEP = 0.06  # the local search's first step, as a share of the threshold ...
_LAST_STEP = 1 / 256  # ... and the step below which it ends


def search_affine(density: Density, extrema: Span, bits: int) -> Span:
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


def search_symmetric(density: Density, extrema: Span, bits: int) -> Span:
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
    edges = density.edges
    clipped = edges.clamp(low, high)
    position = clipped / scale
    level = position.round()
    primitive = (level / 12 + (position - level) ** 3 / 3) * scale**3
    primitive += (edges - clipped) ** 3 / 3
    return float((primitive.diff() * density.mass).sum())  # @ would start threads


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

    def best_of(spans: list[Span]) -> tuple[float, Span]:
        snapped = [snap(span, steps) for span in spans]
        return min((expected_error(density, span, steps), span) for span in snapped)

    error, best = best_of(starts)
    step = _FIRST_STEP
    while step > _LAST_STEP:
        new_error, candidate = best_of(around(best, step))
        if new_error < error:
            error, best = new_error, candidate
        else:
            step /= 2
    return best
