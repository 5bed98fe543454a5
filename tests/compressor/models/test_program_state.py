"""Modules whose next call sees what forward wrote are refused; a file would forget it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.errors import ModelError
from compressor.models.torch.carrier import TorchCarrier
from tests.compressor.models.sample_modules import spec

pytestmark = pytest.mark.usefixtures("lowered_each_time")


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.ema: Tensor
        self.mean: Tensor
        self.calls: Tensor


class Assigned(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.mean(0)
        return x - self.ema


class InPlace(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = x - self.ema
        self.ema.mul_(0.9)
        return y


@pytest.mark.parametrize("kind", [Assigned, InPlace])
def test_a_buffer_that_is_read_and_written_is_a_state(kind: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(3, 3), kind())
    with pytest.raises(ModelError) as caught:
        TorchCarrier(module, [spec("x", "batch", 3)]).graph()
    assert str(caught.value) == (
        "module Sequential: writes '1.ema' in forward and reads it in the next call, and a file "
        "keeps nothing between calls; take it as an input and return its next value, which data "
        "carry from step to step (samples: feeds, state: {INPUT: OUTPUT}); or write it in training "
        "alone (if self.training), which leaves it as it is stored"
    )


class Counting(Kept):
    """Writes a count and the last mean, and reads neither."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = x.mean(0)
        return x - self.mean + len(self.ema)


class OfTheBatch(Kept):
    """Normalizes by the batch, and so only writes running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.ema, training=True)


class InTraining(Kept):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.mean(0)
        return x - self.ema


class AsInput(nn.Module):
    def forward(self, x: Tensor, ema: Tensor) -> tuple[Tensor, Tensor]:
        ema = 0.9 * ema + 0.1 * x.mean(0)
        return x - ema, ema


@pytest.mark.parametrize("module", [Counting(), OfTheBatch(), InTraining(), nn.BatchNorm1d(3)])
def test_what_no_later_call_reads_is_no_state(module: nn.Module) -> None:
    graph = TorchCarrier(module, [spec("x", "batch", 3)]).graph()
    assert [value.name for value in graph.graph.outputs] == ["output"]


def test_the_remedy_is_taken() -> None:
    graph = TorchCarrier(AsInput(), [spec("x", "batch", 3), spec("ema", 3)]).graph()
    assert [value.name for value in graph.graph.outputs] == ["output_0", "output_1"]


class WritesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        x[:, 0] = 0
        return x + 1


def test_a_forward_that_writes_into_its_input_leaves_the_samples() -> None:
    """The graph read what the module had left, and was refused as one with other values."""
    carrier = TorchCarrier(WritesItsInput(), [spec("x", "batch", 3)])
    batch = {"x": np.ones((2, 3), np.float32)}
    (own,) = carrier.module_outputs(batch)
    assert (batch["x"] == 1).all()
    (lowered,) = carrier.runner().run(batch).values()
    assert own.tolist() == lowered.tolist() == [[1, 3, 3]] * 2
