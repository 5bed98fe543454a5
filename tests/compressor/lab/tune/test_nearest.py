"""What comes nearest to limits that nothing keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from compressor.lab.tune.answer import Goal
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.watch import Watch


def candidate(name: str, size: float, time: float, bound: float) -> Any:
    latency = {"value": time, "ci95": (time, time)}
    return SimpleNamespace(
        name=name, bytes=1000 * size, size_ratio=size, latency=latency, bound=bound, proof=None
    )


def judged(one: Any) -> None:
    one.proof = SimpleNamespace(drop=one.bound / 2, ci95=(0.0, one.bound))


def nearest(goal: Goal, pool: list[Any]) -> str:
    bench = Mock(
        searched=lambda c: SimpleNamespace(bound=c.bound),
        timed=lambda c: c.latency,
        proved=judged,
        plan=SimpleNamespace(metric=SimpleNamespace(unit="%")),
        watch=Watch(),
    )
    return Journal(bench, goal)._infeasible(pool)


@pytest.mark.parametrize("proved", [True, False])
def test_what_keeps_the_metrics_limit_is_named_beside_what_fits(proved: bool):
    """A recipe of 0.302 of the time was left out, and one that loses 2.25 points was named."""
    whole = candidate("whole", 0.3, 0.5, 0.1)
    slow = candidate("slow", 0.14, 0.302, 0.6)
    fits = candidate("fits", 0.05, 0.21, 2.5)
    if proved:
        judged(fits)
    words = nearest(Goal(1.0, latency_ratio=0.3), [whole, slow, fits])
    assert "loses at most 1.00 points and takes at most 0.3 of the time" in words
    assert "0.302 of the time" in words
    assert "0.21 of the time" in words
    assert "whole" not in words
    assert words.count(" of the bytes and ") == 2


def test_of_a_metric_alone_what_was_judged_is_the_nearest():
    least, smallest = candidate("least", 0.3, 0.5, 2.0), candidate("smallest", 0.1, 0.5, 90.0)
    judged(least)
    words = nearest(Goal(1.0), [least, smallest])
    assert words.endswith(
        "the nearest: least: 300 B, loses 1.00 points (95 % CI 0.00 to 2.00) at 0.3 of the bytes"
    )


@pytest.mark.parametrize(
    ("needed", "about"), [(2010, 2100), (2000, 2000), (87, 87), (11234, 12000)]
)
def test_as_many_samples_as_there_are_do_not_prove_more(needed: int, about: int):
    """About 2000 samples would show it, it said, and there are 2000."""
    bench: Any = Mock(searched=lambda _: SimpleNamespace(drop=0.1))
    bench.plan.metric.unit = "%"
    journal = Journal(bench, Goal(0.5))
    journal.more_samples("it", candidate("whole", 0.3, 0.5, 0.1), needed, 2000)
    (line,) = journal.path
    assert f"about {about} evaluation samples would show" in line
