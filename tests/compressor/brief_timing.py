"""Timing in a moment, for tests of what runs do; how long models take is asked in tests of timing.

A small model runs 200 times in a block of the usual length, and those runs were a third of the
processor's time of a run in the tests.
"""

import pytest

from compressor.run import timing

BRIEF = {"_BUDGET": 0.0, "_LEAST_OPENINGS": 2, "_BLOCK": 0.0}
"""The names in ``timing`` with what they become: two openings, and one run a block."""


def time_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let runs time their models in a moment."""
    for name, value in BRIEF.items():
        patch.setattr(timing, name, value)
