"""What all observers promise, and what each does with known data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.calibration.observers.ranges import (
    Entropy,
    ExtremeValue,
    HistogramObserver,
    MinMax,
    MovingAverage,
    Mse,
    Percentile,
    RangeObserver,
)
from compressor.errors import SpecError
from compressor.types.statistics import Range

KINDS: list[type[RangeObserver]] = [MinMax, MovingAverage, Percentile, Entropy, Mse, ExtremeValue]
HISTOGRAMS: list[type[HistogramObserver]] = [Percentile, Entropy, Mse]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LISTS = st.lists(FLOATS, max_size=30)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def result(observer: RangeObserver, *parts: torch.Tensor) -> Range:
    state = observer.start()
    for part in parts:
        state = observer.update(state, part)
    return observer.result(state)


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@kinds
@settings(deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=30), bits=st.integers(2, 16))
def test_ranges_hold_zero_and_are_finite(kind, values, bits):
    tensor = torch.tensor(values)
    for symmetric in (False, True):
        found = result(kind(bits=bits, symmetric=symmetric), tensor)
        assert found.low <= 0 <= found.high
        assert math.isfinite(found.low)
        assert math.isfinite(found.high)
        if symmetric:
            assert found.low == -found.high
        elif min(values) >= 0:
            assert found.low == 0
        if any(values):
            assert found.low < found.high


@kinds
@pytest.mark.parametrize("symmetric", [False, True])
def test_zeros_give_the_empty_range(kind, symmetric):
    assert result(kind(symmetric=symmetric), torch.zeros(5), torch.zeros(1)) == Range(0, 0)


@kinds
def test_nothing_observed_is_an_error(kind):
    with pytest.raises(ValueError, match="no values"):
        result(kind(), torch.zeros(0))


@kinds
def test_placeholder_has_the_form_of_a_result(kind):
    assert isinstance(kind().placeholder(), Range)


@kinds
def test_refuses_what_is_not_finite(kind):
    with pytest.raises(ValueError, match="not finite"):
        result(kind(), torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("kind", [MinMax, *HISTOGRAMS], ids=lambda kind: kind.name)
@settings(deadline=None)
@given(parts=st.lists(LISTS, min_size=1, max_size=4))
def test_grouping_does_not_matter(kind, parts):
    assume(any(parts))
    observer = kind()
    whole = result(observer, torch.tensor([value for part in parts for value in part]))
    state = observer.start()
    for part in parts:
        state = observer.merge(observer.update(observer.start(), torch.tensor(part)), state)
    assert observer.result(state) == whole


@settings(deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), min_size=2, max_size=6), st.data())
def test_moving_average_of_a_stream_follows_from_its_parts(batches, data):
    observer = MovingAverage(constant=data.draw(st.sampled_from([0.01, 0.3, 1.0])))
    cut = data.draw(st.integers(0, len(batches)))
    tensors = [torch.tensor(batch) for batch in batches]

    def fold(parts):
        state = observer.start()
        for part in parts:
            state = observer.update(state, part)
        return state

    whole = observer.result(fold(tensors))
    merged = observer.result(observer.merge(fold(tensors[:cut]), fold(tensors[cut:])))
    largest = max(abs(value) for batch in batches for value in batch)
    assert merged.low == pytest.approx(whole.low, rel=1e-9, abs=1e-9 * largest)
    assert merged.high == pytest.approx(whole.high, rel=1e-9, abs=1e-9 * largest)


def test_moving_average_weighs_recent_batches_more_and_has_no_bias():
    batches = [torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 1.0])]
    observer = MovingAverage(constant=0.25)
    assert result(observer, batches[0]) == Range(-1, 2)
    found = result(observer, *batches)  # weights 0.25 * 0.75 and 0.25
    assert found.low == pytest.approx((-1 * 0.75 - 3) / 1.75)
    assert found.high == pytest.approx((2 * 0.75 + 1) / 1.75)


def test_min_max_is_that_of_all_values():
    parts = [torch.tensor([[-1.5, 0.25]]), torch.tensor(3.0), torch.zeros(0)]
    assert result(MinMax(), *parts) == Range(-1.5, 3.0)
    assert result(MinMax(symmetric=True), *parts) == Range(-3.0, 3.0)
    assert result(MinMax(), torch.tensor([2.0, 3.0])) == Range(0.0, 3.0)
    assert result(MinMax(), torch.tensor([-2.0, -3.0])) == Range(-3.0, 0.0)


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_lies_between_the_order_statistics_to_a_bin(percentile):
    values = normal(50_000)
    width = float(values.abs().max()) / 2048

    def check(threshold: float, data: torch.Tensor, beyond: float) -> None:
        least, most = (
            np.percentile(data.numpy(), 100 - beyond, method=method)
            for method in ("lower", "higher")
        )
        assert least - width <= threshold <= most + width

    found = result(Percentile(percentile=percentile), values)
    check(found.high, values, (100 - percentile) / 2)
    check(-found.low, -values, (100 - percentile) / 2)
    one_sided = result(Percentile(percentile=percentile), values.abs())
    check(one_sided.high, values.abs(), 100 - percentile)
    symmetric = result(Percentile(percentile=percentile, symmetric=True), values)
    check(symmetric.high, values.abs(), 100 - percentile)


def test_percentile_100_is_min_max():
    values = normal(1000)
    assert result(Percentile(percentile=100), values) == result(MinMax(), values)


def test_percentile_does_not_clip_to_nothing():
    values = torch.zeros(100_000)
    values[0] = 5.0
    assert result(Percentile(percentile=99.0), values) == Range(0.0, 5.0)


@pytest.mark.parametrize("kind", HISTOGRAMS, ids=lambda kind: kind.name)
def test_an_extreme_outlier_among_small_values_still_gives_a_range(kind):
    values = torch.cat((normal(1000), torch.tensor([1e30])))
    found = result(kind(), values)
    assert 0 < found.high <= 1.01e30


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MinMax, {"bits": 1}),
        (MinMax, {"bits": "8"}),
        (MovingAverage, {"constant": 0.0}),
        (Percentile, {"percentile": 101.0}),
        (Entropy, {"max-loss": -1.0}),
        (Mse, {"bins": 128}),
    ],
)
def test_options_are_checked(kind, options):
    with pytest.raises(SpecError):
        kind(**options)


def test_options_have_yaml_names_and_descriptions():
    for kind in KINDS:
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.name}: {name}"
    assert "max-loss" in Entropy.model_json_schema()["properties"]
