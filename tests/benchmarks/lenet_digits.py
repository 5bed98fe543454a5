"""LeNet-5 and a data set of its size, made of the digits of ``samples/digits``.

A stand-in for MNIST: the handwritten digits, 8 x 8 pixels, are turned, sheared, scaled, moved and
drawn at 28 x 28 with noise. A thousand digits train, other ones choose, and others judge.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.types.tensors import Batch

DIGITS = Path(__file__).parents[2] / "samples" / "digits"
TRAINED, EPOCH, CHOSEN, JUDGED = 1000, 16_000, 10_000, 10_000
STEPS, BATCH, RATE = 2000, 64, 2e-3


class LeNet5(nn.Module):
    """Two convolutions and two linear layers, 431,080 parameters, as Caffe has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[N, 1, 28, 28]`` to logits."""
        x = functional.max_pool2d(self.conv1(image), 2)
        x = functional.max_pool2d(self.conv2(x), 2)
        logits: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return logits


def drawn(images: Tensor, seed: int) -> Tensor:
    """Draw digits ``[N, 8, 8]`` of 0 to 16 at random places and angles: ``[N, 1, 28, 28]``."""
    count, random = len(images), torch.Generator().manual_seed(seed)

    def within(most: float) -> Tensor:
        return (torch.rand(count, generator=random) * 2 - 1) * most

    angle, shear, wide, high = within(0.2), within(0.15), 1.15 + within(0.12), 1.15 + within(0.12)
    places = torch.zeros(count, 2, 3)
    places[:, 0, 0], places[:, 0, 1] = wide * angle.cos(), shear - high * angle.sin()
    places[:, 1, 0], places[:, 1, 1] = wide * angle.sin(), high * angle.cos()
    places[:, 0, 2], places[:, 1, 2] = within(0.1), within(0.1)
    grid = functional.affine_grid(places, [count, 1, 28, 28], align_corners=False)
    found = functional.grid_sample(images[:, None].float() / 16, grid, align_corners=False)
    return found + 0.05 * torch.randn(found.shape, generator=random)


def augment(batch: Batch, rng: np.random.Generator) -> Batch:
    """Draw each digit anew."""
    image = drawn(torch.from_numpy(batch["image"]), int(rng.integers(2**31)))
    return {**batch, "image": image.numpy()}


def write(folder: Path) -> None:
    """Write ``train.npz`` (8 x 8, to be drawn), ``search.npz`` and ``test.npz`` (drawn)."""
    with np.load(DIGITS / "train.npz") as file:
        train = {"image": file["image"], "label": file["label"]}
    with np.load(DIGITS / "test.npz") as file:
        test = {"image": file["image"], "label": file["label"]}
    rows = np.arange(EPOCH) % TRAINED
    np.savez(folder / "train.npz", image=train["image"][rows], label=train["label"][rows])
    held = {name: array[TRAINED:] for name, array in train.items()}
    parts = (("search", held, CHOSEN), ("test", test, JUDGED))
    for seed, (name, digits, count) in enumerate(parts, 1):
        rows = np.arange(count) % len(digits["label"])
        image = drawn(torch.from_numpy(digits["image"][rows]), seed).numpy()
        np.savez(folder / f"{name}.npz", image=image, label=digits["label"][rows])


def trained(folder: Path) -> Path:
    """Train the float network on the digits of ``train.npz``; return its checkpoint."""
    with np.load(folder / "train.npz") as file:
        images, labels = torch.from_numpy(file["image"]), torch.from_numpy(file["label"])
    torch.manual_seed(0)
    network, random = LeNet5(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        rows = torch.randint(len(labels), (BATCH,), generator=random)
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(drawn(images[rows], 100 + step)), labels[rows])
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    target = folder / "lenet5.pt"
    torch.save(network.state_dict(), target)
    return target
