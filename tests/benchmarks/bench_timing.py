"""Ratios of models whose costs are known, on a machine with other work; a table, no assertions.

A network is timed beside itself and beside copies with more of the same layers, while processes
that never wait want the same cores. ``REPETITIONS`` in the environment shortens it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.models.onnx.ort_runner import OrtRunner
from compressor.models.threads import on_threads
from compressor.run.timing import measure
from compressor.run.verdicts import WIDEST_RATIO, verdict_of
from compressor.types.tensors import Batch
from tests.benchmarks.bench_resnet20 import show

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(7200)]

REPETITIONS = int(os.environ.get("REPETITIONS", "50"))
LOADS = (0, 2, 8, 16)
LAYERS = 20
EXTRA = (0, 1, 4, 20)  # 0, 5, 20 and 100 %
# Layers take so long that what a run costs apart from them shows little in the ratios.
IMAGE = (1, 16, 64, 64)
# Half of them only compute, half go through 8 MB of memory as well.
BUSY = ("while True: pass", "a = bytearray(1 << 23)\nwhile True: a[::64] = a[::64]")


def stack(operator: str, shape: tuple[int, ...], layers: int) -> onnx.ModelProto:
    """Build a network of equal layers with ReLU between; ``shape`` is that of the weights."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    image = len(shape) > 2
    options = {"pads": [1, 1, 1, 1]} if image else {}
    for i in range(layers):
        values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{i}"))
        nodes.append(helper.make_node(operator, [last, f"w{i}"], [f"y{i}"], **options))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"r{i}"]))
        last = f"r{i}"
    ends = ["height", "width"] if image else []
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", shape[0], *ends])
        for name in ("x", last)
    ]
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
    paths = []
    for extra in EXTRA:
        paths.append(tmp_path / f"{extra}.onnx")
        onnx.save(stack("Conv", (16, 16, 3, 3), LAYERS + extra), paths[-1])
    rows = []
    for processes in LOADS:
        before = os.getloadavg()[0]
        with load(processes):
            for extra, path in zip(EXTRA, paths, strict=True):
                row = counted(paths[0], path, batch, 1 + extra / LAYERS)
                rows.append([str(processes), f"{100 * extra // LAYERS} %", *row])
                print(*rows[-1], f"load average before {before:.1f}", sep=" | ", flush=True)
    headings = ["processes", "extra", "p50 ms", "cpu ms", "away", "median ratio", "half width %"]
    headings += ["hold the truth", "passed", "failed", "unknown", "openings", "s"]
    title = f"A model beside one of known cost, {REPETITIONS} times, one thread"
    show(title, headings, rows)


def counted(base: Path, other: Path, batch: Batch, truth: float) -> list[str]:
    """Measure so often, as a run does; count the intervals that hold, and the verdicts."""
    models = {"base": partial(OrtRunner, base, "base"), "other": partial(OrtRunner, other, "other")}
    begin = time.perf_counter()
    with on_threads(1):
        done = [measure(models, [batch]) for _ in range(REPETITIONS)]
    seconds = (time.perf_counter() - begin) / REPETITIONS
    ratios = [times.ratio("other", "base") for times in done]
    bounds = [(ratio["ci95"][0], ratio["ci95"][1]) for ratio in ratios]
    verdicts = [verdict_of(interval, 1.0, WIDEST_RATIO) for interval in bounds]
    summaries = [times.summary("base") for times in done]
    p50, cpu, away, openings = (
        float(np.median([summary[key] for summary in summaries]))
        for key in ("p50", "cpu_ms", "waiting", "openings")
    )
    return [
        f"{p50:.2f}",
        f"{cpu:.2f}",
        f"{100 * away:.0f} %",
        f"{np.median([ratio['value'] for ratio in ratios]):.3f}",
        f"{50 * np.median([high - low for low, high in bounds]) / truth:.2f}",
        f"{sum(low <= truth <= high for low, high in bounds)} of {REPETITIONS}",
        *(str(verdicts.count(verdict)) for verdict in ("passed", "failed", "unknown")),
        f"{openings:.0f}",
        f"{seconds:.1f}",
    ]
