"""A recognizer of text, int8 by default, on drawn lines: how many are read as the float model does.

Beside ONNX Runtime's own static quantization of the same fused floats, in one run.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.plan import make_plan
from compressor.run.timing.timing import already_open, measure
from compressor.spec.load import load_spec
from tests.benchmarks import text_lines
from tests.benchmarks.bench_detector import sqnr, their_files
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.paths import ROOT

pytestmark = benchmark("COMPRESSOR_TEXT_READER", seconds=3600)

SPEC = """\
version: 1
name: recognizer
model: {{onnx: {model}}}
data:
  calibration: {{npz: lines.npz, inputs: {{x: calibration}}, samples: 64}}
  evaluation: {{npz: lines.npz, inputs: {{x: evaluation}}, samples: 256}}
passes:
  - pass: fuse
  - pass: quantize-static
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{latency-ratio: null, metric-drop: null}}
output: out
"""


def test_lines(tmp_path: Path) -> None:
    model = Path(os.environ["COMPRESSOR_TEXT_READER"])
    text_lines.write(tmp_path, model, ROOT / "samples/tiny-llama/evaluation.txt")
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=model), encoding="utf-8")
    plan = make_plan(load_spec(spec, []))
    plan.model.load()
    files = {
        "the file": plan.model.files[0],
        "compressor": run_spec(load_spec(spec, [])).output / "model.onnx",
        **their_files(plan, tmp_path, symbolic=False),
    }
    runners = {name: OrtRunner(path, name) for name, path in files.items()}
    batches = list(plan.data["evaluation"].batches())
    found = {name: [runner.run(batch) for batch in batches] for name, runner in runners.items()}
    times = measure(already_open(runners), [{n: a[:1] for n, a in batches[0].items()}], budget=60.0)
    wanted = found.pop("the file")
    (output,) = wanted[0]
    expected = [text_lines.characters(line) for batch in wanted for line in batch[output]]
    rows = []
    for name, outputs in found.items():
        lines = [text_lines.characters(line) for batch in outputs for line in batch[output]]
        same = np.mean([a == b for a, b in zip(expected, lines, strict=True)])
        ratio = times.ratio(name, "the file")
        low, high = ratio["ci95"]
        rows.append(
            [
                name,
                f"{same:.1%}",
                f"{sqnr(wanted, outputs, output):.2f}",
                f"{ratio['value']:.2f} ({low:.2f} to {high:.2f})",
                f"{files[name].stat().st_size / files['the file'].stat().st_size:.3f}",
            ]
        )
    header = ["artifact", "lines", "dB", "latency", "bytes"]
    show(f"Lines of {len(expected)} that are read as the file reads them", header, rows)
