"""Fixtures for tests of runs."""

import pytest

from compressor.run import timing
from tests.compressor.run.played_clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that timing reads, at zero."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock
