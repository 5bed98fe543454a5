"""Small networks and data for tests of quantize-static."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from compressor.calibration.collect import collect
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, Batch, TensorSpec

ORT = PassContext(0, frozenset({"ort-cpu"}))
TENSORRT = PassContext(0, frozenset({"tensorrt"}))
IMAGE = TensorSpec("image", ("batch", 3, 12, 12), "float32")


class Residual(nn.Module):
    """A stem, a residual block with a strided projection, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        y = torch.relu(self.first(x))
        x = torch.relu(x + self.second(y))
        x = self.pool(x)
        return self.head(x.mean((2, 3), keepdim=True).flatten(1))


class Shortcut(nn.Module):
    """A shortcut that slices and pads, as in the CIFAR-10 ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.last = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        short = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        x = torch.relu(short + self.down(x))
        return self.last(x)


class Perceptron(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(image)))


class Given:
    """Calibration data that a test makes."""

    made_up = False

    def __init__(self, batches: list[Batch]):
        self._batches = batches

    def probe(self, count: int) -> Batch:
        """Return the first samples."""
        return {name: array[:count] for name, array in self._batches[0].items()}

    def batches(self) -> Iterator[Batch]:
        """Yield all batches."""
        return iter(self._batches)


def carrier(module: nn.Module, spec: TensorSpec = IMAGE, seed: int = 0) -> Carrier:
    """Fuse a module with random weights."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return Fuse().apply(TorchCarrier(module, [spec]), ORT, {}).carrier


@cache
def shared(build: type[nn.Module], spec: TensorSpec = IMAGE) -> Carrier:
    """Fuse a network that several tests look at: a carrier is a value, so that all may have it."""
    return carrier(build(), spec)


def data(spec: TensorSpec = IMAGE, batches: int = 4, seed: int = 1) -> list[Batch]:
    """Normal random batches of eight samples."""
    random = np.random.default_rng(seed)
    shape = [8 if isinstance(d, str) else d for d in spec.shape]
    return [{spec.name: random.standard_normal(shape, np.float32)} for _ in range(batches)]


def statistics(
    declared: QuantizeStatic, model: Carrier, context: PassContext, batches: list[Batch]
) -> dict[str, Any]:
    """Gather what the pass asks for."""
    requests = declared.survey(model, context).requests
    inputs = {i.name for i in model.inputs}
    taps = list(dict.fromkeys(t for r in requests for t in r.tensors if t not in inputs))
    runner = model.runner(taps)
    return collect(lambda b: {**b, **runner.run(b)}, batches, requests)


def quantized(
    declared: QuantizeStatic,
    model: Carrier,
    context: PassContext = ORT,
    spec: TensorSpec = IMAGE,
) -> Outcome:
    """Calibrate and quantize."""
    return declared.apply(model, context, statistics(declared, model, context, data(spec)))


def outputs(model: Carrier, batch: Batch) -> Array:
    """Run a carrier; its first output."""
    return next(iter(model.runner().run(batch).values()))


def sqnr(reference: Array, other: Array) -> float:
    """Signal to noise, dB."""
    error = np.square(reference - other).sum()
    return float(10 * np.log10(np.square(reference).sum() / error))


def runtime_operators(model: Carrier, folder: Any) -> Counter[str]:
    """Operators that remain after ONNX Runtime has optimized the graph."""
    import onnx
    import onnx_ir as ir

    assert isinstance(model, OnnxCarrier)
    source, optimized = folder / "source.onnx", folder / "optimized.onnx"
    ir.save(model.graph(), source)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(optimized)
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(optimized).graph.node)
