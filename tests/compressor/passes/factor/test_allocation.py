"""Ranks under one budget, against all choices there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.factor.budget import Curve, allocate, log_losses, reduced, refilled


@st.composite
def curves(draw: st.DrawFn) -> list[Curve]:
    """Draw up to three layers of up to five ranks."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(3, 9)), draw(st.integers(3, 9))
        most = (rows * columns - 1) // (rows + columns)
        values = draw(
            st.lists(
                st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
                min_size=min(rows, columns),
                max_size=min(rows, columns),
            )
        )
        energies = np.sort(np.asarray(values))[::-1]
        whole = energies.sum()
        shares = energies.cumsum() / whole if whole else np.ones(len(energies))
        times = draw(st.sampled_from([1, 4]))
        losses = log_losses(shares[:most])
        found.append(Curve(losses, float(times * (rows + columns)), float(times * rows * columns)))
    return found


def cost(layers: Sequence[Curve], ranks: Sequence[int | None]) -> float:
    return sum(c.cost(r) for c, r in zip(layers, ranks, strict=True))


def loss(layers: Sequence[Curve], ranks: Sequence[int | None]) -> float:
    return sum(c.loss(r) for c, r in zip(layers, ranks, strict=True))


def every(layers: Sequence[Curve]) -> list[tuple[int | None, ...]]:
    return list(product(*[[None, *range(1, len(c.losses) + 1)] for c in layers]))


@settings(max_examples=40)
@given(curves(), st.floats(0, 1))
def test_no_choice_that_costs_as_little_loses_less(layers: list[Curve], share: float):
    least = min(cost(layers, ranks) for ranks in every(layers))
    budget = least + share * (cost(layers, [None] * len(layers)) - least)
    ranks = reduced(layers, budget)
    assert cost(layers, ranks) <= budget * (1 + 1e-9)
    best = min(loss(layers, r) for r in every(layers) if cost(layers, r) <= cost(layers, ranks))
    assert loss(layers, ranks) == pytest.approx(best, abs=1e-12)


@settings(max_examples=40)
@given(curves(), st.floats(0, 1))
def test_what_is_given_back_stays_under_the_budget(layers: list[Curve], share: float):
    least = min(cost(layers, ranks) for ranks in every(layers))
    budget = least + share * (cost(layers, [None] * len(layers)) - least)
    before, after = reduced(layers, budget), allocate(layers, budget)
    assert cost(layers, after) <= budget * (1 + 1e-9)
    assert loss(layers, after) <= loss(layers, before)
    for index, (curve, rank) in enumerate(zip(layers, after, strict=True)):
        if rank is None:
            continue
        above = [*after]
        above[index] = rank + 1 if rank < len(curve.losses) else None
        assert cost(layers, above) > budget or curve.loss(rank) == curve.loss(above[index])


def test_the_first_step_goes_where_loss_over_saving_is_least():
    # Two ranks that hold nearly all: the layer goes to rank 2 at once, not to 4.
    shares = np.asarray([0.6, 0.99, 0.9905, 0.991])
    layer = Curve(log_losses(shares), 18.0, 81.0)
    assert reduced([layer], 80.0) == [2]
    assert allocate([layer], 80.0) == [4]
    assert allocate([layer], 71.0) == [3]
    assert allocate([layer], 81.0) == [None]
    assert refilled([layer], [1], 54.0) == [3]


def test_equal_layers_give_in_their_order():
    layer = Curve(log_losses(np.asarray([0.5, 0.8, 0.9])), 10.0, 40.0)
    assert reduced([layer, layer, layer], 119.0) == [3, None, None]
    assert reduced([layer, layer, layer], 95.0) == [3, 3, 3]
    assert reduced([layer, layer, layer], 79.0) == [2, 2, 3]


def test_a_budget_out_of_reach_leaves_rank_one():
    layer = Curve(log_losses(np.asarray([0.5, 0.8])), 10.0, 40.0)
    assert allocate([layer, layer], 3.0) == [1, 1]


def test_layers_without_a_rank_that_saves_stay_whole():
    assert allocate([Curve(np.zeros(0), 7.0, 6.0)], 1.0) == [None]
