"""What ``compress explain`` predicts, and what measuring finds: the project's networks.

For the layers that the prediction ranks first: the share of the output's noise that a rule for each
would remove, as predicted and as measured by leaving one out; then the suggestions together.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compressor.lab.explain.by_sqnr import explain_by_sqnr, finished_run
from compressor.lab.explain.explanation import Explanation, Gain, LayerCost
from compressor.lab.explain.leave_one_out import Budget, explain_by_leaving_out
from compressor.report.run import run_spec
from compressor.spec.load import load_spec
from tests.benchmarks.bench_detector import SPEC, TRANSFORM
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark, needs

ROOT = Path(__file__).parents[2]
LAYERS = 5
SAMPLES = {
    "digits, int8": ("samples/digits/spec.yaml", ()),
    "digits, int4": ("samples/digits/spec.yaml", ("passes.1.weights.bits=4",)),
    "tiny Llama, 4-bit GPTQ": ("samples/tiny-llama/spec.yaml", ()),
}
F1 = '''
from tests.benchmarks.bench_detector import agreement
import numpy as np


def f1(outputs, target):
    """F1 of the detections in each image, those of the float model being the truth."""
    one = lambda batch, i: {name: array[i : i + 1] for name, array in batch.items()}
    count = len(outputs["scores"])
    return np.array([agreement([one(target, i)], [one(outputs, i)])[2] for i in range(count)])
'''

pytestmark = benchmark(seconds=3600)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str, tmp_path: Path) -> None:
    path, settings = SAMPLES[name]
    compared(name, ROOT / path, (*settings, f"output={tmp_path / 'out'}"))


@needs("COMPRESSOR_DATA")
@pytest.mark.parametrize("bits", [8, 4])
def test_resnet20(bits: int, tmp_path: Path) -> None:
    widths = (f"passes.1.weights.bits={bits}", f"passes.1.activations.bits={bits}")
    spec = ROOT / "samples/cifar/spec.yaml"
    compared(f"ResNet-20, W{bits}A{bits}", spec, (*widths, f"output={tmp_path / 'out'}"))


@needs("COMPRESSOR_DATA")
def test_detector(tmp_path: Path) -> None:
    """Its metric reads both outputs and moves in steps."""
    (tmp_path / "detector_data.py").write_text(TRANSFORM + F1, encoding="utf-8")
    spec = SPEC.format(data=os.environ["COMPRESSOR_DATA"]) + "metric: detector_data:f1\n"
    (tmp_path / "spec.yaml").write_text(spec, encoding="utf-8")
    compared("Face detector, int8", tmp_path / "spec.yaml", ())


def compared(name: str, path: Path, settings: tuple[str, ...]) -> None:
    """Run a spec, predict, measure the same changes, and print both."""
    run_spec(load_spec(path, settings))
    run = finished_run(path, settings)
    predicted = explain_by_sqnr(run, 3)
    measured = explain_by_leaving_out(run, Budget(layers=LAYERS), 3)
    found = {cost.change.layer: cost.gain for cost in measured.layers}
    rows = [row(cost, found.get(cost.change.layer)) for cost in predicted.layers[:LAYERS]]
    show(
        f"{name}: share of the noise that goes",
        ["layer", "change", "effect", "predicted", "measured", "metric, 95 %"],
        rows,
    )
    for word, explanation in (("prediction", predicted), ("measurement", measured)):
        print(f"  {word}: {together(explanation)}")


def row(cost: LayerCost, gain: Gain | None) -> list[str]:
    return [
        cost.change.layer,
        cost.change.text,
        share(cost.gain.metric_share),
        share(cost.gain.noise_share),
        share(None if gain is None else gain.noise_share),
        "-" if gain is None or gain.ci95 is None else f"{gain.ci95[0]:.3g} to {gain.ci95[1]:.3g}",
    ]


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def together(explanation: Explanation) -> str:
    gain = explanation.measured or explanation.predicted
    if gain is None:
        return explanation.doubt or "nothing stands out"
    layers = ", ".join(change.layer for change in explanation.suggested)
    sqnr = "-" if gain.sqnr_db is None else f"{gain.sqnr_db:+.2f} dB"
    metric = "-" if gain.metric is None else f"{gain.metric:+.3g}"
    return f"{layers}: {sqnr}, metric {metric}. {explanation.doubt}"
