"""int8 of networks whose operators are not all faster in int8: predicted and measured latency.

Each network is timed as the fused float model, with every layer as integers, and as the pass leaves
it: with layers in floating point where that is predicted to be faster. Weights are random;
predictions are those for CPUs like this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compressor.exporters.onnx.forms import in_form_for
from compressor.models.onnx.carrier import open_onnx
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.run.timing.timing import already_open, measure
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.benchmarks.bench_kernels import facts_here
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.compressor.passes.quantize.static_models import sqnr, statistics

pytestmark = benchmark()

ORT = PassContext(0, frozenset({"ort-cpu"}))
SIDE = 224
Act = Callable[[], nn.Module]
Block = tuple[
    int, int, int, int, bool, Act, int
]  # kernel, expanded, out, stride, gated, act, copies

MOBILE_V3: list[Block] = [
    (3, 16, 16, 2, True, nn.ReLU, 1),
    (3, 72, 24, 2, False, nn.ReLU, 1),
    (3, 88, 24, 1, False, nn.ReLU, 1),
    (5, 96, 40, 2, True, nn.Hardswish, 1),
    (5, 240, 40, 1, True, nn.Hardswish, 2),
    (5, 144, 48, 1, True, nn.Hardswish, 2),
    (5, 288, 96, 2, True, nn.Hardswish, 1),
    (5, 576, 96, 1, True, nn.Hardswish, 2),
]
MOBILE_V2: list[Block] = [
    (3, 32, 16, 1, False, nn.ReLU6, 1),
    (3, 96, 24, 2, False, nn.ReLU6, 2),
    (3, 144, 32, 2, False, nn.ReLU6, 3),
    (3, 192, 64, 2, False, nn.ReLU6, 4),
    (3, 384, 96, 1, False, nn.ReLU6, 3),
    (3, 576, 160, 2, False, nn.ReLU6, 3),
]
EFFICIENT: list[Block] = [
    (3, 32, 16, 1, True, nn.SiLU, 1),
    (3, 96, 24, 2, True, nn.SiLU, 2),
    (5, 144, 40, 2, True, nn.SiLU, 2),
    (3, 240, 80, 2, True, nn.SiLU, 3),
    (5, 480, 112, 1, True, nn.SiLU, 3),
    (5, 672, 192, 2, True, nn.SiLU, 4),
]


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int, act: Act):
        super().__init__()
        squeezed = max(8, channels // 4)
        self.inner = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU() if act is nn.Hardswish else act(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid() if act is nn.SiLU else nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x)


class Inverted(nn.Module):
    """An inverted residual block: expand, depthwise, gate, project."""

    def __init__(self, channels: int, block: Block, stride: int):
        super().__init__()
        kernel, wide, out, _, gated, act, _ = block
        self.inner = nn.Sequential(
            *unit(channels, wide, 1, 1, act),
            *unit(wide, wide, kernel, stride, act, groups=wide),
            *([Gate(wide, act)] if gated else []),
            *unit(wide, out, 1, 1, None),
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) if self.residual else self.inner(x)


def unit(
    channels: int, out: int, kernel: int, stride: int, act: Act | None, groups: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(out), *([act()] if act else [])]


def mobile(blocks: list[Block], stem: int, last: int, act: Act) -> nn.Module:
    layers, channels = unit(3, stem, 3, 2, act), stem
    for block in blocks:
        for index in range(block[-1]):
            layers.append(Inverted(channels, block, block[3] if index == 0 else 1))
            channels = block[2]
    layers += unit(channels, last, 1, 1, act)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000))


class ConvNext(nn.Module):
    """A block of a ConvNeXt: depthwise, then a perceptron on channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.inner = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    stages: list[nn.Module] = []
    for entry, channels, size in ((3, 64, 4), (64, 128, 2), (128, 256, 2)):
        stages += [nn.Conv2d(entry, channels, size, size), ConvNext(channels), ConvNext(channels)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "like MobileNetV2": lambda: mobile(MOBILE_V2, 32, 1280, nn.ReLU6),
    "like MobileNetV3-small": lambda: mobile(MOBILE_V3, 16, 576, nn.Hardswish),
    "like EfficientNet-B0": lambda: mobile(EFFICIENT, 32, 1280, nn.SiLU),
    "like ConvNeXt": convnext,
}


def carriers() -> dict[str, Carrier]:
    """Return the fused float models; the published detector, too, where its file is."""
    spec = TensorSpec("image", (1, 3, SIDE, SIDE), "float32")
    models: dict[str, Carrier] = {}
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        module = build().train()
        with torch.no_grad():
            module(torch.randn(8, 3, SIDE // 2, SIDE // 2))  # running statistics
        models[name] = Fuse().apply(TorchCarrier(module.eval(), [spec]), ORT, {}).carrier
    detector = Path(os.environ.get("COMPRESSOR_DATA", "")) / "face_detector_rfb320.onnx"
    if detector.is_file():
        models["face detector"] = Fuse().apply(open_onnx(detector, 21), ORT, {}).carrier
    return models


def test_islands(tmp_path: Path) -> None:
    rows = []
    for name, model in carriers().items():
        shape = [d if isinstance(d, int) else 1 for d in model.inputs[0].shape]
        batch = {model.inputs[0].name: np.random.default_rng(1).standard_normal(shape, np.float32)}
        wanted = next(iter(model.runner().run(batch).values()))
        runners = {"float": opened(model, tmp_path / "float.onnx")}
        noise, predicted, floats = [], ["-", "-"], 0
        for kind, rules in (("all", [{"match": "*"}]), ("default", [])):
            declared = QuantizeStatic.model_validate(
                {"layers": rules, "weights": {"rounding": "nearest"}}, strict=False
            )
            survey = declared.survey(model, ORT)
            after = declared.apply(model, ORT, statistics(declared, model, ORT, [batch])).carrier
            noise.append(sqnr(wanted, next(iter(after.runner().run(batch).values()))))
            runners[kind] = opened(after, tmp_path / f"{kind}.onnx")
            floats = sum("(predicted)" in row.reason for row in survey.layers)
            for note in survey.notes:
                if note.startswith("predicted latency"):
                    here = re.escape(facts_here().title)
                    predicted = re.findall(rf"(\d\.\d\d) x on CPUs {here}", note)[::-1]
        times = measure(already_open(runners), [batch], budget=20.0, precision=0.01)
        ratios = [times.ratio(kind, "float") for kind in ("all", "default")]
        cells = [f"{r['value']:.2f} ({r['ci95'][0]:.2f}-{r['ci95'][1]:.2f})" for r in ratios]
        kept = f"{floats} of {len(survey.layers)}"
        stated = predicted if floats else ["-", "-"]
        rows.append([name, *cells, *stated, kept, *(f"{db:.1f}" for db in noise)])
    header = ["network", "all int8", "default", "predicted", "predicted", "float", "dB", "dB"]
    show("Latency over that of the fused float model, one sample", header, rows)


def opened(model: Carrier, path: Path) -> OrtRunner:
    ir.save(in_form_for("ort-cpu", model.graph(), "float32"), path)
    return OrtRunner(path, path.stem)
