"""The range that data to come stay within."""

from __future__ import annotations

import math

import pytest
import torch

from compressor.calibration.observers.ranges import ExtremeValue, MinMax
from compressor.types.statistics import Range


def found(observer: ExtremeValue | MinMax, *parts: torch.Tensor) -> Range:
    state = observer.start()
    for part in parts:
        state = observer.update(state, part)
    return observer.result(state)


def gumbel(rows: int, seed: int) -> torch.Tensor:
    """Return rows whose greatest values have location 3 and scale 0.5."""
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    peaks = 3 - 0.5 * (-uniform.log()).log()
    return torch.stack([peaks, peaks / 2, torch.zeros(rows, dtype=torch.float64)], 1)


def test_the_level_is_the_distributions() -> None:
    """One of ten times as many samples lies above, on average: m + b ln(10 n)."""
    rows = 20_000
    level = found(ExtremeValue(horizon=10), gumbel(rows, 1)).high
    assert level == pytest.approx(3 + 0.5 * math.log(10 * rows), rel=0.02)
    far = found(ExtremeValue(horizon=1000), gumbel(rows, 1)).high
    assert far - level == pytest.approx(0.5 * math.log(100), rel=0.05)


def test_fewer_of_the_data_to_come_are_clipped() -> None:
    clipped = {ExtremeValue: 0, MinMax: 0}
    for seed in range(40):
        new = gumbel(300, 1000 + seed)
        for kind in clipped:
            clipped[kind] += int((new > found(kind(), gumbel(30, seed)).high).sum())
    assert clipped[ExtremeValue] < 0.3 * clipped[MinMax]


def test_bounds_stay_bounds() -> None:
    saturated = torch.rand(8, 50).clamp(max=0.5)
    saturated[:, 0] = 0.5
    assert found(ExtremeValue(), saturated) == Range(0.0, 0.5)


def test_one_sample_is_taken_as_it_is() -> None:
    assert found(ExtremeValue(), torch.tensor([[-1.0, 2.0]])) == Range(-1.0, 2.0)


def test_both_ends_and_symmetry() -> None:
    values = torch.tensor([[-1.0, 5.0], [-2.0, 5.5], [-1.5, 4.5]])
    open_range = found(ExtremeValue(), values)
    assert open_range.low < -2
    assert open_range.high > 5.5
    turned = found(ExtremeValue(), -values)
    assert (turned.low, turned.high) == (-open_range.high, -open_range.low)
    both = found(ExtremeValue(symmetric=True), values)
    assert both == Range(-open_range.high, open_range.high)


def test_the_grouping_of_samples_does_not_matter() -> None:
    values = torch.randn(24, 7, generator=torch.Generator().manual_seed(3))
    observer = ExtremeValue()
    whole = observer.update(observer.start(), values)
    parts = [observer.update(observer.start(), part) for part in values.split([1, 11, 12])]
    assert observer.merge(observer.merge(parts[2], parts[0]), parts[1]) == whole
