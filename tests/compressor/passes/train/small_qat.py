"""A small residual network that is trained with fake quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.engine import train
from compressor.passes.train.qat.qat import Qat
from compressor.passes.train.qat.writing import Prepared
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, Batch
from compressor.types.training import Training
from tests.compressor.passes.train.small_training import CLASSES, INPUTS, SmallData, training

CONTEXT = PassContext(3, frozenset({"ort-cpu"}), "accuracy")
TENSORRT = PassContext(3, frozenset({"tensorrt"}), "accuracy")


class Block(nn.Module):
    """Convolutions with batch norms, a residual sum, pooling and a head."""

    def __init__(self, norm: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        y = torch.relu(self.bn1(self.stem(x)))
        y = torch.relu(y + self.bn2(self.conv(y)))
        found: Tensor = self.fc(y.mean((2, 3)))
        return found


@cache
def block(norm: bool = True) -> TorchCarrier:
    """Return the network, lowered once; its batch norms have seen data."""
    torch.manual_seed(5)
    module = Block(norm)
    with torch.no_grad():
        for _ in range(20):
            module.train()(torch.from_numpy(SmallData(noisy=False).images))
    return TorchCarrier(module, INPUTS)


class Calibration:
    """The images of the training, as they are."""

    made_up = False

    def probe(self, count: int) -> Batch:
        """Return the first images."""
        return {"x": SmallData().images[:count]}

    def batches(self) -> Iterator[Batch]:
        """Yield all images."""
        images = SmallData(64).images
        yield {"x": images[:32]}
        yield {"x": images[32:]}


def material(folder: Path, carrier: TorchCarrier, **own: Any) -> Training:
    """Return what a run would hand to the pass."""
    return replace(training(folder, carrier, **own), samples=Calibration())


def chosen(**options: Any) -> Qat:
    """Return the pass."""
    return Qat.model_validate({"steps": 12, "learning_rate": 0.01, **options})


def quantized(folder: Path, carrier: TorchCarrier | None = None, **options: Any) -> Outcome:
    """Train the network, or another."""
    start = carrier or block()
    own = {k: options.pop(k) for k in ("data", "metric", "stage") if k in options}
    context = options.pop("context", CONTEXT)
    given = material(folder, start, **own)
    return chosen(**options).apply_training(start, context, {}, given)


def trained_module(folder: Path, carrier: TorchCarrier, declared: Qat) -> tuple[Prepared, Carrier]:
    """Train; return the module with what it has learned, and what is written of it."""
    given = material(folder, carrier)
    prepared = declared.prepared(carrier, CONTEXT, given)
    course = declared.course(given, carrier.inputs, CONTEXT.seed)
    found = train(declared.job(prepared, carrier, CONTEXT, course), course)
    prepared.module.load_state_dict(found.tensors, strict=False)
    prepared.module.eval()
    return prepared, carrier.with_graph(prepared.written(found.tensors)[0])


def module_outputs(prepared: Prepared, images: Array) -> Array:
    """Run the module with fake quantization, as in evaluation."""
    with torch.no_grad():
        found = prepared.module(x=torch.from_numpy(images))
    return np.asarray(next(iter(found.values())))


def outputs(carrier: Carrier, images: Array) -> Array:
    """Run a model in ONNX Runtime."""
    return next(iter(carrier.runner().run({"x": images}).values()))
