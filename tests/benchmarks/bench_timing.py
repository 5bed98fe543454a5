"""Ratios of models whose costs are known, on a machine with other work; a table, no assertions.

A model is timed beside models that cost 0, 5, 20 and 100 % more, while processes that never wait
want the same cores. The intervals are narrow, so the truth must be exact, and twice the layers is
not twice the time: a call of the runtime, and a change of the memory layout at its ends, come once
however many layers there are. So all models are the same small session, and a run of a model is a
number of runs of the session: 20, 21, 24 or 40. Whatever a run of the session costs is in the ratio
as often as the session runs. ``REPETITIONS`` in the environment shortens it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.threads import on_threads
from compressor.run.timing.timing import Latencies, measure
from compressor.run.verdicts.verdicts import WIDEST_RATIO, verdict_of
from compressor.types.tensors import Batch
from tests.benchmarks.bench_resnet20 import show

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(14400)]

REPETITIONS = int(os.environ.get("REPETITIONS", "50"))
LOADS = (0, 2, 8, 16)
RUNS = 20  # of the session, in a run of the base: some 2 ms
EXTRA = (0, 1, 4, 20)  # 0, 5, 20 and 100 %
LAYERS = 4
IMAGE = (1, 16, 32, 32)
# Half of them only compute, half go through 8 MB of memory as well; they end with their parent.
_UNTIL = "import os\nparent = os.getppid()\na = bytearray(1 << 23)\nwhile os.getppid() == parent:\n"
BUSY = (
    _UNTIL + " for _ in range(100_000): pass",
    _UNTIL + " for _ in range(100): a[::64] = a[::64]",
)


class Repeated:
    """A model whose run is so many runs of one session."""

    def __init__(self, path: Path, runs: int):
        self._session = OrtRunner(path, "session")
        self._runs = runs
        self.runtime = self._session.runtime

    def run(self, batch: Batch) -> Batch:
        """Run the session as often; return what its last run gives."""
        for _ in range(self._runs):
            outputs = self._session.run(batch)
        return outputs


def stack(layers: int) -> onnx.ModelProto:
    """Build a network of equal convolutions with ReLU between."""
    rng = np.random.default_rng(0)
    channels = IMAGE[1]
    nodes, weights, last = [], [], "x"
    for i in range(layers):
        values = rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{i}"))
        nodes.append(helper.make_node("Conv", [last, f"w{i}"], [f"y{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"r{i}"]))
        last = f"r{i}"
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, IMAGE) for name in ("x", last)]
    graph = helper.make_graph(nodes, "stack", value[:1], value[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many processes busy."""
    started = [
        subprocess.Popen([sys.executable, "-c", BUSY[i % 2]], stderr=subprocess.DEVNULL)
        for i in range(processes)
    ]
    time.sleep(1.0)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_known_costs_under_load(tmp_path: Path):
    batch = {"x": np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)}
    path = tmp_path / "session.onnx"
    onnx.save(stack(LAYERS), path)
    rows = []
    total: Counter[tuple[int, str]] = Counter()
    for processes in LOADS:
        before = os.getloadavg()[0]
        with load(processes):
            for extra in EXTRA:
                models = {
                    "base": partial(Repeated, path, RUNS),
                    "other": partial(Repeated, path, RUNS + extra),
                }
                begin = time.perf_counter()
                with on_threads(1):
                    done = [measure(models, [batch]) for _ in range(REPETITIONS)]
                seconds = (time.perf_counter() - begin) / REPETITIONS
                counts = counted(done, 1 + extra / RUNS)
                total.update({(extra, name): count for name, count in counts.items()})
                row = [str(processes), f"{100 * extra // RUNS} %", *typical(done)]
                row += [*map(str, counts.values()), f"{seconds:.1f}"]
                rows.append(row)
                print(*row, f"load average before {before:.1f}", sep=" | ", flush=True)
    headings = ["processes", "extra", "p50 ms", "cpu ms", "away", "openings", "median ratio"]
    headings += ["half width %", *counts, "s"]
    show(f"A model beside one of known cost, {REPETITIONS} times, one thread", headings, rows)
    held = sum(total[extra, "hold the truth"] for extra in EXTRA)
    each = len(LOADS) * REPETITIONS
    print(f"{held} of {each * len(EXTRA)} intervals hold the truth")
    print(f"+20 %: passed {total[4, 'passed']} of {each}; itself: failed {total[0, 'failed']}")


def counted(done: Sequence[Latencies], truth: float) -> dict[str, int]:
    """Count the intervals that hold the truth, and the verdicts at the limit 1."""
    bounds = [times.ratio("other", "base")["ci95"] for times in done]
    verdicts = [verdict_of((low, high), 1.0, WIDEST_RATIO) for low, high in bounds]
    held = sum(low <= truth <= high for low, high in bounds)
    names = ("passed", "failed", "unknown")
    return {"hold the truth": held, **{name: verdicts.count(name) for name in names}}


def typical(done: Sequence[Latencies]) -> list[str]:
    """Return what the measurements have been like, as medians over them."""
    summaries = [times.summary("base") for times in done]
    p50, cpu, away, openings = (
        float(np.median([summary[key] for summary in summaries]))
        for key in ("p50", "cpu_ms", "waiting", "openings")
    )
    ratios = [times.ratio("other", "base") for times in done]
    widths = [(r["ci95"][1] - r["ci95"][0]) / r["value"] for r in ratios]
    return [
        f"{p50:.2f}",
        f"{cpu:.2f}",
        f"{100 * away:.0f} %",
        f"{openings:.0f}",
        f"{np.median([r['value'] for r in ratios]):.4f}",
        f"{50 * np.median(widths):.2f}",
    ]
