"""What is suggested, and what it would bring together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.lab.explain.explanation import (
    Change,
    Gain,
    LayerCost,
    best,
    gained_db,
    share_of,
    together,
)


def cost(
    name: str, share: float | None, size: int, ci: tuple[float, float] | None = None
) -> LayerCost:
    metric = None if ci is None else sum(ci) / 2
    sqnr = None if share is None else gained_db(share)
    gain = Gain(size, sqnr, share, metric, ci)
    return LayerCost("p", "int8/channel", 40.0, Change(0, name, {"skip": True}), gain)


def chosen(layers: list[LayerCost], count: int = 3) -> list[str]:
    return [c.change.layer for c in best(layers, count)]


def test_the_most_for_each_byte_comes_first():
    layers = [cost("large", 40, 1000), cost("small", 30, 10), cost("none", 0.1, 1)]
    assert chosen(layers) == ["small", "large"]
    assert chosen(layers, 1) == ["small"]


def test_what_breaks_the_size_limit_makes_room_for_what_does_not():
    layers = [cost("dear", 60, 100), cost("cheap", 20, 60), cost("small", 20, 40)]
    assert [c.change.layer for c in best(layers, 3, 100)] == ["dear"]
    assert [c.change.layer for c in best(layers, 3, 99.5)] == ["small"]
    assert [c.change.layer for c in best(layers, 3, 200)] == ["dear", "small", "cheap"]
    assert [c.change.layer for c in best(layers, 3, 39)] == []


def test_a_gain_beyond_chance_comes_before_noise():
    layers = [
        cost("noisy", 90, 10),
        cost("right", 1, 10, (0.1, 0.5)),
        cost("worse", 90, 1, (-2, -1)),
    ]
    assert chosen(layers) == ["right", "noisy"]


def test_what_adds_noise_or_is_not_known_is_not_suggested():
    assert chosen([cost("adds", -20, 10), cost("unknown", None, 10)]) == []
    assert chosen([]) == []


@given(st.floats(-20, 40))
def test_shares_and_decibels_are_the_same_thing(gain: float):
    share = share_of(gain)
    found = gained_db(share)
    assert found is not None
    assert found == pytest.approx(gain, abs=1e-6)


def test_half_of_the_noise_is_three_decibels():
    assert gained_db(50.0) == pytest.approx(3.0103, abs=1e-4)
    assert gained_db(100.0) is None


def test_together_shares_add_and_chance_does_not():
    gains = [Gain(10, 1.0, 20.0, 0.4, (0.1, 0.7)), Gain(5, 2.0, 30.0, 9.0, (-1.0, 19.0))]
    found = together(gains)
    assert (found.bytes, found.noise_share, found.metric) == (15, 50.0, 0.4)
    assert found.sqnr_db == pytest.approx(3.0103, abs=1e-4)
    assert found.ci95 is None
    assert together([Gain(1, None, 30.0)]).sqnr_db is None  # of weights alone
