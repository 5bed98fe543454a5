"""ResNet-20 in four bits, trained by the pass's own loop and by two loops of a program.

A table, no assertions. All train the same module on the same images with the same recipe. The plain
loop takes them in the pass's order, the Trainer in its own, which alone moves the accuracy by most
of a point. Accuracy is that of the ONNX file in ONNX Runtime on 2,000 test images.
"""

from __future__ import annotations

import time
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import compressor
from compressor import PreparedModule, RunResult, Spec
from compressor.passes.train.job import Order
from samples.cifar.data import normalize
from tests.benchmarks.bench_prune_resnet20 import images, published
from tests.benchmarks.bench_prune_resnet20 import pytestmark as pytestmark
from tests.benchmarks.bench_resnet20 import show

# With a rate of 0.01, one epoch ends at 16.7 % with the pass's own loop and 18.0 % with the plain.
EPOCHS, BATCH, RATE = 1, 32, 0.003
QAT = {"pass": "qat", "weights": {"bits": 4}, "activations": {"bits": 4}}


def tensors(name: str) -> TensorDataset:
    """Return images as the network takes them, and their classes."""
    held = images(name)
    image = torch.from_numpy(normalize({"image": held["image"]})["image"])
    return TensorDataset(image, torch.from_numpy(held["label"]))


def descent(prepared: PreparedModule, steps: int) -> tuple[SGD, LambdaLR]:
    """Return the optimizer of all loops, and its schedule."""
    optimizer = SGD(prepared.parameters(), lr=RATE, momentum=0.9)
    return optimizer, LambdaLR(optimizer, lambda step: 0.5 * (1 + cos(pi * step / steps)))


def plainly(prepared: PreparedModule, loader: DataLoader[Any]) -> PreparedModule:
    """The plain loop."""
    optimizer, schedule = descent(prepared, EPOCHS * len(loader))
    for _ in range(EPOCHS):
        for image, label in loader:
            loss = cross_entropy(prepared(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return prepared


def by_trainer(prepared: PreparedModule, data: TensorDataset, folder: Path) -> PreparedModule:
    """The Trainer of transformers."""
    steps = EPOCHS * -(-len(data) // BATCH)
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, use_cpu=True,
        max_grad_norm=0, save_strategy="no", report_to="none", remove_unused_columns=False,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"image": image, "labels": label} for image, label in data]
    transformers.Trainer(
        model=prepared, args=arguments, train_dataset=rows, optimizers=descent(prepared, steps),
        compute_loss_func=lambda outputs, labels, **_: cross_entropy(outputs, labels),
    ).train()  # fmt: skip
    return prepared


def row(title: str, result: RunResult, start: float) -> list[str]:
    """Return a line of the table."""
    (artifact,) = result.artifacts
    return [title, f"{artifact.metric:.2f}", f"{time.monotonic() - start:.0f}"]


def test_one_epoch(tmp_path: Path) -> None:
    module = published().module
    train, test = tensors("cifar10_train4000.npz"), tensors("cifar10_test2000.npz")
    order = Order(len(train), BATCH, seed=0)
    steps = [order.rows(step).tolist() for step in range(order.steps_in_epoch)]
    loader = DataLoader(train, batch_sampler=steps)
    start = time.monotonic()
    prepared = compressor.prepare(module, [QAT], train, evaluate=test)
    rows = [row("not trained", compressor.convert(prepared), start)]
    start = time.monotonic()
    rows.append(row("plain loop", compressor.convert(plainly(prepared, loader)), start))
    start = time.monotonic()
    prepared = compressor.prepare(module, [QAT], train, evaluate=test)
    again = by_trainer(prepared, train, tmp_path / "trainer")
    rows.append(row("Trainer", compressor.convert(again), start))
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
