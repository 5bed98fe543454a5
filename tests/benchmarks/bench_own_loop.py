"""ResNet-20 in four bits, trained by the pass's own loop and by a plain loop of a program.

A table, no assertions. Both train the same module on the same images with the same recipe; samples
come in other orders. Accuracy is that of the ONNX file in ONNX Runtime on 2,000 test images.
"""

from __future__ import annotations

import time
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compressor
from compressor import PreparedModule, RunResult, Spec
from samples.cifar.data import normalize
from tests.benchmarks.bench_prune_resnet20 import images, published
from tests.benchmarks.bench_prune_resnet20 import pytestmark as pytestmark
from tests.benchmarks.bench_resnet20 import show

EPOCHS, BATCH, RATE = 1, 32, 0.01
QAT = {"pass": "qat", "weights": {"bits": 4}, "activations": {"bits": 4}}


def tensors(name: str) -> TensorDataset:
    """Return images as the network takes them, and their classes."""
    held = images(name)
    image = torch.from_numpy(normalize({"image": held["image"]})["image"])
    return TensorDataset(image, torch.from_numpy(held["label"]))


def trained(prepared: PreparedModule, loader: DataLoader[Any]) -> PreparedModule:
    """The plain loop."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=RATE, momentum=0.9)
    steps = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + cos(pi * step / steps))
    )
    for _ in range(EPOCHS):
        for image, label in loader:
            loss = nn.functional.cross_entropy(prepared(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return prepared


def row(title: str, result: RunResult, start: float) -> list[str]:
    """Return a line of the table."""
    (artifact,) = result.artifacts
    return [title, f"{artifact.metric:.2f}", f"{time.monotonic() - start:.0f}"]


def test_one_epoch(tmp_path: Path) -> None:
    module = published().module
    train, test = tensors("cifar10_train4000.npz"), tensors("cifar10_test2000.npz")
    torch.manual_seed(0)
    loader = DataLoader(train, BATCH, shuffle=True)
    start = time.monotonic()
    prepared = compressor.prepare(module, [QAT], train, evaluate=test)
    rows = [row("not trained", compressor.convert(prepared), start)]
    rows.append(row("plain loop", compressor.convert(trained(prepared, loader)), start))
    start = time.monotonic()
    recipe = {"epochs": EPOCHS, "optimizer": "sgd", "learning-rate": RATE, "batch": BATCH}
    calibration = {"factory": train, "samples": 512}
    spec = Spec(
        name="own",
        model=module,
        data={"calibration": calibration, "training": train, "evaluation": test},
        passes=[{**QAT, **recipe}],
        exports=[{"format": "onnx", "target": "ort-cpu"}],
        output=tmp_path / "out",
    )
    rows.append(row("the pass", compressor.run(spec), start))
    show("ResNet-20, W4A4, one epoch", ["trained by", "accuracy (%)", "seconds"], rows)
