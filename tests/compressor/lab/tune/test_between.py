"""What lies between the quietest candidate and the one at the limit, before anything is proved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from compressor.lab.tune.answer import Goal, Objective
from compressor.lab.tune.options import FLOAT, narrow_share
from compressor.lab.tune.solver import Entry, noise_of
from compressor.lab.tune.tuning import Tuning
from tests.compressor.lab.tune.test_nearer import LAYERS, RECIPE, TABLE, Bench

AT_THE_LIMIT = {n: "8" if i >= 2 else FLOAT for i, n in enumerate(LAYERS)}
QUIET = {n: "8" if i >= 12 else FLOAT for i, n in enumerate(LAYERS)}


def tuning(objective: Objective, rounds: int) -> tuple[Tuning, list[Any]]:
    bench: Any = Bench()
    bench.searched = lambda c: SimpleNamespace(bound=noise_of(TABLE, c.choice), stopped=False)
    journal = Mock(path=[])
    journal.is_late.return_value = False
    goal = Goal(metric_drop=0.5, minimize=objective, rounds=rounds)
    made = Tuning(bench, goal, Mock(), journal)
    made.table = TABLE
    made._learn = Mock()  # type: ignore[method-assign]
    pool = [bench.candidate(str(i), RECIPE, c) for i, c in enumerate((QUIET, AT_THE_LIMIT))]
    return made, pool


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_gap_above_the_smallest_is_filled(rounds: int):
    search, pool = tuning("size", rounds)
    quiet, limit = (c.bytes for c in pool)
    search._between(pool[0], pool)
    sizes = [c.bytes for c in pool[2:]]
    assert len(sizes) == min(rounds, 2)
    assert all(limit < size < quiet for size in sizes)
    assert len(set(sizes)) == len(sizes)
    bench: Any = search.bench
    assert bench.evaluations == 0


@pytest.mark.parametrize(("bound", "more"), [(0.45, 2), (0.2, 0), (0.7, 2)])
def test_the_gap_above_a_trained_recipe_at_the_limit_is_filled(bound: float, more: int):
    """4 bits with trained rounding were not proved by 0.02 points: 8 bits for all were left."""
    search, pool = tuning("size", 4)
    trained: Any = search.bench.candidate("trained", RECIPE, AT_THE_LIMIT)
    by_noise = search.bench.searched

    def found(candidate: Any) -> Any:
        own = SimpleNamespace(bound=bound, stopped=False)
        return own if candidate is trained else by_noise(candidate)

    search.bench.searched = found  # type: ignore[method-assign]
    search.remedies = Mock(remedied=Mock(return_value=trained))
    search._may_train = Mock(return_value=True)  # type: ignore[method-assign]
    search._last_to_train = Mock(return_value=None)  # type: ignore[method-assign]
    search._rounds = Mock()  # type: ignore[method-assign]
    search._narrower_than_uniform(pool[1], pool)
    made = [c for c in pool[2:] if c is not trained]
    assert trained in pool
    assert len(made) == more
    assert search._rounds.called == (bound > 0.5)
    assert all(pool[1].bytes < c.bytes < pool[0].bytes for c in made)


def test_no_gap_is_filled_above_one_that_is_very_likely_to_be_proved():
    search, pool = tuning("size", 4)
    safe = {n: "8" if i >= 9 else FLOAT for i, n in enumerate(LAYERS)}
    quiet = [pool[0], search.bench.candidate("safe", RECIPE, safe)]
    assert search._is_safe(quiet[1])
    search._between(quiet[0], quiet)
    assert len(quiet) == 2


def test_a_safer_recipe_is_no_second_candidate_of_what_there_is():
    search, pool = tuning("size", 4)
    loud = dict.fromkeys(LAYERS, "8")
    search.table = {n: {**TABLE[n], "8": Entry(0.0, 100.0)} for n in LAYERS}  # as far as it tells
    found: Any = Mock(return_value=SimpleNamespace(bound=9.0, stopped=False))
    search.bench.searched = found  # type: ignore[method-assign]
    pool.append(search.bench.candidate("loud", RECIPE, loud))
    search._safer(pool[0], pool)
    assert len(pool) == 3


def test_nothing_is_made_where_there_is_no_gap_or_no_size():
    search, pool = tuning("latency", 4)
    search._between(pool[0], pool)
    assert len(pool) == 2
    search, pool = tuning("size", 4)
    search._between(pool[0], pool[1:])
    assert len(pool) == 2
    loud = search.bench.candidate("loud", RECIPE, dict.fromkeys(LAYERS, "8"))
    found = [loud]
    search._between(pool[0], found)
    assert found == [loud]


@pytest.mark.parametrize(
    ("options", "share"), [("8844", 0.5), ("8888", 0.0), (("8", FLOAT, "stored", "4"), 0.25)]
)
def test_the_share_of_narrow_layers(options: Any, share: float):
    assert narrow_share(dict(enumerate(options))) == share  # type: ignore[arg-type]
