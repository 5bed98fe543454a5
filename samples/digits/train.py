"""Train the digits network and write `digits.pt`, a plain state dict.

Run `python -m samples.digits.train`; it takes about ten seconds on one CPU core.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from samples.digits.data import Batch, augment, normalize
from samples.digits.model import digits_net

HERE = Path(__file__).parent
SEED = 0
EPOCHS = 20
BATCH = 64
PEAK_RATE = 0.01


def load(split: str) -> Batch:
    """Return the arrays of `train` or `test` as stored: `image` and `label`."""
    with np.load(HERE / f"{split}.npz") as file:
        return {name: file[name] for name in ("image", "label")}


def shuffled(data: Batch, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of augmented batches; the incomplete last batch is left out."""
    order = rng.permutation(len(data["label"]))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        rows = order[start : start + BATCH]
        batch = augment({name: values[rows] for name, values in data.items()}, rng)
        yield torch.from_numpy(batch["image"]), torch.from_numpy(batch["label"])


def train(epochs: int = EPOCHS, seed: int = SEED) -> nn.Module:
    """Return the network after `epochs` of AdamW with a one-cycle learning rate.

    The test split plays no part: nothing is selected or stopped by it.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, data = digits_net(), load("train")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = epochs * (len(data["label"]) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for image, label in shuffled(data, rng):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(image), label))
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.inference_mode()
def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the test split in percent."""
    batch = normalize(load("test"))
    predicted = model(torch.from_numpy(batch["image"])).argmax(1).numpy()
    return 100 * float((predicted == batch["label"]).mean())


def main() -> None:
    """Train, print accuracy and time, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE / "digits.pt")
    output: Path = parser.parse_args().output
    torch.set_num_threads(1)  # as quick as two at this size, and steadier on a busy machine
    start = time.perf_counter()
    model = train()
    print(f"{accuracy(model):.1f} % of the test digits, {time.perf_counter() - start:.0f} s")
    torch.save(model.state_dict(), output)


if __name__ == "__main__":
    main()
