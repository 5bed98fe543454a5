"""Fixtures for tests of runs."""

import pytest

from compressor.run import timing
from tests.compressor.brief_timing import measured_block
from tests.compressor.run.played_clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that timing reads, at zero."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "_block", measured_block)
    return clock
