"""A small BERT at a share of its latency, on a task that is made here.

Tables, no assertions. Each text is a row of tokens: words of four topics, fillers, and a negator,
which takes away what the word behind it says. The answer is the topic that most words speak for.
The encoder is trained on texts that are drawn anew for each step, pruned by ``target: {latency:
...}`` with the defaults, and trained for two epochs of 4,096 texts with the defaults of
``distill``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor import catalog
from compressor.graph.costs import macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, Batch, TensorSpec
from compressor.types.training import Rows
from tests.benchmarks import bench_distill
from tests.benchmarks.bench_prune_untuned import CALIBRATED, SEEDS, latency
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark(seconds=3600)
LENGTH, TOPICS, WORDS, FILLERS = 16, 4, 6, 7
NEGATOR, START = TOPICS * WORDS + FILLERS, TOPICS * WORDS + FILLERS + 1
TOKENS = START + 1
INPUTS = (TensorSpec("tokens", ("batch", LENGTH), "int64"),)
SHARE = 0.7
STEPS, BATCH, RATE = 2000, 64, 0.001
TRAINED, TESTED = 4096, 4000


class Block(nn.Module):
    """A block of BERT, norms last: J. Devlin et al., 2018 (arXiv:1810.04805)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[N, T, width]`` to tokens."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(seen))
        out: Tensor = self.second(x + self.down(functional.gelu(self.up(x))))
        return out


class Bert(nn.Module):
    """An encoder of texts with a pooler."""

    def __init__(self, width: int = 128, heads: int = 4, blocks: int = 4):
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, TOPICS)
        for layer in (self.words, self.places):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[N, 16]`` to logits."""
        x = self.body(self.norm(self.words(tokens) + self.places.weight))
        logits: Tensor = self.head(torch.tanh(self.pooler(x[:, 0])))
        return logits


def texts(count: int, seed: int | Sequence[int]) -> Batch:
    """Draw texts of which one topic leads: ``tokens`` ``[count, 16]`` and ``label`` ``[count]``."""
    rng = np.random.default_rng(seed)
    found: list[tuple[Array, Array]] = []
    while sum(len(label) for _, label in found) < count:
        drawn = rng.integers(0, TOPICS * WORDS + FILLERS, (2 * count, LENGTH))
        drawn[rng.random(drawn.shape) < 0.2] = NEGATOR
        drawn[:, 0] = START
        after = np.roll(drawn, 1, 1) == NEGATOR
        topic = np.where(drawn < TOPICS * WORDS, drawn // WORDS, TOPICS)
        votes = np.stack(
            [np.where(topic == t, 1 - 2 * after, 0).sum(1) for t in range(TOPICS)], axis=1
        )
        two, best = np.sort(votes, 1)[:, -2:].T
        clear = best > two
        found.append((drawn[clear], votes.argmax(1)[clear]))
    tokens, label = (np.concatenate(part)[:count] for part in zip(*found, strict=True))
    return {"tokens": tokens.astype(np.int64), "label": label.astype(np.int64)}


@functools.cache
def trained() -> TorchCarrier:
    """Return the encoder trained by AdamW with a one-cycle learning rate."""
    torch.manual_seed(0)
    module = Bert()
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        batch = texts(BATCH, (1, step))
        found = module(torch.from_numpy(batch["tokens"]))
        loss = functional.cross_entropy(found, torch.from_numpy(batch["label"]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return TorchCarrier(module.eval(), INPUTS)


def accuracy(carrier: Any) -> float:
    """Return the share of right answers on texts that nothing else has seen, in percent."""
    batch = texts(TESTED, 3)
    found = next(iter(carrier.runner().run({"tokens": batch["tokens"]}).values())).argmax(1)
    return 100 * float((found == batch["label"]).mean())


class Calibration:
    """Texts of which no label is read."""

    made_up = False

    def probe(self, count: int) -> Batch:
        """Return the first texts."""
        return {"tokens": texts(CALIBRATED, 2)["tokens"][:count]}

    def batches(self) -> Iterator[Batch]:
        """Yield all of them, 64 at a time."""
        tokens = texts(CALIBRATED, 2)["tokens"]
        for start in range(0, len(tokens), BATCH):
            yield {"tokens": tokens[start : start + BATCH]}


class Texts:
    """Texts to train on."""

    target: str | None = "label"
    digest = "texts"
    random = False

    def __init__(self) -> None:
        self.samples = TRAINED
        self._arrays = texts(TRAINED, 4)

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples."""
        del seed
        return {name: array[rows] for name, array in self._arrays.items()}


def test_at_a_share_of_the_latency(tmp_path: Path) -> None:
    carrier = trained()
    begin = time.process_time()
    options = {"target": {"latency": SHARE}}
    chosen = catalog.load("pass", "prune-structured").model_validate(options)
    outcome = chosen.apply(carrier, PassContext(samples=Calibration()), {})
    seconds = time.process_time() - begin
    for note in outcome.notes:
        print(f"  {note}")
    measured, low, high = latency(outcome.carrier, carrier, tmp_path, Calibration().probe(1))
    found = []
    for seed in SEEDS:
        given = bench_distill.training(
            tmp_path / str(seed), tmp_path / "cache", carrier, data=Texts()
        )
        after = bench_distill.trained("distill", outcome.carrier, seed, given)
        found.append(accuracy(after.carrier))
    show(
        f"BERT of 4 blocks, latency {SHARE:g}; top-1 % on {TESTED:,} texts, two epochs with "
        f"{len(SEEDS)} seeds",
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
