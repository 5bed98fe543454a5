"""Interleaved timing; clocks are played, so that nothing depends on the machine."""

from collections.abc import Callable

import numpy as np
import pytest

from compressor import timing
from compressor.timing import Latencies, measure
from compressor.types.tensors import Batch


class Clock:
    """A clock that only runs while a model runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    runtime = "played"

    def __init__(self, clock: Clock, seconds: Callable[[int], float], log: list[str], name: str):
        self.clock, self.seconds, self.log, self.name = clock, seconds, log, name
        self.runs = 0

    def run(self, batch: Batch) -> Batch:
        self.clock.now += self.seconds(self.runs)
        self.log.append(self.name)
        self.runs += 1
        return batch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


BATCH = {"x": np.zeros((4, 2))}


def test_percentiles_and_ratio(clock: Clock):
    runners = {n: Timed(clock, lambda _, s=s: s, [], n) for n, s in (("a", 0.002), ("b", 0.004))}
    times = measure(runners, BATCH)
    summary = times.summary("a")
    assert summary == {
        "batch": 4,
        "p50": pytest.approx(2),
        "p90": pytest.approx(2),
        "p99": pytest.approx(2),
        "rounds": 300,
    }
    ratio = times.ratio("b", "a")
    assert ratio["value"] == pytest.approx(2)
    assert ratio["ci95"] == pytest.approx([2, 2])


def test_warm_up_does_not_count_and_the_order_alternates(clock: Clock):
    log: list[str] = []
    runners = {n: Timed(clock, lambda run: 0.001 if run >= 5 else 9.0, log, n) for n in "ab"}
    times = measure(runners, BATCH)
    assert max(times.seconds["a"]) < 1
    assert log[:10] == ["a"] * 5 + ["b"] * 5
    assert log[10:18] == ["a", "b", "b", "a"] * 2


def test_slow_models_are_timed_a_few_times_and_no_longer(clock: Clock):
    runners = {n: Timed(clock, lambda _: 1.0, [], n) for n in "ab"}
    assert measure(runners, BATCH, budget=2.0).summary("a")["rounds"] == 15


def test_a_drift_of_the_machine_cancels_in_the_ratio(clock: Clock):
    runners = {n: Timed(clock, lambda run: 0.001 * 1.01**run, [], n) for n in "ab"}
    times = measure(runners, BATCH)
    assert times.summary("a")["p99"] > 2 * times.summary("a")["p50"]
    ratio = times.ratio("a", "b")
    assert ratio["value"] == pytest.approx(1)
    assert ratio["ci95"] == pytest.approx([1, 1])


def test_a_model_is_as_fast_as_itself():
    noise = np.random.default_rng(0).lognormal(sigma=0.3, size=(2, 200))
    times = Latencies(1, {"a": noise[0], "b": noise[1]})
    low, high = times.ratio("a", "b")["ci95"]
    assert low < 1 < high
    # Standard error of a median of 200: 1.25 * 0.3 * sqrt(2) / sqrt(200); twice 1.96 of these.
    assert high - low == pytest.approx(0.147, rel=0.3)


def test_the_interval_is_the_same_each_time():
    times = Latencies(1, {n: np.random.default_rng(i).random(20) + 1 for i, n in enumerate("ab")})
    assert times.ratio("a", "b") == times.ratio("a", "b")
    low, high = times.ratio("a", "b")["ci95"]
    assert low <= times.ratio("a", "b")["value"] <= high
    assert low < high
