"""Networks of several kinds, lowered once for all tests of the carriers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import Batch, TensorSpec


class Convolutions(nn.Module):
    """Batch-norm, depthwise and transposed convolutions, heights and widths of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.down = nn.Sequential(*(nn.Conv2d(6, 6, 3, 2, 1) for _ in range(3)))
        self.head = nn.Linear(6, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(image))))
        x = self.down(self.up(torch.nn.functional.silu(self.depthwise(x))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A causal transformer block with tied embeddings and a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((32, 32), -torch.inf).triu(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, 4)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(2, 3) / 2 + self.mask[: ids.shape[1], : ids.shape[1]]
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(nn.functional.gelu(self.up(self.second(x)))))


class Pair(nn.Module):
    """Two inputs, and outputs in a dictionary and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(3, 5, bias=False)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        y = self.a(left) + self.b(right)
        return {"sum": y, "more": (y * 2, y.sum(1))}


def spec(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


PLANS: dict[str, tuple[Callable[[], nn.Module], tuple[TensorSpec, ...]]] = {
    "convolutions": (Convolutions, (spec("image", "batch", 3, "height", "width"),)),
    "block": (Block, (spec("ids", "batch", "time", dtype="int64"),)),
    "pair": (Pair, (spec("left", "n", 4), spec("right", "n", 3))),
    "pair in another order": (Pair, (spec("right", "n", 3), spec("left", "n", 4))),
    "pair by position": (Pair, (spec("x", "n", 4), spec("y", "n", 3))),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)),
        (spec("x", "batch", "time", 6),),
    ),
    "fixed": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5)), (spec("x", 2, 2, 3),)),
}


@cache
def lowered(name: str) -> TorchCarrier:
    build, inputs = PLANS[name]
    torch.manual_seed(2)
    return TorchCarrier(build(), inputs)


def batch_of(carrier: TorchCarrier, lengths: dict[str, int]) -> Batch:
    rng = np.random.default_rng(3)
    made = {}
    for own in carrier.inputs:
        shape = [lengths[d] if isinstance(d, str) else d for d in own.shape]
        values = rng.integers(0, 20, shape) if own.dtype == "int64" else rng.normal(size=shape)
        made[own.name] = values.astype(own.dtype)
    return made
