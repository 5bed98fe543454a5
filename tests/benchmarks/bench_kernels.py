"""Times of single kernels of ONNX Runtime on this CPU, beside what ``latency_facts`` says of them.

Each shape is one layer, as floats and as the pass quantizes it; a time is the least of many in ONNX
Runtime's profile, on one thread. Prints how far predictions are off, by kernel. No assertion on
time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.layers import layers_with_nodes
from compressor.lab.doctor import examine
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.latency_facts import AVX2, VNNI, Latency
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import statistics

pytestmark = benchmark()

ORT = PassContext(0, frozenset({"ort-cpu"}))
_RUNS = 60
_OF_PROFILE = 2.5  # microseconds that the profile adds to a kernel: one of no work shows 3 to 4
_LEAST = 5.0  # microseconds; shorter ones are told apart by the profile's clock no more

# Input and output channels, window, stride, groups and size of convolutions.
CONVOLUTIONS: list[tuple[int, int, int, int, int, tuple[int, ...]]] = [
    *((3, c, k, 2, 1, (224, 224)) for c, k in ((16, 3), (32, 3), (64, 7))),
    *((c, c, 3, 1, 1, (n, n)) for c, n in ((16, 32), (32, 16), (64, 8), (24, 56), (20, 40))),
    *((c, c, 3, 1, 1, (n, n)) for c, n in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *((c, o, 3, 2, 1, (n, n)) for c, o, n in ((16, 32, 32), (64, 128, 56))),
    *((c, o, 3, 1, 1, (n, n)) for c, o, n in ((6, 10, 40), (10, 16, 70), (1, 32, 56), (8, 8, 60))),
    *((c, o, 5, 1, 1, (n, n)) for c, o, n in ((12, 20, 28), (32, 64, 14), (8, 1, 60))),
    *((c, o, 1, 1, 1, (56, 56)) for c, o in ((16, 64), (64, 256), (256, 64), (96, 24))),
    *((c, o, 1, 1, 1, (28, 28)) for c, o in ((24, 88), (144, 32), (32, 192))),
    *((c, o, 1, 1, 1, (7, 7)) for c, o in ((160, 960), (960, 160), (512, 2048))),
    *((c, o, 1, 1, 1, (n, n)) for c, o, n in ((576, 96, 14), (16, 16, 112), (32, 16, 112))),
    *((c, c, 3, 1, g, (28, 28)) for c, g in ((64, 4), (128, 4), (128, 8), (128, 32), (96, 2))),
    *((c, c, 3, 1, c, (n, n)) for c, n in ((32, 112), (144, 56), (192, 28), (384, 14), (960, 7))),
    *((c, c, 3, 1, c, (n, n)) for c, n in ((88, 28), (16, 112), (24, 56), (8, 80))),
    *((c, c, 3, 2, c, (n, n)) for c, n in ((96, 112), (72, 56))),
    *((c, c, 5, 1, c, (n, n)) for c, n in ((240, 14), (672, 14), (96, 28), (120, 28))),
    *((c, c, 7, 1, c, (n, n)) for c, n in ((64, 56), (256, 14))),
    *((c, c, 3, 1, 1, (n,)) for c, n in ((64, 1002), (16, 500), (128, 100))),
    *((c, o, k, 1, 1, (n,)) for c, o, k, n in ((128, 64, 3, 32), (48, 48, 5, 200))),
    (64, 256, 1, 1, 1, (200,)),
    *((c, c, k, 1, c, (n,)) for c, k, n in ((256, 31, 130), (32, 9, 400), (64, 3, 1000))),
]  # fmt: skip
PRODUCTS = [  # rows, columns, outputs
    *((1, k, n) for k, n in ((256, 1000), (576, 1000), (1280, 1000), (512, 512), (2048, 512))),
    *((64, k, n) for k, n in ((128, 384), (384, 128), (384, 1536))),
    *((196, k, n) for k, n in ((192, 576), (192, 192), (768, 192))),
    (16, 128, 512), (128, 768, 768), (49, 1024, 256), (320, 120, 360), (256, 64, 64),
    (1000, 12, 48), (3136, 64, 256),
]  # fmt: skip
_FLOATS = ("Conv", "FusedConv", "Gemm", "MatMul")
_INTEGERS = ("QLinearConv", "QGemm", "MatMulIntegerToFloat")


def models() -> Iterator[tuple[ir.Model, Batch]]:
    """Yield networks of one layer, each with an input."""
    rng = np.random.default_rng(0)
    for channels, rows, window, stride, groups, size in CONVOLUTIONS:
        rank, pad = len(size), window // 2
        shape = ", ".join(map(str, size))
        after = ", ".join(str((n + 2 * pad - window) // stride + 1) for n in size)
        text = f"""(float[1, {channels}, {shape}] x) => (float[1, {rows}, {after}] y) {{
            y = Conv<kernel_shape = {[window] * rank}, pads = {[pad] * rank * 2},
                strides = {[stride] * rank}, group = {groups}>(x, w, b) }}"""
        weights = {"w": (rows, channels // groups, *[window] * rank), "b": (rows,)}
        yield graph(text, weights), {"x": rng.standard_normal((1, channels, *size), np.float32)}
    for count, columns, rows in PRODUCTS:
        x = rng.standard_normal((count, columns), np.float32)
        for kind, weights in (("Gemm", {"w": (columns, rows), "b": (rows,)}), ("MatMul", {})):
            given = ", ".join(["x", *(weights or ["w"])])
            text = f"""(float[{count}, {columns}] x) => (float[{count}, {rows}] y) {{
                y = {kind}({given}) }}"""
            yield graph(text, weights or {"w": (columns, rows)}), {"x": x}


def profiled(model: ir.Model, batch: Batch, folder: Path) -> dict[str, float]:
    """Return the least microseconds of each operator that a model of a few has."""
    path = folder / "model.onnx"
    ir.save(in_form_for("ort-cpu", model, "float32"), path)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for _ in range(_RUNS):
        session.run(None, batch)
    times = defaultdict[str, list[float]](list)
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            times[event["args"]["op_name"]].append(event["dur"] - _OF_PROFILE)
    return {name: min(found) for name, found in times.items()}


def facts_here() -> Latency:
    """Return the table of this CPU; skips where there is none."""
    features = examine().features
    if any("vnni" in feature or "amx" in feature for feature in features):
        return VNNI
    if "avx2" not in features:
        pytest.skip("there are facts of x86 CPUs with AVX2 only")
    return AVX2


def test_kernels(tmp_path: Path) -> None:
    facts = facts_here()
    declared = QuantizeStatic.model_validate(
        {"layers": [{"match": "*"}], "weights": {"rounding": "nearest"}, "prepare": "none"},
        strict=False,
    )
    errors = defaultdict[str, list[float]](list)
    rates = defaultdict[str, list[float]](list)
    for model, batch in models():
        adapted = declared.adapted(OnnxCarrier(model), ORT)
        after = declared.apply(adapted, ORT, statistics(declared, adapted, ORT, [batch])).carrier
        costs = CostModel(facts, typical_shapes(adapted.graph()))
        ((layer, node),) = layers_with_nodes(adapted.graph())
        (floating, _), (integer, _), _ = costs.kernels(node, layer)
        cost = costs.cost(node)
        floats = profiled(adapted.graph(), batch, tmp_path)
        integers = profiled(after.graph(), batch, tmp_path)
        for kernel, predicted, found, names in (
            (floating, cost.floating, floats, _FLOATS),
            (integer, cost.integer, integers, _INTEGERS),
        ):
            measured = sum(found.get(name, 0.0) for name in names)
            if measured >= _LEAST:
                errors[kernel].append(predicted / 1e3 / measured - 1)
        size = batch["x"].size
        if integers["QuantizeLinear"] >= 2 * _LEAST:
            rates["quantize"].append(integers["QuantizeLinear"] * 1e3 / size)
        if floats.get("ReorderInput", 0.0) >= 2 * _LEAST:
            rates["block_layout"].append(floats["ReorderInput"] * 1e3 / size)
    every = [error for found in errors.values() for error in found]
    rows = [
        [kernel, str(len(found)), f"{np.median(np.abs(found)):.1%}", f"{np.abs(found).max():.0%}"]
        for kernel, found in (*errors.items(), ("all", every))
    ]
    header = ["kernel", "shapes", "median error", "worst error"]
    show(f"Predicted times of kernels on CPUs {facts.title}, beside the measured", header, rows)
    rows = [
        [name, f"{np.median(found):.2f}", f"{getattr(facts, name):.2f}"]
        for name, found in rates.items()
    ]
    show("Nanoseconds for each element", ["", "measured", "table"], rows)
