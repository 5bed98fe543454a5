"""How often the interval of a model's latency beside its own contains 1; a table, no assertions."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.models.onnx.ort_runner import OrtRunner
from compressor.run.timing import already_open, measure
from compressor.types.tensors import Batch
from tests.benchmarks.bench_resnet20 import show

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

RUNS = 100
BUDGET = 2.0


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


MODELS = {
    "6 linear layers of 512": (("MatMul", (512, 512), 6), (1, 512)),
    "6 convolutions of 64, 32x32": (("Conv", (64, 64, 3, 3), 6), (1, 64, 32, 32)),
}


def test_a_model_beside_itself(tmp_path: Path):
    rows = []
    for name, (built, shape) in MODELS.items():
        path = tmp_path / "model.onnx"
        onnx.save(stack(*built), path)
        batch = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        rows += [
            [name, str(threads), *counted(path, threads, batch, reopened)]
            for threads, reopened in product((1, 2), (True, False))
        ]
    show(
        f"A model beside itself, {RUNS} runs of {BUDGET:g} s at most",
        ["model", "threads", "sessions", "p50 ms", "hold 1", "half width %", "s a run"],
        rows,
    )


def counted(path: Path, threads: int, batch: Batch, reopened: bool) -> list[str]:
    """Measure so often, in new sessions or in two that stay open for a whole measurement."""
    held, halves, typical = 0, [], []
    begin = time.perf_counter()
    for _ in range(RUNS):

        def opener() -> OrtRunner:
            return OrtRunner(path, "model", threads)

        models = {"base": opener, "again": opener}
        if not reopened:
            models = already_open({name: opener() for name in models})
        times = measure(models, [batch], BUDGET)
        low, high = times.ratio("again", "base")["ci95"]
        held += low <= 1 <= high
        halves.append((high - low) / 2)
        typical.append(times.summary("base")["p50"])
    return [
        "reopened" if reopened else "two",
        f"{np.median(typical):.3f}",
        f"{held} of {RUNS}",
        f"{100 * np.median(halves):.2f}",
        f"{(time.perf_counter() - begin) / RUNS:.2f}",
    ]
