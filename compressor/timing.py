"""Latency, measured side by side so that ratios hold on a noisy machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch

_WARM_UP = 5
_MOST_ROUNDS = 300
_LEAST_ROUNDS = 15
_RESAMPLES = 1000


@dataclass(frozen=True)
class Latencies:
    """Times of interleaved rounds.

    Attributes:
        batch: samples in a run.
        seconds: one time a round for each name, ``[rounds]``; rounds pair across names.
    """

    batch: int
    seconds: Mapping[str, Array]

    def summary(self, name: str) -> dict[str, Any]:
        """Percentiles in milliseconds for one run of the batch."""
        p50, p90, p99 = np.percentile(self.seconds[name] * 1e3, [50, 90, 99])
        return {
            "batch": self.batch,
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "rounds": int(self.seconds[name].size),
        }

    def ratio(self, name: str, base: str) -> dict[str, Any]:
        """Median of the ratios round by round, with its 95 % bootstrap interval."""
        pairs = self.seconds[name] / self.seconds[base]
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, pairs.size, size=(_RESAMPLES, pairs.size))
        low, high = np.percentile(np.median(pairs[drawn], axis=1), [2.5, 97.5])
        return {"value": float(np.median(pairs)), "ci95": [float(low), float(high)]}


def measure(runners: Mapping[str, Runner], batch: Batch, budget: float = 2.0) -> Latencies:
    """Time several models in turn on the same batch.

    Each round runs every model once, in an order that alternates, so that drift of the machine's
    speed and what a model leaves in the caches touch all alike.

    Args:
        runners: the models by name.
        batch: what each runs.
        budget: seconds for all rounds together; at least 15 rounds are run whatever they take.
    """
    names = list(runners)
    for name in names:
        for _ in range(_WARM_UP):
            runners[name].run(batch)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for index in range(_MOST_ROUNDS):
        if index >= _LEAST_ROUNDS and time.perf_counter() - start > budget:
            break
        for name in names if index % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            runners[name].run(batch)
            times[name].append(time.perf_counter() - begin)
    size = len(next(iter(batch.values())))
    return Latencies(size, {name: np.asarray(t) for name, t in times.items()})
