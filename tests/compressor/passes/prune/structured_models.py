"""Small networks and data for tests of prune-structured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.calibration.collect import collect
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import clock
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.run.evaluate import RunSamples
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, Batch, TensorSpec

IMAGE = TensorSpec("image", ("batch", 3, 10, 10), "float32")
CONTEXT = PassContext()


def timed_by(patch: pytest.MonkeyPatch, seconds: Callable[[ir.Model], float]) -> None:
    """Let graphs take the seconds that a formula gives them; none is run to be timed."""

    def timed(_: clock.TimingTable, models: Sequence[tuple[ir.Model, Batch]]) -> list[float]:
        return [seconds(model) for model, _ in models]

    def compared(_: clock.TimingTable, smaller: ir.Model, whole: ir.Model) -> float:
        return seconds(smaller) / seconds(whole)

    patch.setattr(clock.TimingTable, "_timed", timed)
    patch.setattr(clock.TimingTable, "_compared", compared)


class Residual(nn.Module):
    """A stem whose channels a residual block adds to, a wider layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 12, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(12)
        self.outer = nn.Conv2d(12, 16, 3, padding=1)
        self.outer_norm = nn.BatchNorm2d(16)
        self.wide = nn.Conv2d(16, 32, 3, padding=1)
        self.wide_norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_norm(self.stem(image)))
        x = torch.relu(x + self.outer_norm(self.outer(torch.relu(self.inner_norm(self.inner(x))))))
        return self.head(torch.relu(self.wide_norm(self.wide(x))).mean((2, 3)))


class Plain(nn.Module):
    """No normalization: two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(image))))
        return self.head(x.mean((2, 3)))


class LayerNormed(nn.Module):
    """Features that a layer norm mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(image.mean((1, 2))))
        return self.head(torch.relu(self.hidden(x)))


def carrier(module: nn.Module, seed: int = 0) -> TorchCarrier:
    """Give a module random weights and statistics."""
    torch.manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.3)
        if "norm.weight" in name or "running_var" in name:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return TorchCarrier(module.eval(), [IMAGE])


@dataclass(frozen=True)
class Given:
    """Calibration data in memory; see compressor.types.data.Samples."""

    data: tuple[Batch, ...]
    made_up: bool = False

    def probe(self, count: int) -> Batch:
        """Return the first samples."""
        return {name: array[:count] for name, array in self.data[0].items()}

    def batches(self) -> Iterator[Batch]:
        """Yield all."""
        yield from self.data


def data(batches: int = 3, seed: int = 1) -> Given:
    """Normal random batches of eight samples."""
    random = np.random.default_rng(seed)
    shape = [8, 3, 10, 10]
    return Given(
        tuple({"image": random.standard_normal(shape, np.float32)} for _ in range(batches))
    )


def declared(**options: Any) -> PruneStructured:
    """Return the pass; option names as in Python."""
    return PruneStructured.model_validate(options, strict=False)


def pruned(
    step: PruneStructured, model: Carrier, given: Given | None = None, seed: int = 0
) -> Outcome:
    """Survey, collect and apply as a run does; without data on made-up samples."""
    context = PassContext(seed)
    survey = step.survey(model, context)
    statistics: dict[str, Any] = {}
    if survey.requests:
        assert given is not None
        runner = model.runner(list(dict.fromkeys(r.tensor for r in survey.requests)))
        statistics = collect(runner.run, given.batches(), survey.requests)
    samples = given or RunSamples(model.inputs, None, seed)
    return step.apply(model, replace(context, samples=samples), statistics)


def output(model: Carrier, batch: Batch) -> Array:
    """Run a carrier; its first output."""
    return next(iter(model.runner().run(batch).values()))


def shapes(model: Carrier) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all layers' weights."""
    return {layer.name: layer.shape for layer in model.layers()}
