"""The time of a search: what does not fit is not begun, and what takes too long ends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.errors import SpecError
from compressor.lab.tune import watch
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.watch import CANDIDATE, TIME_WAS_UP, Watch
from compressor.lab.tune.workbench import Workbench
from tests.compressor.lab.tune.test_stored import project  # noqa: F401  # a fixture
from tests.compressor.lab.tune.test_tune import found, tuned
from tests.compressor.tiny_project import Project


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    seconds = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(watch, "time", clock)


@dataclass
class Clock:
    """Time that passes only when it is told to."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    return made


@pytest.mark.usefixtures("ticking")
def test_a_stage_ends_when_the_time_is_up():
    timer, done = Watch(), list[int]()
    timer.start(6.0)

    def work() -> None:
        with timer.stage("work", 9) as advance:
            for step in range(9):
                advance(step)
                done.append(step)

    with timer.over("make", ends=False):  # what an answer needs takes its time
        work()
    assert len(done) == 9
    with pytest.raises(SpecError, match="the time was up"), timer.over("make", ends=True):
        work()
    assert len(done) == 9 + 1
    work()  # nothing is watched outside


@pytest.mark.usefixtures("ticking")
def test_without_a_budget_nothing_ends():
    timer = Watch()
    timer.start(None)
    with timer.over("make", ends=True), timer.stage("work") as advance:
        advance(1)
    assert not timer.late_for(CANDIDATE)
    assert timer.left is None
    assert timer.number_of("prove", 5) == 5


def test_what_takes_longer_than_is_left_is_not_begun(clock: Clock):
    """With --budget 2m, a search took 5 minutes beside other work."""
    timer = Watch()
    timer.start(100.0)
    assert not timer.late_for(CANDIDATE)  # nothing is known yet
    for seconds in (20.0, 12.0):
        with timer.over("make", ends=True):
            clock.now += seconds
    assert not timer.late_for(CANDIDATE)
    timer.expect("prove", 8.0)  # from the search
    timer.expect("prove", 80.0)
    assert timer.left == 100.0 - 32.0 - 2 * 8.0
    clock.now = 75.0  # 25 are left, of which two proofs take 16
    assert timer.late_for(CANDIDATE) == (
        "it takes about 12 s, and 9 s were left beside the proofs (--budget)"
    )
    assert not timer.late_for({"prove": 1}, {})
    assert timer.number_of("prove", 5) == 3
    clock.now = 100.0
    assert timer.late_for({"prove": 1}, {}) == TIME_WAS_UP
    assert timer.number_of("prove", 5) == 1


def test_the_first_of_a_kind_also_does_the_float_models_part(clock: Clock):
    timer = Watch()
    timer.start(30.0)
    with timer.over("make", ends=False):
        clock.now += 18.0
    assert not timer.late_for(CANDIDATE)


def test_a_search_keeps_its_time(
    project: Project,  # noqa: F811
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each candidate takes ten seconds, its noise three, and each proof five."""
    run, table, proved = Workbench._run, Workbench.table, Workbench._evaluated

    def running(bench: Workbench, *args: Any) -> Any:
        clock.now += 10.0
        with bench.watch.stage("a pass"):
            return run(bench, *args)

    def measured(bench: Workbench, candidate: Candidate) -> Any:
        with bench.watch.over("noise", ends=False):
            clock.now += 3.0
        return table(bench, candidate)

    def judged(*args: Any) -> Any:
        clock.now += 5.0
        return proved(*args)

    monkeypatch.setattr(Workbench, "_run", running)
    monkeypatch.setattr(Workbench, "table", measured)
    monkeypatch.setattr(Workbench, "_evaluated", judged)
    ends = {
        12: "4 bits: it takes about 5 s, and 2 s were left beside the proofs (--budget)",
        16: "4 bits: stopped: the time was up (--budget)",
        25: "proof of 4 bits: the time was up (--budget)",
    }
    for seconds, why in ends.items():
        clock.now = 0.0
        result = tuned(project, "--max-metric-drop", "90", "--budget", f"{seconds}s")
        assert result.exit_code == 0, result.stderr
        document = found(project)
        assert document["chosen"]
        assert why in document["not_tried"]
        # One candidate and its proof are an answer's least, and a stage ends where it looks.
        assert clock.now <= max(seconds, 15.0) + 10.0 * (seconds == 16)


def test_an_answer_needs_one_candidate_however_long_it_takes(project: Project):  # noqa: F811
    """A budget that was up at once ended as if the spec had nothing to tune."""
    result = tuned(project, "--max-metric-drop", "30", "--budget", "0s")
    assert result.exit_code == 0, result.stderr
    assert [p["name"] for p in found(project)["points"]] == ["8 bits"]
    assert "4 bits: the time was up (--budget)" in found(project)["not_tried"]
