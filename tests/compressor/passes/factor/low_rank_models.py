"""Networks for tests of low-rank, and what applies the pass as a run does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compressor.graph.blocks import partition
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.factor.low_rank import LowRank
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Array, TensorSpec

CONTEXT = PassContext()
IMAGE = TensorSpec("image", ("batch", 3, 8, 8), "float32")


class Pictures(nn.Module):
    """Convolutions that can be factored and that cannot, batch-norms, and layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.point = nn.Conv2d(16, 12, 1)
        self.wide = nn.ConvTranspose2d(12, 12, 2, stride=2)
        self.narrow = nn.Conv2d(12, 12, (1, 3))
        self.fc = nn.Linear(12, 20)
        self.thin = nn.Linear(20, 1)
        self.last = nn.Linear(20, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.body(torch.relu(self.stem_norm(self.stem(image)))))
        x = torch.relu(self.wide(torch.relu(self.point(torch.relu(self.grouped(x))))))
        x = torch.relu(self.fc(torch.relu(self.narrow(x)).mean((2, 3))))
        return self.last(x) * self.thin(x)


@cache
def pictures() -> TorchCarrier:
    """Return the network with weights whose singular values fall off."""
    torch.manual_seed(0)
    module = Pictures()
    for parameter in module.parameters():
        if parameter.ndim > 1:
            matrix = parameter.detach().flatten(1)
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
            values = values * 0.7 ** torch.arange(len(values))
            parameter.data = (left @ values.diag() @ right).reshape(parameter.shape)
    module.stem_norm.running_var.uniform_(0.5, 1.5)
    return TorchCarrier(module, [IMAGE])


def pixels(count: int = 8, seed: int = 0) -> Array:
    """Return images in which neighbouring pixels and the three colours are alike."""
    images = np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)
    images[:, 1:] = images[:, :1] + 0.2 * images[:, 1:]
    return images + np.roll(images, 1, 2) + np.roll(images, 1, 3)


def declared(**options: Any) -> LowRank:
    """Return the pass; option names as in Python."""
    if "layers" in options:
        options["layers"] = tuple(options["layers"])
    return LowRank.model_validate(options)


def applied(step: LowRank, model: Carrier, folder: Path) -> Outcome:
    """Survey and apply as a run does."""
    survey = step.survey(model, CONTEXT)
    if not step.by_block:
        assert not survey.requests
        return step.apply(model, CONTEXT, {})
    feed = Feed([{"image": pixels(seed=s)} for s in range(6)], folder)
    graph = model.graph()
    blocks = GraphBlocks(graph, partition(graph), survey.requests, feed)
    return step.apply(model, replace(CONTEXT, blocks=blocks), {})


def ranks(outcome: Outcome) -> dict[str, int]:
    """Return the rank of each layer that was factored."""
    ends = (row.name.removesuffix(".up") for row in outcome.layers)
    return {
        name: row.details["rank"]
        for name, row in zip(ends, outcome.layers, strict=True)
        if row.name.endswith(".up")
    }


def logits(model: Carrier, images: Array) -> Array:
    """Run a model."""
    return next(iter(model.runner().run({"image": images}).values()))
