"""More bits where they are next to nothing: a first layer and a head beside large ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.options import HALF, STORED
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.remedies import Remedies
from compressor.lab.tune.solver import Entry, cost_of, eased, noise_of
from compressor.lab.tune.tuning import Tuning

SMALL, LARGE = (0.4, 0.8), (64.0, 128.0)
NOISE = {"4": 3.0, "8": 0.01}


def entries(costs: tuple[float, float]) -> dict[str, Entry]:
    floats = {HALF: Entry(0.0, 2 * costs[1]), STORED: Entry(0.005, costs[1])}
    coded = {o: Entry(NOISE[o], c) for o, c in zip(("4", "8"), costs, strict=True)}
    return {**coded, **floats}


TABLE = {"first": entries(SMALL), **{f"large{i}": entries(LARGE) for i in range(3)}}
NARROW = dict.fromkeys(TABLE, "4")


def narrowest() -> Any:
    size = cost_of(TABLE, NARROW)
    return SimpleNamespace(name="4 bits", choice=NARROW, bytes=size, recipe=Mock())


def tuning(goal: Goal, bound: float = 0.4) -> Any:
    journal = Mock(path=[])
    journal.is_late.return_value = False
    bench = Mock(float_entries=Mock(return_value={}), searched=Mock(return_value=Mock(bound=bound)))
    made: Any = Tuning(bench, goal, Mock(), journal)
    made.table = {name: dict(known) for name, known in TABLE.items()}
    made._learn, made._narrower_than_uniform = Mock(), Mock()
    made._all_floats = made._by_the_pass = Mock()

    def added(name: str, start: Any, choice: Any, into: list[Any]) -> bool:
        into.append(SimpleNamespace(name=name, choice=choice, bytes=cost_of(TABLE, choice)))
        return True

    made._added = added
    return made


def test_a_search_goes_on_from_wider_small_layers():
    pool = [narrowest()]
    search = tuning(Goal(metric_drop=0.5))
    search._by_layer(Mock(as_it_is=Mock(return_value=HALF)), Mock(), pool[0], pool)
    ((start, _), _) = search._narrower_than_uniform.call_args
    assert start is pool[1]
    assert start.choice == {**NARROW, "first": "8"}
    assert start.bytes < 1.01 * pool[0].bytes


@pytest.mark.parametrize(
    ("goal", "bound"),
    [
        (Goal(metric_drop=0.5, minimize="latency"), 0.4),
        (Goal(size_ratio=0.2), 0.4),
        (Goal(metric_drop=0.5), 0.2),
    ],
    ids=["fast", "size", "quiet"],
)
def test_bytes_are_spent_only_where_the_metric_needs_them(goal: Goal, bound: float):
    pool = [narrowest()]
    search = tuning(goal, bound)
    search._by_layer(Mock(as_it_is=Mock(return_value=HALF)), Mock(), pool[0], pool)
    assert search._narrower_than_uniform.call_args[0][0] is pool[0]
    assert len(pool) == 1


def test_what_gains_next_to_nothing_stays_narrow():
    quiet = {**TABLE, "first": {"4": Entry(0.1, 0.4), "8": Entry(0.0, 0.8)}}
    assert eased(quiet, NARROW, 2.0) is None


@pytest.mark.parametrize(("narrow", "trains"), [(4, True), (1, False)])
def test_enough_has_to_be_narrow_to_be_trained(narrow: int, trains: bool):
    journal, passes = Journal(Mock(), Goal(metric_drop=0.5)), ({"pass": "quantize-static"},)
    choice = {str(i): "4" if i < narrow else "8" for i in range(6)}
    made = Candidate("mixed", Recipe(passes, 0), choice, *[Mock()] * 5, float_bytes=1)
    journal.skip("mixed, rounding reconstruct", "it may lose more than training wins back")
    search = Remedies(Mock(), Goal(metric_drop=0.5), journal, Mock())
    search.remedied = Mock(return_value="trained")  # type: ignore[method-assign]
    assert search.trained(made) == ("trained" if trains else made)
    assert bool(journal.not_tried) is not trains


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0.1, 9.0)] * 3), min_size=1, max_size=6), st.floats(0, 5))
def test_it_is_quieter_within_the_bytes(rows: list[tuple[float, float, float]], spare: float):
    table = {
        str(i): {"4": Entry(noise, cost), "8": Entry(noise / 256, cost + more), HALF: Entry(0, 0)}
        for i, (noise, cost, more) in enumerate(rows)
    }
    narrow = dict.fromkeys(table, "4")
    found = eased(table, narrow, spare)
    if found is not None:
        assert set(found.values()) <= {"4", "8"}
        assert cost_of(table, found) <= cost_of(table, narrow) + spare + 1e-9
        assert noise_of(table, found) < noise_of(table, narrow)
