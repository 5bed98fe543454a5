"""What a roofline predicts of int8, against int8 as it was measured.

Tables, no assertions on time. The prediction is of the float model, before anything is quantized;
the measurement is of the artifact that a run wrote, timed in turn with the float model.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from compressor.lab.roofline.roofline import LENGTH, inputs_for, measure_roofline, measured_model
from compressor.models.onnx.ort_session import OrtRunner
from compressor.report.run import run_spec
from compressor.run.model import open_model
from compressor.run.timing.timing import measure
from compressor.spec.load import load_spec
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_DATA")
SAMPLES = ("digits", "cifar")
BATCHES = (1, 64)
THREADS = 1  # so that other work on the machine disturbs it least
KIND = "int8 weights and activations"


def test_the_prediction_against_int8_as_measured(tmp_path: Path) -> None:
    rows = []
    for sample in SAMPLES:
        spec = Path(f"samples/{sample}/spec.yaml")
        output = tmp_path / sample
        exports = "exports=[{format: onnx, opset: 21, target: ort-cpu}]"
        loaded = load_spec(spec, [exports, f"output={output}"])
        run_spec(loaded)
        opened = open_model(loaded)
        opened.load()
        floats = tmp_path / f"{sample}.onnx"
        ir.save(opened.carrier.graph(), floats)
        rows += [
            [sample, str(batch), *compared(floats, output / "model.onnx", batch)]
            for batch in BATCHES
        ]
    header = ["model", "batch", "threads", "best", "limit", "measured", "95 %", "share of best"]
    show("int8 in ONNX Runtime: best speed-up predicted, and measured", header, rows)


def compared(floats: Path, quantized: Path, batch: int) -> list[str]:
    """Return what was predicted of the float file, and how the quantized one does."""
    found = next(
        p for p in measure_roofline(floats, batch, THREADS).prospects if p.kind.name == KIND
    )
    with measured_model(floats) as model:
        given = inputs_for(model, batch, LENGTH)
    times = measure(
        {
            "int8": lambda: OrtRunner(quantized, "int8", THREADS),
            "float": lambda: OrtRunner(floats, "float", THREADS),
        },
        [given],
        budget=10.0,
        precision=0.01,
    )
    ratio = times.ratio("float", "int8")
    low, high = ratio["ci95"]
    return [
        str(THREADS),
        f"{found.speedup:.2f}",
        "none" if found.limit is None else f"{found.limit:.1f}",
        f"{ratio['value']:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{100 * ratio['value'] / found.speedup:.0f} %",
    ]
