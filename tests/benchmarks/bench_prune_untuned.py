"""Networks that no default was chosen on, at a share of their latency: made here of the sample.

Tables, no assertions. A residual network of 56 layers and a vision transformer are trained on the
project's handwritten digits, pruned by ``target: {latency: ...}`` with the defaults, and trained
for two epochs with the defaults of ``distill``. Accuracy is that on the sample's 500 test digits;
latency is measured in ONNX Runtime on one thread, at batch 1, interleaved with the float model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor import catalog
from compressor.exporters import OnnxExporter
from compressor.graph.costs import macs
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.run.timing.timing import already_open, measure
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec
from compressor.types.training import Rows
from samples.digits.data import augment, normalize
from samples.digits.model import CLASSES, ResidualBlock
from samples.digits.train import load, shuffled
from tests.benchmarks import bench_distill
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark(seconds=3600)
INPUTS = (TensorSpec("image", ("batch", 1, 8, 8), "float32"),)
SEEDS = (0, 1, 2)
CALIBRATED = 512  # digits, of which no label is read
THREADS = 1


class Deep(nn.Module):
    """A residual network of 56 layers: K. He et al., Deep residual learning, 2015, section 4.2."""

    def __init__(self, widths: Sequence[int] = (16, 32, 64), blocks: int = 9):
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        body: list[nn.Module] = []
        before = widths[0]
        for width in widths:
            for index in range(blocks):
                body.append(ResidualBlock(before, width, 2 if index == 0 and width > before else 1))
                before = width
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map images ``[N, 1, 8, 8]`` to logits."""
        x = self.body(torch.relu(self.bn(self.stem(image))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Encoder(nn.Module):
    """A block of a transformer, norms first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[N, T, width]`` to tokens."""
        y = self.first(x)
        q, k, v = (
            layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Patches(nn.Module):
    """A vision transformer on 16 patches of 2x2: A. Dosovitskiy et al., 2020 (arXiv:2010.11929)."""

    def __init__(self, width: int = 96, heads: int = 6, blocks: int = 6):
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.body = nn.Sequential(*(Encoder(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map images ``[N, 1, 8, 8]`` to logits."""
        x = self.embed(image).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.body(x)).mean(1))
        return logits


@dataclass(frozen=True)
class Candidate:
    """A network, how it is trained here, and the share of its time that is wanted."""

    build: Callable[[], nn.Module]
    rate: float
    epochs: int
    share: float


CANDIDATES = {
    "residual network, 56 layers": Candidate(Deep, 0.003, 12, 0.62),
    "vision transformer, 6 blocks": Candidate(Patches, 0.003, 30, 0.7),
}


@functools.cache
def trained(name: str) -> TorchCarrier:
    """Return a candidate trained by AdamW with a one-cycle learning rate."""
    candidate = CANDIDATES[name]
    torch.manual_seed(0)
    module, data, rng = candidate.build(), load("train"), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, candidate.rate, total_steps=candidate.epochs * (len(data["label"]) // 64)
    )
    for _ in range(candidate.epochs):
        for image, label in shuffled(data, rng):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(module(image), label))
            optimizer.step()
            schedule.step()
    return TorchCarrier(module.eval(), INPUTS)


def accuracy(carrier: Any) -> float:
    """Return the share of right answers on the test digits in percent."""
    batch = normalize(load("test"))
    found = next(iter(carrier.runner().run({"image": batch["image"]}).values())).argmax(1)
    return 100 * float((found == batch["label"]).mean())


class Calibration:
    """The first training digits as they are."""

    made_up = False

    def probe(self, count: int) -> Batch:
        """Return the first digits."""
        return normalize({"image": load("train")["image"][:count]})

    def batches(self) -> Iterator[Batch]:
        """Yield all of them, a hundred at a time."""
        images = load("train")["image"][:CALIBRATED]
        for start in range(0, len(images), 100):
            yield normalize({"image": images[start : start + 100]})


class Digits:
    """The training digits, shifted at random."""

    target: str | None = "label"
    digest = "digits"
    random = True

    def __init__(self) -> None:
        self._arrays = load("train")
        self.samples = len(self._arrays["label"])

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples, transformed."""
        rng = np.random.default_rng(tuple(seed))
        return augment({name: array[rows] for name, array in self._arrays.items()}, rng)


def latency(carrier: Any, whole: Any, folder: Path, batch: Batch) -> tuple[float, float, float]:
    """Return the share of the float model's time, and its interval of 95 %."""
    runners = {}
    for name, one in (("pruned", carrier), ("float", whole)):
        own = folder / name
        own.mkdir()
        exporter = OnnxExporter(opset=21, target="ort-cpu")
        path = exporter.write(one, own, ExportContext(name, ""))[0]
        runners[name] = OrtRunner(path, name, threads=THREADS)
    ratio = measure(already_open(runners), [batch], budget=20.0, precision=0.01)
    found = ratio.ratio("pruned", "float")
    low, high = found["ci95"]
    return found["value"], low, high


@pytest.mark.parametrize("name", CANDIDATES)
def test_at_a_share_of_the_latency(name: str, tmp_path: Path) -> None:
    carrier, share = trained(name), CANDIDATES[name].share
    begin = time.process_time()
    chosen = catalog.load("pass", "prune-structured").model_validate({"target": {"latency": share}})
    outcome = chosen.apply(carrier, PassContext(samples=Calibration()), {})
    seconds = time.process_time() - begin
    for note in outcome.notes:
        print(f"  {note}")
    measured, low, high = latency(outcome.carrier, carrier, tmp_path, Calibration().probe(1))
    found = []
    for seed in SEEDS:
        given = bench_distill.training(
            tmp_path / str(seed), tmp_path / "cache", carrier, data=Digits()
        )
        after = bench_distill.trained("distill", outcome.carrier, seed, given)
        found.append(accuracy(after.carrier))
    show(
        f"{name}, latency {share:g}; top-1 % on 500 digits, two epochs with {len(SEEDS)} seeds",
        ["float", "one shot", "2 epochs", "range", "MACs", "latency", "95 %", "CPU s"],
        [
            [
                f"{accuracy(carrier):.2f}",
                f"{accuracy(outcome.carrier):.2f}",
                f"{np.mean(found):.2f}",
                f"{min(found):.2f}-{max(found):.2f}",
                f"{macs(outcome.carrier.graph()) / macs(carrier.graph()):.3f}",
                f"{measured:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{seconds:.0f}",
            ]
        ],
    )
