"""Networks, and what applies a pass to them, for tests of passes that prune single weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compressor.graph.blocks import partition
from compressor.models.torch.carrier import TorchCarrier
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, Pass, PassContext
from compressor.types.tensors import Batch, TensorSpec

ANY = PassContext()
WIDTH, INNER, WORDS = 32, 48, 19
TOKENS = TensorSpec("tokens", ("batch", "sequence"), "int64")
IMAGE = TensorSpec("image", ("batch", 3, 8, 8), "float32")


class Language(nn.Module):
    """Two residual blocks, whose inputs are correlated, between a table and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        x = x + x.cumsum(1) / 4
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            x = x + down(torch.sigmoid(gate(x)) * up(x))
        return self.lm_head(x)


class Pictures(nn.Module):
    """Convolutions of every kind, one of which cannot take any groups, and layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 12, 1)
        self.wide = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.fc = nn.Linear(6, 10)
        self.last = nn.Linear(10, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.body(torch.relu(self.stem(image))))
        x = torch.relu(self.point(torch.relu(self.depth(torch.relu(self.grouped(x))))))
        x = torch.relu(self.wide(x)).mean((2, 3))
        return self.last(torch.relu(self.fc(x)))


def carrier(module: nn.Module, spec: TensorSpec) -> TorchCarrier:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5)
    return TorchCarrier(module, [spec])


@cache
def language() -> TorchCarrier:
    return carrier(Language(), TOKENS)


@cache
def pictures() -> TorchCarrier:
    return carrier(Pictures(), IMAGE)


def batches(spec: TensorSpec, count: int = 6, seed: int = 0) -> list[Batch]:
    random = np.random.default_rng(seed)
    if spec is TOKENS:
        return [{"tokens": random.integers(0, WORDS, (8, 16))} for _ in range(count)]
    images = random.standard_normal((count, 8, 3, 8, 8), np.float32)
    # Neighbouring pixels are alike, as in pictures.
    return [{"image": batch + np.roll(batch, 1, 2) + np.roll(batch, 1, 3)} for batch in images]


def applied(declared: Pass, model: TorchCarrier, folder: Path) -> Outcome:
    """Survey and apply a pass as a run does."""
    survey = declared.survey(model, ANY)
    if not declared.by_block:
        assert not survey.requests
        return declared.apply(model, ANY, {})
    graph = model.graph()
    (spec,) = model.inputs
    feed = Feed(batches(spec), folder)
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    return declared.apply(model, replace(ANY, blocks=blocks), {})


def reasons(declared: Pass, model: Carrier) -> dict[str, str]:
    return {row.name: row.reason for row in declared.survey(model, ANY).layers}


def weights(model: Carrier) -> Mapping[str, torch.Tensor]:
    return {layer.name: model.weight(layer) for layer in model.layers()}


def all_but(model: Carrier, name: str) -> list[dict[str, Any]]:
    """Rules by which one layer alone is pruned."""
    return [{"match": x.name, "skip": True} for x in model.layers() if x.name != name]


def output_error(model: Carrier, other: Carrier, name: str) -> float:
    """Relative squared error of a layer's output on data that was not calibrated with.

    That is what criteria minimize; errors of several layers may cancel out by chance.
    """
    spec = TOKENS if model.inputs[0].name == "tokens" else IMAGE
    (tap,) = (x.output for x in model.layers() if x.name == name)
    batch = batches(spec, 1, seed=9)[0]
    want, found = (m.runner([tap]).run(batch)[tap] for m in (model, other))
    return float(np.square(want - found).sum() / np.square(want).sum())
