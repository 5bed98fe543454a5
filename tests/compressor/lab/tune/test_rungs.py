"""Which shares of a network are tried, and on top of what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from compressor.errors import SpecError
from compressor.lab.tune.answer import Goal, Objective
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.structure import Structure

LIMIT, BYTES = 1.0, 1000
QUANTIZE = {"pass": "quantize-static"}


@dataclass(frozen=True)
class Made:
    """A candidate: what is known of it without being made."""

    name: str
    recipe: Recipe
    bytes: int
    bound: float
    milliseconds: float = 1.0
    decibels: float = 30.0
    choice: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_ratio(self) -> float:
        return self.bytes / BYTES

    @property
    def artifact(self) -> Any:
        return SimpleNamespace(exporter=SimpleNamespace(target="ort-cpu", format="onnx"))


def share_of(recipe: Recipe) -> float:
    """Return the share of the weights that a recipe leaves."""
    (share,) = recipe.passes[0].get("target", {"parameters": 1}).values()
    return float(share)


class Search:
    """A search in which what a share of the weights costs is a formula."""

    def __init__(
        self,
        loses: Callable[[float], float],
        *,
        rounds: int = 4,
        minimize: Objective = "size",
        latency: float | None = None,
        size_ratio: float | None = None,
        train: bool = False,
        overhead: int = 0,
    ):
        """Begin a search.

        Args:
            size_ratio: the size alone is limited.
            overhead: bytes that a low rank takes beside its share; no channels can be removed then.
        """
        self.loses, self.overhead = loses, overhead
        self.made: dict[str, Made] = {}
        journal = Mock(skipped=[])
        journal.is_late.return_value = False
        journal.excess = lambda c: c.size_ratio / size_ratio
        journal.skip = lambda what, why: journal.skipped.append(f"{what}: {why}")
        self.journal = journal
        bench: Any = SimpleNamespace(
            made=self.made,
            main=0,
            searched=lambda c: SimpleNamespace(bound=c.bound, stopped=False, sqnr_db=c.decibels),
            planned=self.planned,
            sqnr_behind=lambda *_: None,
            plan=SimpleNamespace(data={"training": SimpleNamespace(target="label")}),
        )
        bench.spec = SimpleNamespace(document=SimpleNamespace(value={"passes": [QUANTIZE]}))
        proofs: Any = SimpleNamespace(
            size=lambda c: c.bytes if minimize == "size" else c.milliseconds,
            loss=lambda c: (-c.decibels, c.bytes),
            time=lambda c: c.milliseconds,
            fits=lambda c: c.size_ratio <= size_ratio,
            is_fast=lambda c: latency is None or c.milliseconds <= latency,
        )
        limit = LIMIT if size_ratio is None else None
        goal = Goal(limit, size_ratio, latency, minimize, rounds, train=train)
        ahead = Mock()
        self.structure = Structure(bench, goal, journal, self.added, ahead, proofs)

    def planned(self, recipe: Recipe) -> Any:
        rank = recipe.passes[0]["pass"] == "low-rank"
        if self.overhead and not rank:
            raise SpecError("pass 'prune-structured'", "touches no layer", "leave it out")
        size = share_of(recipe) * BYTES + self.overhead
        return SimpleNamespace(exports=[SimpleNamespace(bytes=round(size))])

    def added(self, name: str, recipe: Recipe, choice: Mapping[str, str]) -> Any:
        share, size = share_of(recipe), self.planned(recipe).exports[0].bytes
        found = Made(name, recipe, size, self.loses(share), 0.5 * share, choice=choice)
        self.made[name] = found
        return found

    def shares(self, way: str) -> list[float]:
        """Return the shares that were made by one pass, in order."""
        of_way = [c for c in self.made.values() if c.recipe.passes[0]["pass"] == way]
        return [share_of(c.recipe) for c in of_way]

    def explore(self, *pool: Made) -> list[float]:
        """Explore, and return which shares of channels were made."""
        self.made.update({c.name: c for c in pool})
        self.structure.explore(pool)  # type: ignore[arg-type]
        return self.shares("prune-structured")


WHOLE = Made("4 bits", Recipe((QUANTIZE,), 0), BYTES, 0.1)


def test_what_loses_nothing_is_made_ever_smaller():
    """A network of 906,250 weights ended at a quarter, and kept its answers with a tenth."""
    assert Search(lambda _: 0.5).explore(WHOLE) == [0.8, 0.5, 0.25, 0.1]
    assert Search(lambda _: 0.5, rounds=9).explore(WHOLE) == [0.8, 0.5, 0.25, 0.1, 0.04]
    assert Search(lambda _: 0.5, rounds=0).explore(WHOLE) == []


@pytest.mark.parametrize(
    ("keeps", "tried"),
    [
        (0.95, [0.8, 0.89]),
        (0.85, [0.8, 0.89]),
        (0.7, [0.8, 0.5, 0.63, 0.71]),
        (0.55, [0.8, 0.5, 0.63, 0.56]),
        (0.2, [0.8, 0.5, 0.25, 0.1]),
    ],
)
def test_between_what_keeps_and_what_breaks_the_limit_lies_the_next(
    keeps: float, tried: list[float]
):
    assert Search(lambda share: 0.5 if share >= keeps else 2.0).explore(WHOLE) == tried


def test_nothing_lies_between_the_whole_and_what_is_far_past_the_limit():
    assert Search(lambda _: 5.0).explore(WHOLE) == [0.8]
    far = Search(lambda share: 0.5 if share > 0.7 else 5.0)
    assert far.explore(WHOLE) == [0.8, 0.5, 0.63, 0.71]


def test_low_rank_begins_where_fewer_channels_ended():
    search = Search(lambda share: 0.5 if share >= 0.25 else 2.0, rounds=3)
    assert search.explore(WHOLE) == [0.8, 0.5, 0.25]
    assert search.shares("low-rank") == [0.1]
    first = "80% of the weights by low rank, 4 bits: the file is not smaller (800 B)"
    assert first in search.journal.skipped


def test_low_rank_is_smaller_from_some_share_on():
    search = Search(lambda share: 0.5 if share >= 0.25 else 2.0, overhead=300)
    assert search.explore(WHOLE) == []
    assert search.shares("low-rank") == [0.5, 0.25, 0.1, 0.16]


def test_the_fastest_is_made_faster():
    """8 bits took 1.84 of the floats' time, and were what channels were removed from."""
    floats = Made("float, fused", Recipe((QUANTIZE,), 0, left_out=True), 4000, 0.0, 1.0, 130.0)
    mixed = Made("floats where faster", Recipe((QUANTIZE,), 0), 1500, 0.0, 0.98, 48.0)
    eights = Made("8 bits", Recipe((QUANTIZE,), 0), BYTES, 0.1, 1.84)
    search = Search(lambda _: 2.0, minimize="latency")
    search.explore(floats, mixed, eights)
    begun = [name for name in search.made if "% of the time" in name]
    assert begun
    assert all(name.endswith(", float, fused") for name in begun)
    fast = Made("8 bits", Recipe((QUANTIZE,), 0), BYTES, 0.1, 0.5)
    search = Search(lambda _: 2.0, minimize="latency")
    search.explore(floats, mixed, fast)
    begun = [name for name in search.made if "% of the time" in name]
    assert all(name.endswith(", 8 bits") for name in begun)


def test_what_takes_too_long_is_made_as_fast_as_asked_for():
    """Shares of the weights were removed, from the largest on, however slow what is left."""
    slow, fast = (
        Made(x, Recipe((QUANTIZE,), 0), 900 + i, 0.1, 0.9 - 0.4 * i) for i, x in enumerate("ab")
    )
    search = Search(lambda share: 0.5 if share >= 0.3 else 2.0, latency=0.4)
    assert search.explore(slow, fast) == [0.76, 0.5, 0.25, 0.35]
    assert all(
        "% of the time" in name
        for name in search.made
        if "low rank" not in name and name not in "ab"
    )
    search = Search(lambda _: 2.0, latency=0.4)
    assert search.explore(slow, fast) == [0.76]  # what is larger takes too long
    search = Search(lambda _: 0.5, latency=0.6)
    search.explore(slow, fast)
    assert all(" of the weights" in name for name in search.made if name not in "ab")
    assert all(name.endswith(", b") for name in search.made if name not in "ab")


@pytest.mark.parametrize(("bound", "basis"), [(0.5, "4 bits, qat"), (2.0, "8 bits")])
def test_what_is_trained_with_its_rounding_is_trained_with_fewer_channels(bound: float, basis: str):
    eights = Made("8 bits", Recipe((QUANTIZE,), 0), 2 * BYTES, 0.1)
    fours = Made("4 bits", Recipe((QUANTIZE,), 0), BYTES, 2.0)
    search = Search(lambda x: bound if x == 1 else 2.0 if x > 0.7 else 0.5, train=True)
    search.explore(eights, fours)
    assert search.made["4 bits, qat"].recipe.passes[0]["pass"] == "qat"
    distilled = [n for n in search.made if "distill" in n]
    assert distilled
    assert all(name.endswith(f"% of the weights, distill, {basis}") for name in distilled)
    first, second, *_ = search.made[distilled[0]].recipe.passes
    assert (first["pass"], second["pass"]) == ("prune-structured", "distill")


def test_what_is_trained_is_no_larger_than_what_keeps_the_limit_untrained():
    """Each trained share would have been of a file as large as the tenth that lost 1.1 points."""
    search = Search(lambda share: 0.5 if share >= 0.1 else 2.0, train=True)
    assert search.explore(WHOLE)[:4] == [0.8, 0.5, 0.25, 0.1]
    assert "4% of the weights, 4 bits: --rounds are used up" in search.journal.skipped
    distilled = [share_of(c.recipe) for n, c in search.made.items() if "distill" in n]
    assert distilled == [0.1, 0.05, 0.07, 0.08]  # the first is as large, and loses less


def test_nothing_slower_is_trained_than_what_keeps_the_limit_untrained():
    search = Search(lambda _: 0.5, minimize="latency", train=True)
    search.explore(WHOLE)
    distilled = [share_of(c.recipe) for n, c in search.made.items() if "distill" in n]
    assert distilled == [0.1, 0.05, 0.02]
    search = Search(lambda _: 2.0, minimize="latency", train=True)
    search.explore(WHOLE)
    assert any("60% of the time, distill" in name for name in search.made)


def test_of_a_size_alone_as_much_is_removed_as_it_takes():
    """54 % of the time took 0.308, and nothing was found for 0.3."""
    wide, narrow = (Made(x, Recipe((QUANTIZE,), 0), y, 0.1) for x, y in (("8", 1000), ("4", 700)))
    search = Search(lambda _: 0.5, size_ratio=0.5)
    assert search.explore(wide, narrow) == [0.68, 0.47]  # 0.68 of all takes 0.68 of the bytes
    assert "47% of the weights, 4" in search.made  # 8 bits would lose more weights
    search = Search(lambda _: 0.5, size_ratio=0.5, rounds=1)
    assert search.explore(wide, narrow) == [0.68]
    search = Search(lambda _: 0.5, size_ratio=0.8)
    assert search.explore(wide, narrow) == [0.76]
    assert "76% of the weights, 8" in search.made  # the other is small enough as it is


def test_rounding_is_not_trained_where_the_fewest_bits_suffice():
    search = Search(lambda share: 0.5 if share > 0.3 else 2.0, train=True)
    search.explore(WHOLE)
    assert "4 bits, qat" not in search.made
    assert "4 bits, qat: it is not needed" in search.journal.skipped
    distilled = [share_of(c.recipe) for n, c in search.made.items() if "distill" in n]
    assert distilled == [0.2]  # of more than 0.35 of the weights, the file is not smaller
