"""A small model of speech that carries a state, as voice detectors do, and clips for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compressor.report.run import RunResult, run_spec
from compressor.run.options import RunOptions
from compressor.run.plan import Plan, make_plan
from compressor.spec.load import load_spec

FRAME, WIDTH, RATE = 512, 64, 16000
MODEL = "voice.onnx"
STATE = {"state": "stateN"}


def voice_model(batch: str | int = "batch") -> onnx.ModelProto:
    """Return a model of one frame ``[B, 512]``, a state ``[2, B, 64]`` and a sampling rate."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)
        return numpy_helper.from_array(values.astype(np.float32), name)

    def integers(name: str, *values: int) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(values, np.int64), name)

    ones, zeros = np.ones(16, np.float32), np.zeros(16, np.float32)
    weights = [
        weight("conv.weight", 16, 1, 16),
        *(numpy_helper.from_array(a, n) for n, a in (("gain", ones), ("shift", zeros))),
        *(numpy_helper.from_array(a, n) for n, a in (("mean", zeros), ("spread", ones))),
        weight("encoder.weight", WIDTH, 16 * 63),
        weight("wx", 4 * WIDTH, WIDTH),
        weight("wh", 4 * WIDTH, WIDTH),
        weight("head.weight", 1, WIDTH),
        numpy_helper.from_array(np.array(0.5, np.float32), "half"),
        numpy_helper.from_array(np.array(RATE, np.int64), "usual"),
        integers("one", 1),
        integers("flat", 0, -1),
        integers("zeroth", 0),
        integers("first", 1),
    ]
    node = helper.make_node
    nodes = [
        node("Unsqueeze", ["input", "one"], ["frame"]),
        node("Conv", ["frame", "conv.weight"], ["waves"], "conv", strides=[8]),
        node("BatchNormalization", ["waves", "gain", "shift", "mean", "spread"], ["normed"], "bn"),
        node("Relu", ["normed"], ["heard"]),
        node("Reshape", ["heard", "flat"], ["features"]),
        node("Gemm", ["features", "encoder.weight"], ["encoded"], "encoder", transB=1),
        node("Equal", ["sr", "usual"], ["is_usual"]),
        node("Cast", ["is_usual"], ["loud"], to=TensorProto.FLOAT),
        node("Add", ["loud", "half"], ["scale"]),
        node("Mul", ["encoded", "scale"], ["x"]),
        node("Gather", ["state", "zeroth"], ["h_1"], axis=0),
        node("Gather", ["state", "first"], ["c_1"], axis=0),
        node("Squeeze", ["h_1", "zeroth"], ["h"]),
        node("Squeeze", ["c_1", "zeroth"], ["c"]),
        node("Gemm", ["x", "wx"], ["from_x"], "wx", transB=1),
        node("Gemm", ["h", "wh"], ["from_h"], "wh", transB=1),
        node("Add", ["from_x", "from_h"], ["gates"]),
        node("Split", ["gates"], ["i", "f", "g", "o"], axis=1, num_outputs=4),
        *(node("Sigmoid", [n], [f"{n}_gate"]) for n in "ifo"),
        node("Tanh", ["g"], ["g_gate"]),
        node("Mul", ["f_gate", "c"], ["kept"]),
        node("Mul", ["i_gate", "g_gate"], ["added"]),
        node("Add", ["kept", "added"], ["c_next"]),
        node("Tanh", ["c_next"], ["c_shown"]),
        node("Mul", ["o_gate", "c_shown"], ["h_next"]),
        node("Gemm", ["h_next", "head.weight"], ["logit"], "head", transB=1),
        node("Sigmoid", ["logit"], ["prob"]),
        node("Unsqueeze", ["h_next", "zeroth"], ["h_out"]),
        node("Unsqueeze", ["c_next", "zeroth"], ["c_out"]),
        node("Concat", ["h_out", "c_out"], ["stateN"], axis=0),
    ]
    value = helper.make_tensor_value_info
    inputs = [
        value("input", TensorProto.FLOAT, [batch, FRAME]),
        value("state", TensorProto.FLOAT, [2, batch, WIDTH]),
        value("sr", TensorProto.INT64, []),
    ]
    outputs = [
        value("prob", TensorProto.FLOAT, [batch, 1]),
        value("stateN", TensorProto.FLOAT, [2, batch, WIDTH]),
    ]
    graph = helper.make_graph(nodes, "voice", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def clip(seed: int, steps: int = 6, batch: int = 1) -> dict[str, NDArray[Any]]:
    """Return a sequence: frames of a wave that starts somewhere, and the sampling rate."""
    rng = np.random.default_rng(seed)
    time = np.arange(steps * FRAME).reshape(steps, 1, FRAME) / rng.uniform(5, 40)
    wave = np.sin(time) + 0.3 * rng.standard_normal((steps, batch, FRAME))
    return {"input": wave.astype(np.float32), "sr": np.array(RATE, np.int64)}


class Voice:
    """A folder with the model, clips of different lengths, and a spec of it.

    Attributes:
        spec: the spec as a dictionary; change it before a run.
    """

    def __init__(self, folder: Path, passes: list[dict[str, Any]] | None = None):
        self.folder = folder
        onnx.save(voice_model(), folder / MODEL)
        for role, first, count in (("calibration", 0, 6), ("evaluation", 100, 8)):
            (folder / role).mkdir()
            for i in range(count):
                np.savez(folder / role / f"{i:02}.npz", **clip(first + i, steps=4 + i % 3))  # type: ignore[arg-type]
        data = {
            role: {"npz": role, "samples": "feeds", "state": dict(STATE)}
            for role in ("calibration", "evaluation")
        }
        self.spec: dict[str, Any] = {
            "version": 1,
            "name": "voice",
            "model": {"onnx": MODEL},
            "data": data,
            "passes": passes or [],
            "exports": [{"format": "onnx"}],
            "limits": {"latency-ratio": None, "size-ratio": None, "metric-drop": None},
            "output": "out",
        }

    def write(self) -> Path:
        path = self.folder / "spec.yaml"
        path.write_text(yaml.safe_dump(self.spec))
        return path

    def plan(self) -> Plan:
        return make_plan(load_spec(self.write()))

    def run(self) -> RunResult:
        return run_spec(load_spec(self.write()), RunOptions())
