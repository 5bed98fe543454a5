"""Clocks that are played, so that tests of timing do not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from compressor.run.timing.timing import Opener, already_open
from compressor.types.tensors import Batch

Seconds = Callable[[Batch], float]


BATCH = {"x": np.zeros((4, 2))}


class Clock:
    """Clocks that only run while a model runs or opens.

    Attributes:
        away: seconds that other processes had the processor.
        elsewhere: seconds on the processor of other threads of this process.
        slice: seconds until other processes have it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.away = 0.0
        self.elsewhere = 0.0
        self.load = 0.0
        self.slice = 0.0

    def perf_counter(self) -> float:
        return self.now + self.away

    def thread_time(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now + self.elsewhere


class Timed:
    runtime = "played"

    def __init__(self, clock: Clock, seconds: Seconds):
        self.clock, self.seconds = clock, seconds

    def run(self, batch: Batch) -> Batch:
        self.clock.now += self.seconds(batch)
        return batch


def steady(clock: Clock, **seconds: float) -> dict[str, Opener]:
    return already_open({n: Timed(clock, lambda _, s=s: s) for n, s in seconds.items()})
