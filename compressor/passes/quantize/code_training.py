"""Train the codes and scales of weights by gradient descent on any error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from compressor.passes.quantize.maths.reconstruct import TrainedCodes, rate_share
from compressor.progress import Advance
from compressor.types.layers import Layer, QuantizedTensor

TrainedWeights: TypeAlias = Mapping[str, tuple[Layer, TrainedCodes]]
"""Weights that are trained, by the name of the weight."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast codes and scales are trained.

    Attributes:
        steps: of gradient descent.
        batch: samples in a step.
        rate: learning rate of codes at first.
        size_rate: learning rate of scales at first, as a share of what they were.
        memory: share of what Adam knows of squared gradients that it keeps in each step. Its usual
            0.999 remembers more steps than are taken, and the first have the largest gradients.
    """

    steps: int = 100
    batch: int = 32
    rate: float = 0.05
    size_rate: float = 0.005
    memory: float = 0.999


def values_of(weights: TrainedWeights) -> dict[str, Tensor]:
    """Return what codes stand for now, in the weights' stored shapes, with gradients."""
    return {name: layer.stored(codes.weight()) for name, (layer, codes) in weights.items()}


def rounded_values(weights: TrainedWeights) -> dict[str, Tensor]:
    """Return the same without gradients, with scales as they will be stored."""
    return {
        name: layer.stored(codes.quantized().dequantize())
        for name, (layer, codes) in weights.items()
    }


def quantized(weights: TrainedWeights) -> dict[str, QuantizedTensor]:
    """Return the codes and scales as they are now, by the layer's name."""
    return {layer.name: codes.quantized() for layer, codes in weights.values()}


def train_codes(
    weights: TrainedWeights,
    recipe: Recipe,
    groups: Iterator[Sequence[int]],
    backward: Callable[[Sequence[int]], None],
    *,
    factors: Iterable[Tensor] = (),
    advance: Advance | None = None,
) -> None:
    """Train with Adam, a group of batches for each step.

    Args:
        weights: changed in place.
        recipe: how long and how fast.
        groups: yields the numbers of a step's batches.
        backward: adds the gradients of a group of batches to what is trained.
        factors: further numbers that are trained, at the rate of scales.
        advance: told the number of finished steps.
    """
    codes = [codes for _, codes in weights.values()]
    parts = [
        {"params": [x.latent for x in codes], "lr": recipe.rate},
        {"params": [*(x.size for x in codes), *factors], "lr": recipe.size_rate},
    ]
    parts = [part for part in parts if part["params"]]
    if not parts:
        return
    optimizer = torch.optim.Adam(parts, betas=(0.9, recipe.memory))
    rates = LambdaLR(optimizer, lambda step: rate_share(step, recipe.steps))
    for group, step in zip(groups, range(recipe.steps), strict=False):
        optimizer.zero_grad()
        backward(group)
        optimizer.step()
        rates.step()
        if advance is not None:
            advance(step + 1)
