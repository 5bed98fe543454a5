"""Nanoseconds an element that the observers take, beside numpy.histogram."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from compressor.calibration.observers.ranges import Entropy, MinMax, MovingAverage, Mse, Percentile

BATCH = (32, 16, 32, 32)  # an activation of ResNet-20
BATCHES = 8
REPEATS = 5


def best(function: Callable[[], object]) -> float:
    """Return the least seconds of some calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.benchmark
def test_observers(capsys):
    random = torch.Generator().manual_seed(0)
    normal = [torch.randn(BATCH, generator=random) for _ in range(BATCHES)]
    data = {"normal": normal, "relu": [batch.relu() for batch in normal]}
    lines = [f"{'':16}" + "".join(f"{kind + ' ns':>12}{'result ms':>12}" for kind in data)]
    for cls in (MinMax, MovingAverage, Percentile, Entropy, Mse):
        line = f"{cls.name:16}"
        for batches in data.values():
            observer = cls()
            state = observer.start()
            for batch in batches:
                state = observer.update(state, batch)

            def update(observer=observer, state=state, batches=batches):
                for batch in batches:
                    observer.update(state, batch)

            each = best(update) / sum(batch.numel() for batch in batches) * 1e9
            found = best(lambda observer=observer, state=state: observer.result(state)) * 1e3
            line += f"{each:12.2f}{found:12.2f}"
        lines.append(line)
    for bins in (128, 2048):
        line = f"np.histogram {bins:<3}"
        for batches in data.values():
            arrays = [batch.numpy() for batch in batches]

            def histogram(arrays=arrays, bins=bins):
                for array in arrays:
                    np.histogram(array, bins)

            line += f"{best(histogram) / sum(a.size for a in arrays) * 1e9:12.2f}{'':12}"
        lines.append(line)
    with capsys.disabled():
        print("", *lines, sep="\n")
