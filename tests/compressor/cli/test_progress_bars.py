"""What a terminal shows of a stage: how far it is, what it says, and the time that is left."""

from __future__ import annotations

import io
import re
import time
from contextlib import redirect_stderr

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from compressor.cli import options
from compressor.cli.options import TerminalProgress, columns, shown_progress
from compressor.progress import Silent, Steps


class Clock:
    """A clock that tests turn on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bars(clock: Clock) -> Bars:
    console = Console(file=io.StringIO(), width=120)
    return Bars(*columns(), console=console, auto_refresh=False, get_time=clock)


def line(bars: Bars) -> str:
    with bars.console.capture() as captured:
        bars.console.print(bars.get_renderable())
    return re.sub(r"[━╸╺\s]+", " ", captured.get()).strip()


def test_a_stage_shows_its_text_and_the_time_left(bars: Bars, clock: Clock):
    with TerminalProgress(bars).stage("finetune", 1000) as advance:
        assert line(bars) == "finetune 0:00:00"
        for step in range(5):
            clock.now = float(step)
            advance(100 * step, f"loss {1 / (step + 1):.2f} [b]")
        assert line(bars) == "finetune 400/1,000 loss 0.20 [b] 0:00:04 0:00:06 left"
        advance(500)
        assert "loss" not in line(bars)
    assert line(bars) == ""


def test_without_a_total_there_is_no_time_left(bars: Bars, clock: Clock):
    with TerminalProgress(bars).stage("read the data") as advance:
        for step in range(4):
            clock.now = float(step)
            advance(2000 * step, "of many")
        assert line(bars) == "read the data 6,000 of many 0:00:03"


def test_nothing_is_shown_where_nobody_looks():
    with shown_progress() as progress:  # no terminal in tests
        assert isinstance(progress, Silent)
        with progress.stage("finetune", 3) as advance:
            advance(1)
            advance(2, "loss 1")


def test_a_pipe_gets_a_line_for_each_stage_of_a_run(capsys: pytest.CaptureFixture[str]):
    with shown_progress(lines=True) as progress:
        steps = Steps(progress, 9)
        with steps.stage("plan"):
            pass
        for stage in ("evaluate the float model", "fuse"):
            steps.begin()
            # Libraries are run with another stderr; lines still come out.
            with redirect_stderr(io.StringIO()) as swallowed, steps.stage(stage, 3) as advance:
                advance(1)
            assert not swallowed.getvalue()
        steps.note("resumes at step 100")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "plan  0.0 s",
        "step 1 of 9: evaluate the float model  0.0 s",
        "step 2 of 9: fuse  0.0 s",
        "resumes at step 100",
    ]
    with (
        pytest.raises(KeyboardInterrupt),
        shown_progress(lines=True) as progress,
        progress.stage("interrupted"),
    ):
        raise KeyboardInterrupt
    with shown_progress(enabled=False, lines=True) as progress, progress.stage("fuse"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_the_step(bars: Bars, clock: Clock):
    steps = Steps(TerminalProgress(bars), 9)
    steps.begin()
    with steps.stage("fuse", 10) as advance:
        clock.now = 1.0
        advance(1)
        clock.now = 3.0
        advance(5)
        assert line(bars) == "step 1 of 9: fuse 5/10 0:00:03 0:00:03 left"


def test_the_clock_moves_while_a_library_has_another_stderr(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with shown_progress() as progress, redirect_stderr(io.StringIO()) as swallowed:
        with progress.stage("plan"):
            pass
        progress.note("a line")
        assert not swallowed.getvalue()
    assert "a line" in terminal.getvalue()


def test_a_pipe_gets_lines_of_a_stage_that_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Channels were chosen for a quarter of an hour without a line."""
    monkeypatch.setattr(options, "_SECONDS", 0.02)

    def some(count: int) -> set[str]:
        lines: list[str] = []
        ends = time.monotonic() + 60
        while len(lines) < count and time.monotonic() < ends:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
        return {re.sub(r"\d+ s$", "N s", line) for line in lines}

    with shown_progress(lines=True) as progress, progress.stage("prune"):
        assert some(2) == {"prune  N s"}
        with progress.stage("solve", 4000) as advance:
            some(1)
            advance(1000, "block 1")
            assert "solve  1,000/4,000  block 1  N s" in some(3)
            assert not any("prune" in line for line in some(3))
        assert "prune  N s" in some(3)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
