"""`prepare: auto` of quantize-static against `none` and ONNX Runtime's own quantizer.

ResNet-20 as published, and the same function with channels scaled by 2^±4 between its layers; and
the face detector. Every figure comes from the exported file in ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_runner import OrtRunner
from compressor.passes.prepare.balance import ScaledGroup, scaled_weights
from compressor.passes.prepare.groups import scale_map
from compressor.report.run import run_spec
from compressor.run.evaluate import evaluate
from compressor.run.metrics import ACCURACY
from compressor.spec.load import load_spec
from compressor.types.carrier import Carrier
from tests.benchmarks import bench_detector, peers
from tests.benchmarks.bench_resnet20 import fused, planned, show

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        "COMPRESSOR_DATA" not in os.environ, reason="COMPRESSOR_DATA names no folder of real data"
    ),
]
_WORST = 4.0  # binary logarithm of the greatest factor
_RESNET = """\
version: 1
name: resnet
model: {{onnx: {file}}}
data:
  calibration:
    npz: {data}/cifar10_train4000.npz
    inputs: {{image: image}}
    transform: samples.cifar.data:normalize
    samples: 512
    batch: 32
passes:
  - {{pass: quantize-static, prepare: {prepare}, weights: {{bits: {bits}}}}}
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{size-ratio: null, latency-ratio: null}}
output: {output}
"""


def test_resnet20(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan")
    reference = plan.model.carrier.runner()
    network = fused(plan)
    batches = [{"image": b["image"]} for b in plan.data["calibration"].batches()]
    rows = []
    for name, carrier in (("as published", network), ("channels x 2^±4", stressed(network))):
        file = tmp_path / f"{len(rows)}.onnx"
        ir.save(carrier.graph(), file)
        for label, path, seconds in quantized(file, batches, tmp_path / f"{len(rows)}"):
            found = evaluate(OrtRunner(path, label), reference, plan.data["evaluation"], ACCURACY)
            sqnr = "" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
            rows.append([name, label, sqnr, f"{found.metric['value']:.2f}", f"{seconds:.1f}"])
    show("ResNet-20, 2,000 images", ["network", "artifact", "SQNR dB", "top-1 %", "CPU s"], rows)


def quantized(
    file: Path, batches: list[dict[str, np.ndarray]], folder: Path
) -> Iterator[tuple[str, Path, float]]:
    """Yield each artifact's name, its file, and the CPU seconds that it took."""
    yield "float", file, 0.0
    for bits in (8, 4):
        for prepare in ("none", "auto"):
            output = folder.with_name(f"{folder.name}-{bits}-{prepare}")
            spec = output.with_suffix(".yaml")
            data = os.environ["COMPRESSOR_DATA"]
            text = _RESNET.format(file=file, data=data, prepare=prepare, bits=bits, output=output)
            spec.write_text(text, encoding="utf-8")
            start = time.process_time()
            path = run_spec(load_spec(spec, [])).output / "model.onnx"
            yield f"W{bits}A8, prepare: {prepare}", path, time.process_time() - start
    prepared, path = folder.with_suffix(".prepared"), folder.with_suffix(".peer")
    peers.prepare(file, prepared)
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        peers.quantize(prepared, path, batches, "MinMax", False)
    yield "W8A8, ONNX Runtime", path, time.process_time() - start


def stressed(carrier: Carrier) -> Carrier:
    """Return the same function with channels that differ by up to 2^8 from each other."""
    random = torch.Generator().manual_seed(0)
    groups = scale_map(carrier.graph(), carrier.tensors()).groups
    scaled = []
    for group in groups:
        exponents = (2 * torch.rand(group.count, generator=random) - 1) * _WORST
        scaled.append(ScaledGroup(group, torch.exp2(exponents), 0.0))
    return OnnxCarrier(carrier.with_weights(scaled_weights(carrier, scaled)).graph())


def test_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench_detector.planned(tmp_path)
    reference = plan.model.carrier.runner()
    images = list(plan.data["evaluation"].batches())
    wanted = [reference.run(image) for image in images]
    rows = []
    for observer in ("mse", "extreme-value"):
        for prepare in ("none", "auto"):
            output = tmp_path / f"{observer}-{prepare}"
            settings = [
                f"passes.1.activations.observer={observer}",
                f"passes.1.prepare={prepare}",
                f"output={output}",
            ]
            start = time.process_time()
            path = run_spec(load_spec(tmp_path / "spec.yaml", settings)).output / "model.onnx"
            seconds = time.process_time() - start
            results = [OrtRunner(path, prepare).run(image) for image in images]
            _, _, score = bench_detector.agreement(wanted, results)
            levels = [
                f"{bench_detector.sqnr(wanted, results, name):.2f}" for name in ("scores", "boxes")
            ]
            rows.append(
                [f"{observer}, prepare: {prepare}", *levels, f"{score:.4f}", f"{seconds:.1f}"]
            )
    show("Face detector, W8A8", ["artifact", "scores dB", "boxes dB", "F1", "CPU s"], rows)
