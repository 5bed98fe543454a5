"""Few bits without labels: GPTQ, and what training the rounding block by block adds.

Quality of the ONNX files in ONNX Runtime, and seconds of the processor to calibrate, quantize and
write them, on ResNet-20 (COMPRESSOR_DATA) and on the digits sample.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor import catalog
from compressor.calibration.collect import collect_statistics
from compressor.models.onnx.ort_session import OrtRunner
from compressor.run.evaluate import RunSamples, evaluate
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.plan import Plan, make_plan
from compressor.spec.load import load_spec
from compressor.types.exporter import ExportContext
from tests.benchmarks.bench_resnet20 import fused, show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark()
WIDTHS: dict[str, dict[str, Any]] = {
    "W4A8": {"weights": {"bits": 4}},
    "W3A8": {"weights": {"bits": 3}},
    "W2A8": {"weights": {"bits": 2}},
    "W4A4": {"weights": {"bits": 4}, "activations": {"bits": 4}},
    "W4A4, every layer": {
        "weights": {"bits": 4},
        "activations": {"bits": 4},
        "first-last": "same",
    },
}


def quantized(plan: Plan, options: dict[str, Any], rounding: str, folder: Path) -> float:
    """Write ``model.onnx``; return the seconds of the processor that it took."""
    carrier, data = fused(plan), plan.data["calibration"]
    weights = {**options["weights"], "rounding": rounding}
    declared = catalog.load("pass", "quantize-static").model_validate(
        {**options, "weights": weights}, strict=False
    )
    samples = RunSamples(carrier.inputs, data, plan.context.seed, carrier=carrier)
    context = replace(plan.context, samples=samples)
    start = time.process_time()
    requests = declared.survey(carrier, context).requests
    statistics = collect_statistics(carrier, data.batches(), requests)
    outcome = declared.apply(carrier, context, statistics)
    catalog.load("exporter", "onnx")().write(outcome.carrier, folder, ExportContext("few", ""))
    return time.process_time() - start


@pytest.mark.parametrize("sample", ["digits", "cifar"])
def test_few_bits(sample: str, tmp_path: Path) -> None:
    if sample == "cifar" and "COMPRESSOR_DATA" not in os.environ:
        pytest.skip("COMPRESSOR_DATA names no folder of real data")
    plan = make_plan(load_spec(Path(f"samples/{sample}/spec.yaml"), [f"output={tmp_path / 'out'}"]))
    plan.model.load()
    reference = plan.model.carrier.runner()
    exact = evaluate(reference, reference, plan.data["evaluation"], ACCURACY)
    rows = [["float", "", f"{exact.metric['value']:.2f}", "", "", ""]]
    for title, options in WIDTHS.items():
        for rounding in ("gptq", "reconstruct"):
            folder = tmp_path / f"{title}-{rounding}"
            folder.mkdir()
            seconds = quantized(plan, options, rounding, folder)
            runner = OrtRunner(folder / "model.onnx", title)
            found = evaluate(runner, reference, plan.data["evaluation"], ACCURACY)
            accuracy = f"{found.metric['value']:.2f}"
            quality = [accuracy, f"{found.agreement:.2f}", f"{found.sqnr_db:.2f}"]
            rows.append([title, rounding, *quality, f"{seconds:.1f}"])
    header = ["widths", "rounding", "top-1 %", "agree %", "SQNR dB", "CPU s"]
    show(f"{sample}, {exact.metric['samples']:,} images", header, rows)
