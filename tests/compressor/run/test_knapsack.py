"""The multiple-choice knapsack against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor.run import knapsack
from compressor.run.knapsack import Options, cheapest, combined

numbers = st.integers(-20, 40).map(lambda n: n / 4)


@st.composite
def classes(draw: st.DrawFn) -> list[Options]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def line(n: int) -> np.ndarray:
        return np.array(draw(st.lists(numbers, min_size=n, max_size=n)))

    return [Options(line(n), line(n)) for n in sizes]


def totals(offered: list[Options], chosen: list[int] | tuple[int, ...]) -> tuple[float, float]:
    pairs = list(zip(offered, chosen, strict=True))
    return sum(o.times[i] for o, i in pairs), sum(o.losses[i] for o, i in pairs)


@given(offered=classes(), budget=numbers)
def test_no_choice_within_the_budget_loses_less(offered, budget):
    every = [totals(offered, c) for c in product(*(range(len(o.times)) for o in offered))]
    fitting = [loss for time, loss in every if time <= budget]
    chosen = cheapest(offered, budget)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    time, loss = totals(offered, chosen)
    assert time <= budget
    assert loss == min(fitting)


@given(offered=classes())
def test_combinations_are_those_that_no_other_beats(offered):
    every = [totals(offered, c) for c in product(*(range(len(o.times)) for o in offered))]
    sums, chosen = combined(offered)
    found = list(zip(sums.times, sums.losses, strict=True))
    assert found == [totals(offered, [int(i) for i in row]) for row in chosen]
    best = {
        (t, x)
        for t, x in every
        if not any(a <= t and b <= x and (a, b) != (t, x) for a, b in every)
    }
    assert set(found) == best


@given(offered=classes(), budget=numbers, more=st.integers(0, 20))
def test_more_time_never_costs_more(offered, budget, more):
    chosen = cheapest(offered, budget)
    assume(chosen is not None)
    larger = cheapest(offered, budget + more)
    assert larger is not None
    assert totals(offered, larger)[1] <= totals(offered, chosen)[1]


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_times_told_apart_coarsely_still_fit(seed):
    """Ten classes of ten options have more sums than are kept."""
    rng = np.random.default_rng(seed)
    offered = [Options(rng.random(10), rng.random(10)) for _ in range(10)]
    chosen = cheapest(offered, 4.0)
    assert chosen is not None
    assert totals(offered, chosen)[0] <= 4.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_MOST_POINTS", 10**9)
        exact = cheapest(offered, 4.0)
    assert exact is not None
    assert totals(offered, chosen)[1] <= totals(offered, exact)[1] + 0.02


@pytest.mark.parametrize("first", [0.0, 101.0])
@pytest.mark.parametrize(("most", "kept"), [(65, range(65)), (17, [0, *range(3, 64, 4), 64])])
def test_of_too_many_choices_the_last_of_each_stretch_and_the_fastest_stay(most, kept, first):
    """The second class asks for all but some of the time, so that the first gets what is left."""
    times = np.arange(65.0)
    many = Options(times + first, 64.0 - times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_MOST_POINTS", most)
        for left in range(65):
            rest = Options(np.array([0.0, 64.0 - left]), np.array([0.0, -1000.0]))
            fits = max(time for time in kept if time <= left)
            assert cheapest([many, rest], 64.0 + first) == [fits, 1]


def test_as_many_choices_as_are_kept_all_stay(monkeypatch: pytest.MonkeyPatch):
    """However close their times."""
    monkeypatch.setattr(knapsack, "_MOST_POINTS", 4)
    many = Options(np.array([0.0, 0.01, 0.02, 9.0]), np.array([3.0, 2.0, 1.0, 0.0]))
    assert cheapest([many, Options(np.array([0.0, 8.99]), np.array([0.0, -9.0]))], 9.0) == [1, 1]


def test_a_choice_may_take_exactly_the_budget():
    """Though sums of times are rounded: three tenths are a little more than 0.3."""
    tenth = Options(np.array([0.0, 0.1]), np.array([1.0, 0.0]))
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert cheapest([tenth] * 3, 0.3) == [1, 1, 1]
    assert cheapest([tenth] * 3, 0.3 * (1 - 1e-11)) != [1, 1, 1]
    faster = Options(np.array([-0.1, 0.0]), np.array([0.0, 1.0]))
    assert cheapest([faster] * 3, -0.3) == [0, 0, 0]
    assert cheapest([faster] * 3, -0.3 - 1e-9) is None
