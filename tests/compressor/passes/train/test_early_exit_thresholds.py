"""Thresholds keep to the wanted agreement, and no others that do cost less."""

from __future__ import annotations

from itertools import product
from math import floor, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compressor.passes.train.early_exit.thresholds import choose_thresholds
from compressor.types.tensors import Array

COSTS = (3.0, 2.0, 4.0)


def left_at(confidences: Array, thresholds: tuple[float, ...]) -> NDArray[np.int64]:
    """Return the exit of each sample, one after the last for those that go all the way."""
    sure = confidences.astype(np.float32) >= np.asarray(thresholds, np.float32)[:, None]
    return np.where(sure.any(0), sure.argmax(0), len(thresholds))


def cost(places: NDArray[np.int64], costs: tuple[float, ...]) -> float:
    return float(np.cumsum(costs)[places].mean())


def wrong(places: NDArray[np.int64], agrees: NDArray[np.bool_]) -> int:
    rows = np.flatnonzero(places < len(agrees))
    return int((~agrees[places[rows], rows]).sum())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, NDArray[np.bool_], float]:
    samples = draw(st.integers(1, 7))
    steps = draw(st.sampled_from([3, 50]))  # with few, many are equally sure
    ranks = st.lists(st.integers(0, steps), min_size=samples, max_size=samples)
    flags = st.lists(st.booleans(), min_size=samples, max_size=samples)
    sure = np.array([draw(ranks), draw(ranks)]) / steps
    agreement = draw(st.sampled_from([100.0, 90.0, 70.0, 50.0]))
    return sure, np.array([draw(flags), draw(flags)]), agreement


@settings(max_examples=150)
@given(case=cases())
def test_nothing_that_keeps_to_the_agreement_costs_less(
    case: tuple[Array, NDArray[np.bool_], float],
) -> None:
    sure, agrees, agreement = case
    samples = sure.shape[1]
    found = choose_thresholds(sure, agrees, agreement, COSTS)
    budget = floor(samples * (1 - agreement / 100) + 1e-9)
    places = left_at(sure, found.values)
    assert wrong(places, agrees) == sum(found.wrong) <= budget
    assert [int((places == e).sum()) for e in range(2)] == list(found.left)
    assert found.agreement >= agreement - 1e-9
    assert found.cost == pytest.approx(cost(places, COSTS))
    tried = (
        left_at(sure, pair)
        for pair in product([*np.unique(sure[0]), inf], [*np.unique(sure[1]), inf])
    )
    best = min(cost(p, COSTS) for p in tried if wrong(p, agrees) <= budget)
    assert found.cost == pytest.approx(best)


def test_many_exits_and_samples_are_divided_in_coarse_steps() -> None:
    rng = np.random.default_rng(0)
    agrees = rng.random((4, 1500)) < np.array([0.6, 0.7, 0.8, 0.9])[:, None]
    sure = np.clip(rng.random((4, 1500)) + 0.5 * agrees, 0, 1.5)
    found = choose_thresholds(sure, agrees, 95.0, (1, 1, 1, 1, 1))
    places = left_at(sure, found.values)
    assert sum(found.left) > 400
    assert wrong(places, agrees) <= 75
    assert sum(found.shares) == pytest.approx(100)


def test_thresholds_of_random_samples_are_between_them() -> None:
    sure = np.array([[0.9, 0.5, 0.4]])
    agrees = np.array([[True, True, False]])
    found = choose_thresholds(sure, agrees, 100.0, (1, 1))
    assert found.values == pytest.approx((0.45,))
    assert choose_thresholds(sure, ~agrees, 100.0, (1, 1)).values == (inf,)
    everybody = choose_thresholds(sure, agrees, 50.0, (1, 1)).values[0]
    assert 0.39 < everybody < np.float32(0.4)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="2 costs"):
        choose_thresholds(np.zeros((2, 3)), np.zeros((2, 3), bool), 99.0, (1, 1))
