"""What a terminal shows of a stage: how far it is, what it says, and the time that is left."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from compressor.cli.options import TerminalProgress, columns, shown_progress
from compressor.progress import Silent


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
