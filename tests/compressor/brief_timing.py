"""Played times for tests of what runs do; how long models take is asked in tests of timing.

A small model runs 200 times in a block of the usual length, and those runs were a third of the
processor's time of a run in the tests. And on a busy machine, a few short blocks of a small model
may show any ratio: then a limit of latency that no test had set failed one run of many.
"""

import numpy as np
import pytest

from compressor.run.timing import timing
from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch


def steady_block(runner: Runner, batch: Batch, runs: int) -> Array:
    """Run a model so many times; return ``[runs, 2]`` as if each had taken the same.

    That is 0.98 ms, of which sums are exact, or what the runner states as ``seconds``.
    """
    for _ in range(runs):
        runner.run(batch)
    return np.full((runs, 2), getattr(runner, "seconds", 2**-10))


BRIEF = {"_BUDGET": 0.0, "_LEAST_OPENINGS": 2, "_BLOCK": 0.0, "_block": steady_block}
"""The names in ``timing`` with what they become: two openings, one run a block, equal times."""

MEASURED = {name: getattr(timing, name) for name in BRIEF}
"""What the names stand for in earnest; for tests of timing."""


def time_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let runs time their models in a moment, and find that all take the same."""
    for name, value in BRIEF.items():
        patch.setattr(timing, name, value)


def time_in_earnest(patch: pytest.MonkeyPatch) -> None:
    """Let models be timed as a user's are."""
    for name, value in MEASURED.items():
        patch.setattr(timing, name, value)
