"""Clipping ranges of histograms made by hand, against what their definitions give."""

from __future__ import annotations

import math

import pytest
import torch

from compressor.calibration import clipping
from compressor.calibration.clipping import (
    Density,
    clip_error,
    density,
    divergence,
    entropy_affine,
    entropy_symmetric,
    expected_error,
    fold,
    mirror,
    mse_affine,
    mse_symmetric,
    percentile_affine,
    percentile_symmetric,
    quantile,
    snap,
)
from compressor.calibration.clipping import _Table as Table
from compressor.calibration.histogram import SIDE, Histogram

Bins = dict[int, int]


def histogram(bins: Bins, low: float, high: float) -> Histogram:
    """Return one with bins a quarter wide."""
    counts = torch.zeros(2 * SIDE, dtype=torch.int64)
    for place, count in bins.items():
        counts[SIDE + place] = count
    return Histogram(counts, -2, low, high)


@pytest.mark.parametrize(
    ("beyond", "threshold"),
    [(0, 5), (1, 4.5), (2, 3), (4, 2.5), (6, 2), (7, 1.5), (8, 1), (11, 1), (12, 1)],
)
def test_a_quantile_is_linear_within_bins_and_never_in_the_first(beyond, threshold):
    assert quantile(torch.tensor([4, 2, 4, 0, 2]), beyond) == threshold


BOTH = {-2: 1, -1: 5, 0: 2, 1: 3, 2: 4, 3: 1}


def test_a_percentage_of_the_magnitudes():
    # A quarter is 4 of 16: the one beyond 3 and three of the five from 2 to 3.
    low, high = percentile_symmetric(histogram(BOTH, -0.7, 0.9), 75)
    assert (low, high) == pytest.approx((-2.4, 2.4))


def test_a_percentage_on_each_side():
    # Two of 16 on each side: below, the one of the last bin and one of five.
    found = percentile_affine(histogram(BOTH, -0.7, 0.9), 75)
    assert found == pytest.approx((-1.8, 2.75))


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_a_percentage_on_one_side(least):
    bins = {place: count for place, count in BOTH.items() if place >= 0}
    # Of 10, 2.5 lie beyond: the one of the last bin and 1.5 of four.
    assert percentile_affine(histogram(bins, least, 0.9), 75) == (0, pytest.approx(2.625))
    turned = {-place: count for place, count in bins.items()}
    found = percentile_affine(histogram(turned, -0.9, -least), 75)
    assert found == (pytest.approx(-2.625), 0)


def test_a_percentage_looks_as_far_to_the_left_as_to_the_right():
    far = {SIDE - 1: 3, SIDE - 2: 2, 0: 4}
    right, left = histogram(far, 0.0, 1.0), histogram({-j: n for j, n in far.items()}, -1.0, 0.0)
    low, high = percentile_affine(right, 80)
    assert (low, high) == (0, pytest.approx(SIDE - 1 + 1.2 / 3))
    assert percentile_affine(left, 80) == (-high, 0)
    assert percentile_symmetric(left, 80) == percentile_symmetric(right, 80) == (-high, high)


@pytest.mark.parametrize(
    ("bins", "mass", "first"),
    [
        ({-2: 3, -1: 3, 0: 3, 1: 6, 2: 1}, [3, 3, 1, 2, 6, 1], -3),  # a third of each neighbour
        ({-3: 5, -1: 3, 0: 10, 1: 6}, [5, 0, 3, 3, 6, 6], -4),  # the spike is one of ten
        ({-1: 1, 0: 2}, [1, 1], -2),  # none right of zero, where the neighbour is empty
        ({0: 1, 1: 1}, [1, 1], 0),
        ({5: 2}, [0, 0, 0, 0, 0, 2], 0),
        ({-3: 2}, [2, 0, 0, 0], -4),
        ({0: 7}, [], 0),
    ],
)
def test_a_density_leaves_out_the_spike_at_zero(bins, mass, first):
    spread = density(histogram(bins, -1, 1))
    assert spread.mass.tolist() == mass
    assert spread.mass.dtype == torch.float64
    assert (spread.first, spread.last) == (first, first + len(mass))


SPREAD = Density(torch.tensor([2.0, 0, 1, 4, 3], dtype=torch.float64), -2, 3)


def test_mirrored_and_folded():
    other = mirror(SPREAD)
    assert (other.mass.tolist(), other.first, other.last) == ([3, 4, 1, 0, 2], -3, 2)
    assert fold(SPREAD).tolist() == fold(other).tolist() == [1, 6, 3]
    assert fold(SPREAD).dtype == torch.float64


def test_clipping_errs_by_the_square_of_what_is_beyond():
    thresholds = torch.tensor([0, 1, 2, 3, 7])
    spread = Density(torch.tensor([9.0, 0.25, 0.5, 0.125], dtype=torch.float64), -1, 3)
    expected = [
        sum(
            mass * ((j + 1 - t) ** 3 - (j - t) ** 3) / 3
            for j, mass in enumerate([0.25, 0.5, 0.125])
            if j >= t
        )
        for t in thresholds.tolist()
    ]
    assert clip_error(spread, thresholds).tolist() == pytest.approx(expected)


def kullback_leibler(mass: list[float], start: int, stop: int, levels: int) -> float:
    """Return the divergence of a window, group by group."""
    total, inside = sum(mass), sum(mass[start:stop])
    p = list(mass[start:stop])
    p[0] += sum(mass[:start])
    p[-1] += sum(mass[stop:])
    result = 0.0
    for level in range(levels):
        left, right = (i * (stop - start) // levels for i in (level, level + 1))
        filled = [j for j in range(left, right) if p[j] > 0]
        seen = sum(mass[start + j] > 0 for j in range(left, right))
        q = max(sum(mass[start + left : start + right]), 1.0) / max(len(filled), 1)
        result += sum(p[j] * (math.log(p[j] / total) - math.log(q / inside)) for j in filled)
        result -= max(seen - 1, 0) / 2
    return result / total


MASSES = [
    [5.0, 3, 0, 2, 8, 1, 4, 7, 2, 6],
    [5.0, 3, 0, 0, 8, 1, 0, 0, 2, 6],
    [5.0, 0, 0, 9, 1, 1, 4, 0, 0, 0],
    [0.0, 0, 1, 9, 0, 0, 4, 0, 1, 1],
]


@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize("mass", MASSES)
def test_divergence_is_kullback_leiblers_of_any_window(mass, levels):
    table = Table.of(torch.tensor(mass, dtype=torch.float64))
    windows = [(a, b) for a in range(10) for b in range(a + levels, 11) if sum(mass[a:b]) >= 1]
    starts, stops = (torch.tensor(ends) for ends in zip(*windows, strict=True))
    got = divergence(table, starts, stops, levels).tolist()
    expected = [kullback_leibler(mass, a, b, levels) for a, b in windows]
    assert got == pytest.approx(expected)


def tail(left: int, right: int) -> Density:
    """Return a density that falls to both sides, with a far value at each end."""
    sides = [
        [
            round(400 * math.exp(-j / 9)) * (j < length - 9) + (j == length - 1)
            for j in range(length)
        ]
        for length in (left, right)
    ]
    return Density(
        torch.tensor([*reversed(sides[0]), *sides[1]], dtype=torch.float64), -left, right
    )


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("left", "right"), [(0, 90), (50, 90), (90, 50)])
def test_the_threshold_of_least_divergence(left, right, bits):
    folded = fold(tail(left, right)).tolist()
    levels = 2 ** (bits - 1)
    errors = {t: kullback_leibler(folded, 0, t, levels) for t in range(levels, 91)}
    best = min(errors, key=errors.__getitem__)
    assert entropy_symmetric(tail(left, right), bits) == (-best, best)
    if not left:
        errors = {t: kullback_leibler(folded, 0, t, 2 * levels) for t in range(2 * levels, 91)}
        best = min(errors, key=errors.__getitem__)
        assert entropy_affine(tail(0, right), bits) == (0, best)
        turned = folded[::-1]
        errors = {t: kullback_leibler(turned, 90 - t, 90, 2 * levels) for t in errors}
        best = max(errors, key=lambda t: (-errors[t], t))
        assert entropy_affine(tail(right, 0), bits) == (-best, 0)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("left", "right"), [(50, 90), (90, 50), (30, 100)])
def test_two_ends_take_turns(left, right, bits):
    spread, levels = tail(left, right), 2**bits
    mass = spread.mass.tolist()
    start, stop = 0, len(mass)
    for _ in range(2):
        stops = range(max(start + levels, left), len(mass) + 1)
        stop = min(stops, key=lambda b: kullback_leibler(mass, start, b, levels))
        starts = range(min(stop - levels, left) + 1)
        start = min(starts, key=lambda a: kullback_leibler(mass, a, stop, levels))
    assert entropy_affine(spread, bits) == (start - left, stop - left)


def test_fewer_bins_than_levels_are_all_kept():
    assert entropy_symmetric(SPREAD, 8) == (-3, 3)
    assert entropy_affine(SPREAD, 8) == (-2, 3)


# As measured. Ends of the search, near which no range errs less; a test of range quality holds them
# against brute force.
ENDS = {
    (0, 90, 3): (0.0, 42.315, 30.846),
    (0, 90, 8): (0.0, 88.82875, 88.117225),
    (50, 90, 4): (-31.3566176, 47.0349264, 38.0),
    (50, 90, 8): (-48.08774844, 88.16087214, 86.0),
    (300, 40, 3): (-33.05760089, 24.79320067, 27.39285),
    (300, 40, 8): (-296.29315885, 36.54717378, 289.271032375),
    (2000, 3000, 3): (-2158.58505579, 2878.11340773, 2999.5),
    (2000, 3000, 4): (-1999.7, 2999.55, 2931.00904206),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_search_for_the_least_squared_error_ends_where_it_did(case):
    left, right, bits = case
    spread, extrema = tail(left, right), (-left + 0.25 if left else 0.0, right - 0.5)
    low, high, threshold = ENDS[case]
    assert mse_affine(spread, extrema, bits) == pytest.approx((low, high), rel=1e-6)
    assert mse_symmetric(spread, extrema, bits) == pytest.approx((-threshold, threshold), rel=1e-6)


def test_the_search_looks_at_no_range_twice(monkeypatch):
    looked_at = []

    def noted(spread, span, steps):
        looked_at.append(span)
        return expected_error(spread, span, steps)

    monkeypatch.setattr(clipping, "expected_error", noted)
    mse_affine(tail(0, 500), (0.0, 499.5), 8)
    mse_symmetric(tail(300, 500), (-299.5, 499.5), 8)
    assert len(looked_at) == len(set(looked_at)) > 2


def test_a_range_is_no_wider_than_the_extrema_if_all_competes():
    # Two values: the range between them errs by nothing that a wider or a narrower one would not.
    spread = Density(torch.tensor([8.0, 8.0], dtype=torch.float64), -1, 1)
    low, high = mse_affine(spread, (-1.0, 1.0), 2)
    assert expected_error(spread, (low, high), 3) <= expected_error(spread, snap((-1, 1), 3), 3)


@pytest.mark.parametrize("extrema", [(-99.5, 0.0), (0.0, 99.5), (-99.5, 3.0), (-3.0, 99.5)])
def test_the_larger_extremum_competes_on_either_side(extrema):
    """It is the middle of the only bin, which the search by shares comes near to, and no more."""
    mass = torch.zeros(100, dtype=torch.float64)
    mass[99] = 8.0
    spread = Density(mass, 0, 100)
    if extrema[0] < -3.0:
        spread = mirror(spread)
    assert mse_symmetric(spread, extrema, 2) == (-99.5, 99.5)
