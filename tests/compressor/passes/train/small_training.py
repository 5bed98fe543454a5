"""A small network with data of its own, and what a pass trains it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from compressor.calibration.collect import collect_statistics
from compressor.models.torch.carrier import TorchCarrier
from compressor.run.evaluate import RunSamples
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.types.data import ALONE, Ranks
from compressor.types.tensors import Batch, TensorSpec
from compressor.types.training import Advance, Measure, Rows, Training, TrainingData

INPUTS = (TensorSpec("x", ("batch", 2, 6, 6), "float32"),)
CLASSES = 3


class Small(nn.Module):
    """Convolution, batch norm, dropout and a linear head; sizes that take milliseconds."""

    def __init__(self, dropout: float = 0.1, norm: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        found: Tensor = self.fc(self.drop(torch.relu(self.bn(self.conv(x))).mean((2, 3))))
        return found


def small(dropout: float = 0.1, norm: bool = True) -> TorchCarrier:
    """Return the network with weights that are always the same."""
    torch.manual_seed(7)
    return TorchCarrier(Small(dropout, norm), INPUTS)


class SmallData:
    """Random images whose class is the channel and sign that stands out.

    Args:
        samples: how many.
        noisy: the transform adds noise of its own at each step.
    """

    target: str | None = "label"
    digest = "small"

    def __init__(self, samples: int = 40, noisy: bool = True):
        rng = np.random.default_rng(11)
        self.samples = samples
        self.random = noisy
        self.labels = rng.integers(0, CLASSES, samples)
        self.images = rng.normal(size=(samples, 2, 6, 6)).astype(np.float32)
        self.images[:, 0] += (self.labels[:, None, None] - 1) * 2

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples, with noise if it is wanted."""
        images = self.images[rows]
        if self.random:
            rng = np.random.default_rng(tuple(seed))
            images = images + 0.1 * rng.normal(size=images.shape).astype(np.float32)
        return {"x": images, "label": self.labels[rows]}


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    del description, total

    def advance(done: int, text: str = "") -> None:
        del done, text

    yield advance


def no_model(keys: Any, where: str) -> NoReturn:
    """Open nothing."""
    raise AssertionError((keys, where))


def training(
    folder: Path,
    carrier: TorchCarrier,
    data: TrainingData | None = None,
    metric: Measure | None = ACCURACY,
    ranks: Ranks = ALONE,
    stage: Callable[[str, int], Any] = quiet,
    note: Callable[[str], None] = lambda _: None,
) -> Training:
    """Return what a run would hand to a pass."""
    state, cache = folder / "state", folder / "cache"
    for path in (state, cache):
        path.mkdir(parents=True, exist_ok=True)
    return Training(
        data=data or SmallData(),
        batch=8,
        metric=metric,
        folder=state,
        cache=cache,
        source=carrier,
        open_model=no_model,
        samples=RunSamples(INPUTS, None, 0),
        collect=collect_statistics,
        ranks=ranks,
        stage=stage,
        load_symbol=no_model,
        note=note,
    )
