"""Fixtures for tests of runs."""

import pytest

from compressor.run.timing import timing
from tests.compressor.brief_timing import time_in_earnest
from tests.compressor.run.played_clock import Clock


@pytest.fixture
def in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time as a user's models are."""
    time_in_earnest(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, in_earnest: None) -> Clock:
    """Return the clock that timing reads, at zero."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock
