"""The time of a search ends candidates that are being made."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from compressor.errors import SpecError
from compressor.lab.tune import watch
from compressor.lab.tune.watch import Watch
from tests.compressor.lab.tune.test_stored import project  # noqa: F401  # a fixture
from tests.compressor.lab.tune.test_tune import found, tuned
from tests.compressor.tiny_project import Project


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second."""
    seconds = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(watch, "time", clock)


@pytest.mark.usefixtures("ticking")
def test_a_stage_ends_when_the_time_is_up():
    timer, done = Watch(), list[int]()
    timer.start(2.0)

    def work() -> None:
        with timer.stage("work", 9) as advance:
            for step in range(9):
                advance(step)
                done.append(step)

    with timer.over(False):  # what an answer needs takes its time
        work()
    assert len(done) == 9
    with pytest.raises(SpecError, match="the time was up"), timer.over(True):
        work()
    assert len(done) == 9
    work()  # nothing is watched outside


@pytest.mark.usefixtures("ticking")
def test_without_a_budget_nothing_ends():
    timer = Watch()
    timer.start(None)
    with timer.over(True), timer.stage("work") as advance:
        advance(1)
    assert not timer.is_up


@pytest.mark.usefixtures("ticking")
def test_a_candidate_ends_inside_and_what_there_is_is_proved(project: Project):  # noqa: F811
    result = tuned(project, "--max-metric-drop", "30", "--budget", "5s")
    assert result.exit_code == 0, result.stderr
    document = found(project)
    assert [p["name"] for p in document["points"]] == ["8 bits"]
    assert document["chosen"] == "8 bits"
    ended = "4 bits: stopped: the time was up (--budget)"
    assert ended in document["not_tried"]


def test_an_answer_needs_one_candidate_however_long_it_takes(project: Project):  # noqa: F811
    """A budget that was up at once ended as if the spec had nothing to tune."""
    result = tuned(project, "--max-metric-drop", "30", "--budget", "0s")
    assert result.exit_code == 0, result.stderr
    assert [p["name"] for p in found(project)["points"]] == ["8 bits"]
    assert "4 bits: the time was up (--budget)" in found(project)["not_tried"]
