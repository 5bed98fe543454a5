"""What follows an answer that is not proved: the noise between it and what broke the limit."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from compressor.lab.tune.answer import Goal
from compressor.lab.tune.options import FLOAT
from compressor.lab.tune.proofs import Proofs
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.searched import Searched
from compressor.lab.tune.solver import Entry, noise_of
from compressor.lab.tune.tuning import Tuning
from compressor.lab.tune.watch import Watch

LAYERS = [f"layer{i}" for i in range(16)]
TABLE = {n: {FLOAT: Entry(0.0, 400.0), "8": Entry(2.0**-i, 100.0)} for i, n in enumerate(LAYERS)}
RECIPE = Recipe(({"pass": "quantize-static"},), 0)
LIMIT = 0.5


class Bench:
    """Candidates lose so much as their noise is, and few samples prove nothing."""

    evaluation_samples = 24

    def __init__(self) -> None:
        self.evaluations = 0
        self.watch = Watch()

    def candidate(self, name: str, recipe: Recipe, choice: Mapping[str, str]) -> Any:
        size = sum(TABLE[layer][option].cost for layer, option in choice.items())
        shared = {"name": name, "recipe": recipe, "choice": choice, "bytes": size}
        return SimpleNamespace(**shared, proof=None, verdict=None, size_ratio=0.5)

    def proved(self, candidate: Any) -> Any:
        drop = noise_of(TABLE, candidate.choice)
        candidate.proof = SimpleNamespace(drop=drop, ci95=(drop - 10, drop + 10))
        candidate.verdict = "unknown"
        self.evaluations += 1
        return candidate.proof


def tuning(bench: Any, rounds: int) -> Tuning:
    journal = Mock(path=[])
    journal.is_late.return_value = False
    made = Tuning(bench, Goal(metric_drop=LIMIT, rounds=rounds), Mock(), journal)
    made.table = TABLE
    bench.searched = Mock()
    made._learn = Mock()  # type: ignore[method-assign]
    return made


def test_without_a_table_nothing_is_nearer():
    """As where the time (--budget) has not sufficed for the noise of layers."""
    bench = Bench()
    search = tuning(bench, 2)
    search.table = {}
    quiet = {**dict.fromkeys(LAYERS, FLOAT), LAYERS[-1]: "8"}
    pool = [
        bench.candidate(name, RECIPE.with_choice(choice), choice)
        for name, choice in (("quiet", quiet), ("loud", dict.fromkeys(LAYERS, "8")))
    ]
    search.proofs._sequence(pool)
    search._nearer(pool)
    assert len(pool) == 2


@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_the_answer_nears_what_broke_the_limit(rounds: int):
    bench = Bench()
    search = tuning(bench, rounds)
    quiet = {**dict.fromkeys(LAYERS, FLOAT), LAYERS[-1]: "8"}
    pool = [
        bench.candidate(name, RECIPE.with_choice(choice), choice)
        for name, choice in (("quiet", quiet), ("loud", dict.fromkeys(LAYERS, "8")))
    ]
    search.proofs._sequence(pool)
    assert search.proofs.best is pool[0]
    assert search.proofs.is_open
    search._nearer(pool)
    best = search.proofs.best
    judged = [c for c in pool if c.proof is not None]
    kept = [c for c in judged if c.proof.drop <= LIMIT]
    assert best.bytes == min(c.bytes for c in kept)
    assert bench.evaluations == len(judged) <= 2 + rounds
    if rounds == 6:
        # Half of the limit is the noise of all layers but the first two.
        assert noise_of(TABLE, best.choice) > LIMIT / 4
        assert best.bytes < pool[0].bytes / 2


def test_what_is_proved_or_not_broken_is_left_alone():
    bench = Bench()
    search = tuning(bench, 4)
    whole = dict.fromkeys(LAYERS, FLOAT) | {LAYERS[-1]: "8"}
    only = bench.candidate("only", RECIPE.with_choice(whole), whole)
    search.proofs._sequence([only])
    search._nearer([only])
    assert search.proofs.best is only
    assert bench.evaluations == 1
    loud = dict.fromkeys(LAYERS, "8")
    other = bench.candidate("other", RECIPE.with_choice(loud), loud)
    proofs = Proofs(search.bench, search.goal, search.journal, Mock(), Mock(), best=only)
    only.verdict = "passed"
    proofs.follow(other)
    assert other.proof is None


def test_of_one_size_the_quietest_is_looked_at():
    bench: Any = Bench()
    search = tuning(bench, 0)
    choice = dict.fromkeys(LAYERS, "8")
    pool = [bench.candidate(name, RECIPE, choice) for name in ("loud", "quiet", "louder")]
    decibels = {"loud": 30.7, "quiet": 34.4, "louder": 30.0}
    bench.searched = lambda c: Searched(9, 0.1, 0.1, decibels[c.name])
    search.proofs.expected(pool)
    assert [c.name for c in pool if c.proof is not None] == ["quiet"]
