"""A published face detector, int8, against ONNX Runtime's own static quantization in one run.

Fidelity of each output, agreement of the detections with the float model's, bytes, and latency.
Nothing but the calibration images sets ranges or weights; the evaluation faces judge only.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.plan import Plan, make_plan
from compressor.run.timing.timing import already_open, measure
from compressor.spec.load import load_spec
from compressor.types.tensors import Batch
from tests.benchmarks import peers
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.detections import agreement, detections
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_DATA")

# What a user writes for this file. Few of the calibration images hold faces: what a face makes of
# the activations lies beyond what most of them show, and `observer: auto` has to see that.
SPEC = """\
version: 1
name: face-detector
model: {{onnx: {data}/face_detector_rfb320.onnx}}
data:
  calibration:
    npz: {data}/faces_320x240.npz
    inputs: {{input: calibration}}
    transform: detector_data:normalize
  evaluation:
    npz: {data}/faces_320x240.npz
    inputs: {{input: evaluation}}
    transform: detector_data:normalize
passes:
  - pass: fuse
{passes}
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{size-ratio: {bytes}, latency-ratio: null}}
output: out
"""
QUANTIZED = "  - pass: quantize-static"
NARROWED = "  - {{pass: prune-structured, target: {{latency: {share}}}, criterion: {criterion}}}"
SHARES = (0.85, 0.7)
TRANSFORM = '''\
import numpy as np


def normalize(batch):
    """(RGB - 127) / 128, channels first."""
    pixels = (batch["input"].astype(np.float32) - 127) / 128
    return {"input": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))}
'''


def test_detector(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    reference = plan.model.carrier.runner()
    images = list(plan.data["evaluation"].batches())
    wanted = [reference.run(image) for image in images]

    files = {"compressor": compressed(tmp_path), **their_files(plan, tmp_path)}
    runners = {name: OrtRunner(path, name) for name, path in files.items()}
    results = {name: [runner.run(i) for i in images] for name, runner in runners.items()}
    floats = plan.model.files[0].stat().st_size
    rows = []
    for name, found in results.items():
        precision, recall, score = agreement(wanted, found)
        rows.append(
            [
                name,
                *(f"{sqnr(wanted, found, output):.2f}" for output in ("scores", "boxes")),
                f"{precision:.4f}",
                f"{recall:.4f}",
                f"{score:.4f}",
                f"{files[name].stat().st_size / floats:.3f}",
            ]
        )
    header = ["artifact", "scores dB", "boxes dB", "precision", "recall", "F1", "bytes"]
    many = sum(len(detections(o)) for o in wanted)
    show(f"Face detector, {len(images)} images, {many} faces found in float", header, rows)

    best = max((n for n in files if n != "compressor"), key=lambda n: total(wanted, results[n]))
    times = measure(
        already_open(
            {"float": reference, best: runners[best], "compressor": runners["compressor"]}
        ),
        [images[0]],
        budget=30.0,
        precision=0.01,
    )
    rows = []
    for name, against in ((best, "float"), ("compressor", "float"), ("compressor", best)):
        ratio = times.ratio(name, against)
        low, high = ratio["ci95"]
        rows.append([f"{name} / {against}", f"{ratio['value']:.3f}", f"{low:.3f}-{high:.3f}"])
    show("Latency ratios, one image, interleaved", ["ratio", "median", "95 %"], rows)


@pytest.mark.parametrize("criterion", ["l2", "reconstruction"])
def test_detector_at_a_latency(criterion: str, tmp_path: Path) -> None:
    """Channels removed until the time is a share of the float model's; nothing is trained."""
    plan = planned(tmp_path)
    reference = plan.model.carrier.runner()
    images = list(plan.data["evaluation"].batches())
    wanted = [reference.run(image) for image in images]
    rows = []
    for share in SHARES:
        folder = tmp_path / f"{share}"
        folder.mkdir()
        passes = NARROWED.format(share=share, criterion=criterion)
        planned(folder, passes, "null")
        runner = OrtRunner(compressed(folder), f"{share}")
        found = [runner.run(image) for image in images]
        pair = already_open({"float": reference, "pruned": runner})
        times = measure(pair, [images[0]], budget=30.0, precision=0.01).ratio("pruned", "float")
        figures = (*agreement(wanted, found), sqnr(wanted, found, "scores"))
        low, high = times["ci95"]
        rows.append(
            [
                f"{share:g}",
                *(f"{figure:.3f}" for figure in figures),
                f"{times['value']:.3f}",
                f"{low:.3f}-{high:.3f}",
            ]
        )
    header = ["target", "precision", "recall", "F1", "scores dB", "latency", "95 %"]
    show(f"Face detector by latency, criterion {criterion}, one shot", header, rows)


def planned(folder: Path, passes: str = QUANTIZED, size: str = "0.45") -> Plan:
    """Write the spec, plan it and read the weights."""
    (folder / "detector_data.py").write_text(TRANSFORM, encoding="utf-8")
    spec = SPEC.format(data=os.environ["COMPRESSOR_DATA"], passes=passes, bytes=size)
    (folder / "spec.yaml").write_text(spec, encoding="utf-8")
    sys.modules.pop("detector_data", None)
    plan = make_plan(load_spec(folder / "spec.yaml", []))
    plan.model.load()
    return plan


def compressed(folder: Path) -> Path:
    """Run the spec and return its ONNX file."""
    return run_spec(load_spec(folder / "spec.yaml", [])).output / "model.onnx"


def their_files(plan: Plan, folder: Path, *, symbolic: bool = True) -> dict[str, Path]:
    """Quantize with ONNX Runtime, from the fused float model that both tools start from."""
    fused = plan.spec.passes[0].apply(plan.model.carrier, plan.context, {}).carrier
    ir.save(fused.graph(), folder / "float.onnx")
    peers.prepare(folder / "float.onnx", folder / "prepared.onnx", symbolic=symbolic)
    batches = list(plan.data["calibration"].batches())
    files = {}
    for method in ("MinMax", "Percentile"):
        for symmetric in (False, True):
            name = f"ONNX Runtime {method} {'int8' if symmetric else 'uint8'}"
            files[name] = folder / f"{method}{symmetric}.onnx"
            with contextlib.redirect_stdout(io.StringIO()):
                peers.quantize(folder / "prepared.onnx", files[name], batches, method, symmetric)
    return files


def sqnr(wanted: list[Batch], found: list[Batch], output: str) -> float:
    """Signal to noise of one output over all images, in dB."""
    pairs = [(w[output].astype(np.float64), f[output]) for w, f in zip(wanted, found, strict=True)]
    signal = sum(float(np.square(w).sum()) for w, _ in pairs)
    return 10 * math.log10(signal / sum(float(np.square(w - f).sum()) for w, f in pairs))


def total(wanted: list[Batch], found: list[Batch]) -> float:
    """Both outputs' signal to noise, by which the best of the other files is chosen."""
    return sqnr(wanted, found, "scores") + sqnr(wanted, found, "boxes")
