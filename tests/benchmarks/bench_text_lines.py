"""A recognizer of text, int8 by default, on drawn lines: how many are read as the float model does.

Beside ONNX Runtime's own static quantization of the same fused floats, in one run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.plan import make_plan
from compressor.run.timing import already_open, measure
from compressor.spec.load import load_spec
from tests.benchmarks.bench_detector import sqnr, their_files
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.paths import ROOT

pytestmark = benchmark("COMPRESSOR_RECOGNIZER", seconds=3600)

HEIGHT, WIDTH = 48, 320
CALIBRATION, EVALUATION = 64, 256
SPEC = """\
version: 1
name: recognizer
model: {{onnx: {model}}}
data:
  calibration: {{npz: lines.npz, inputs: {{x: calibration}}}}
  evaluation: {{npz: lines.npz, inputs: {{x: evaluation}}}}
passes:
  - pass: fuse
  - pass: quantize-static
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{latency-ratio: null, metric-drop: null}}
output: out
"""


def drawn(words: list[str], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw a line of some words, turned, blurred and noisy, ``[3, 48, 320]`` from -1 to 1."""
    size, back, ink = (int(rng.integers(*ends)) for ends in ((18, 34), (150, 256), (0, 100)))
    font = ImageFont.load_default(size=size)
    start, count = int(rng.integers(0, len(words) - 5)), int(rng.integers(1, 5))
    text = " ".join(words[start : start + count])
    image = Image.new("L", (max(40, int(font.getlength(text)) + 12), size + 14), back)
    ImageDraw.Draw(image).text((6, 4), text, ink, font=font)
    image = image.rotate(float(rng.normal()), fillcolor=back, resample=Image.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1))))
    width = min(WIDTH, max(16, round(HEIGHT * image.width / image.height)))
    pixels = np.asarray(image.resize((width, HEIGHT)), np.float32)
    pixels = np.clip(pixels + rng.normal(0, rng.uniform(0, 12), pixels.shape), 0, 255)
    line = np.zeros((3, HEIGHT, WIDTH), np.float32)
    line[:, :, :width] = pixels / 127.5 - 1
    return line


def read(scores: NDArray[np.float32]) -> list[list[int]]:
    """Return the characters of each line; scores ``[lines, steps, classes]``, of which 0 is none.

    Spaces, the last class, do not count: the float model itself is not sure of them.
    """
    space = scores.shape[2] - 1
    return [
        [int(c) for c, before in zip(best, [0, *best], strict=False) if c not in (0, before, space)]
        for best in scores.argmax(axis=2)
    ]


def test_lines(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = re.findall(r"[A-Za-z',.;:!?]+", (ROOT / "README.md").read_text(encoding="utf-8"))
    lines = {
        name: np.stack([drawn(words, rng) for _ in range(count)])
        for name, count in (("calibration", CALIBRATION), ("evaluation", EVALUATION))
    }
    np.savez(tmp_path / "lines.npz", **lines)  # type: ignore[arg-type]  # of arrays only
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(model=os.environ["COMPRESSOR_RECOGNIZER"]), encoding="utf-8")
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
    expected = [line for batch in wanted for line in read(batch[output])]
    rows = []
    for name, outputs in found.items():
        lines_read = [line for batch in outputs for line in read(batch[output])]
        same = np.mean([a == b for a, b in zip(expected, lines_read, strict=True)])
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
    show(f"Lines of {EVALUATION} that are read as the file reads them", header, rows)
