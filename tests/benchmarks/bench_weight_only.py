"""Bytes, latency and error of weight-only files in ONNX Runtime on the CPU.

A stack of four Llama-like blocks without attention (RMS norm, gate, up, SiLU, down, residual),
one token and 64 at a time. "Q/DQ" is the graph as the pass leaves it, in a session with default
options; the other rows are what the exporter writes. All files are timed in turn, and the least of
several rounds is shown. The error is that of the output against the dequantized model in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compressor.exporters import OnnxExporter
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import open_module
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import Array, TensorSpec
from tests.compressor.exporters.hand_made import CONTEXT

WIDTH, HIDDEN, BLOCKS = 1024, 2816, 4
TOKENS = (1, 64)
ROUNDS = 5
ENOUGH = 0.03  # seconds that a variant is timed for in a round, at least once


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def rounded(carrier: OnnxCarrier, scheme: Scheme) -> OnnxCarrier:
    """Return the stack with all weights rounded to the nearest code."""

    def compute(weight: torch.Tensor) -> QuantizedTensor:
        return quantize(weight, *absmax_parameters(weight, scheme), scheme)

    def codes(layer: Layer) -> WeightCodes:
        return WeightCodes(layer, scheme, compute)

    chosen = [layer for layer in carrier.layers() if layer.columns in (WIDTH, HIDDEN)]
    return carrier.with_codes({layer.weight: codes(layer) for layer in chosen})


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def files(folder: Path) -> dict[str, Path]:
    """Write every variant; return the main files by title."""
    spec = TensorSpec("x", ("tokens", WIDTH), "float32")
    carrier = open_module(stack, {}, [spec], "model.factory")
    whole = OnnxCarrier(carrier.graph())
    made = {"float32": _exported(folder / "float32", whole, OnnxExporter())}
    symmetric = partial(Scheme, narrow=False)
    schemes = {
        "int8": symmetric(8),
        "int4-g128": symmetric(4, granularity="group", group=128),
        "int2-g32": Scheme(2, False, False, "group", 32),
    }
    for title, scheme in schemes.items():
        model = rounded(whole, scheme)
        plain = folder / f"{title}.onnx"
        ir.save(model.graph(), plain)
        made[f"{title} Q/DQ"] = plain
        for compute in ("float32", "int8"):
            exporter = OnnxExporter.model_validate({"matmul-compute": compute})
            made[f"{title} {compute}"] = _exported(folder / f"{title}-{compute}", model, exporter)
    return made


def _exported(folder: Path, model: OnnxCarrier, exporter: OnnxExporter) -> Path:
    folder.mkdir()
    return exporter.write(model, folder, CONTEXT)[0]


def least(call: Callable[[], object]) -> float:
    """Return the least seconds of calls that go on for a while."""
    best, end = np.inf, time.perf_counter() + ENOUGH
    while best == np.inf or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def error(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.benchmark
def test_weight_only(tmp_path, capsys):
    made = files(tmp_path)
    sessions = {title: session(path) for title, path in made.items()}
    noise = np.random.default_rng(0)
    batches = [noise.standard_normal((n, WIDTH)).astype(np.float32) for n in TOKENS]
    times = {(title, n): np.inf for title in made for n in TOKENS}
    outputs = {title: s.run(None, {"x": batches[-1]})[0] for title, s in sessions.items()}
    for _ in range(ROUNDS):
        for title, running in sessions.items():
            for batch in batches:
                each = least(partial(running.run, None, {"x": batch}))
                times[title, len(batch)] = min(times[title, len(batch)], each)
    lines = [f"{'':18}{'MB':>8}{'1 token ms':>12}{'64 tokens ms':>14}{'error':>10}"]
    for title, path in made.items():
        exact = outputs.get(f"{title.split(' ')[0]} float32", outputs[title])
        lines.append(
            f"{title:18}{path.stat().st_size / 1e6:8.2f}{times[title, 1] * 1e3:12.2f}"
            f"{times[title, 64] * 1e3:14.2f}{error(outputs[title], exact):10.1e}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
