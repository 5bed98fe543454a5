"""Train the scales of all weights together, by what they do to the model's outputs.

A block that is trained by itself gives the float block's output as nearly as it can, and counts all
of that alike. What the network makes of the errors is seen at its outputs alone. So the codes stay,
and the scales follow the gradient of the divergence from the float model: M. Chen et al.,
EfficientQAT, 2024 (arXiv:2407.11062), section 3.3, where labels stand in place of the float model.
Training codes here as well gains less: each has too few samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from compressor.models.executor import GraphModule
from compressor.passes.quantize.maths.reconstruct import TrainedScales, rate_share
from compressor.passes.train.losses import kl_divergence
from compressor.progress import Advance
from compressor.run.scores import class_axis
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.tensors import Array, Batch


@dataclass(frozen=True)
class JointTask:
    """A whole model with its data, batch by batch.

    Attributes:
        module: the float model.
        inputs: what it reads.
        output: name of the output that holds scores of classes.
        targets: the float model's, by the output's name.
    """

    module: GraphModule
    inputs: Sequence[Batch]
    output: str
    targets: Sequence[Batch]

    def divergence(self, index: int, replaced: Mapping[str, Tensor]) -> Tensor:
        """Return the mean divergence of a batch from the float model, in nats a position."""
        batch = self.inputs[index]
        given = {name: _tensor(batch[name]) for name in self.module.input_names}
        found = self.module(**given, **replaced)[self.output]
        target = _tensor(self.targets[index][self.output])
        axis = class_axis(tuple(found.shape))
        return kl_divergence(found.movedim(axis, -1), target.movedim(axis, -1), 1.0).mean()


@dataclass(frozen=True)
class JointRecipe:
    """How long and how fast scales are trained.

    Attributes:
        steps: of gradient descent.
        rate: at which scales move at first, as a share of what they were.
    """

    steps: int
    rate: float


@dataclass(frozen=True)
class JointScales:
    """What became of the scales.

    Attributes:
        weights: by the layer's name; those at first if others are no better.
        before: divergence on the samples held back, in nats a position, at first.
        after: likewise, with these weights.
    """

    weights: dict[str, QuantizedTensor]
    before: float
    after: float


def train_scales(
    task: JointTask,
    weights: Mapping[str, tuple[Layer, QuantizedTensor]],
    groups: Iterator[Sequence[int]],
    held: Sequence[int],
    recipe: JointRecipe,
    advance: Advance,
) -> JointScales:
    """Train the scales of weights; codes and zero points stay.

    Args:
        weights: by the initializer's name.
        groups: the batches of each step.
        held: batches that judge.
        recipe: how long and how fast.
        advance: called with the number of steps that are done.
    """
    scales = {name: (layer, TrainedScales(start)) for name, (layer, start) in weights.items()}
    before = _judged(task, held, scales)
    sizes = [trained.size for _, trained in scales.values()]
    optimizer = torch.optim.Adam(sizes, lr=recipe.rate)
    rates = LambdaLR(optimizer, lambda step: rate_share(step, recipe.steps))
    for step, group in zip(range(recipe.steps), groups, strict=False):
        optimizer.zero_grad()
        for index in group:
            replaced = {n: layer.stored(x.weight()) for n, (layer, x) in scales.items()}
            loss = task.divergence(index, replaced) / len(group)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        advance(step + 1)
    after = _judged(task, held, scales)
    if after < before:
        return JointScales({x.name: s.quantized() for x, s in scales.values()}, before, after)
    return JointScales({x.name: start for x, start in weights.values()}, before, before)


@torch.no_grad()
def _judged(
    task: JointTask, held: Sequence[int], scales: Mapping[str, tuple[Layer, TrainedScales]]
) -> float:
    replaced = {n: layer.stored(x.quantized().dequantize()) for n, (layer, x) in scales.items()}
    return sum(float(task.divergence(index, replaced)) for index in held) / len(held)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array.copy())  # arrays in files cannot be written to: PyTorch warns
