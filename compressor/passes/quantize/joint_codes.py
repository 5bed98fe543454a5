"""Train codes and scales of all weights together, by what they do to the model's outputs.

A block that is trained by itself gives the float block's output as nearly as it can, and counts all
of that alike. What the network makes of the errors is seen at its outputs alone. So codes and
scales of all layers follow the gradient of the divergence from the float model: Z. Liu et al.,
LLM-QAT, 2023 (arXiv:2305.17888), section 2, where the model writes the text itself that calibration
data give here; scales are trained as in M. Chen et al., EfficientQAT, 2024 (arXiv:2407.11062),
section 3.3. Memory holds the activations of a step's samples in the whole network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.files import scratch
from compressor.graph.values import tensor_spec
from compressor.models.element_types import tensor_of
from compressor.models.executor import GraphModule
from compressor.passes.quantize.code_training import (
    Recipe,
    TrainedWeights,
    quantized,
    rounded_values,
    train_codes,
    values_of,
)
from compressor.passes.quantize.kept_samples import KeptSamples
from compressor.passes.quantize.maths.reconstruct import TrainedCodes
from compressor.passes.quantize.static.latency import Shapes, typical_shapes
from compressor.passes.train.losses import kl_divergence
from compressor.run.blocks.blockwise import Activations
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, fixed_batch

_FLOAT = 4
_OF_WEIGHTS = 8  # what is trained, its gradient, Adam's two, and what it stands for on the way


@dataclass(frozen=True)
class JointCodes:
    """The weights, and the divergence before and after training.

    Attributes:
        weights: by the layer's name; those at first if others are no better.
        before: divergence on the samples held back, in nats a position, at first.
        after: likewise, with these weights.
    """

    weights: dict[str, QuantizedTensor]
    before: float
    after: float


def train_together(
    model: ir.Model,
    start: Mapping[str, tuple[Layer, QuantizedTensor]],
    recipe: Recipe,
    context: PassContext,
    name: str,
) -> JointCodes:
    """Train the codes and scales of weights by the model's first output, scores of classes.

    Args:
        model: the float model.
        start: what training starts from, by the weight's name.
        recipe: how long and how fast.
        context: has the calibration data.
        name: of the pass.

    The same start, data and seed give the same result.
    """
    assert context.samples is not None
    with (
        scratch() as folder,
        context.progress.stage(f"{name}: reconstruct", recipe.steps) as advance,
    ):
        store = Activations(folder)
        samples = KeptSamples(store, recipe.batch, context.seed)
        samples.read(model, context.samples, [value.name or "" for value in model.graph.inputs])
        task = _Task(model, store)
        weights = {
            weight: (layer, TrainedCodes(_matrix(model, layer), codes))
            for weight, (layer, codes) in start.items()
        }

        def backward(group: Sequence[int]) -> None:
            for index in group:
                loss = task.divergence(index, values_of(weights)) / len(group)
                loss.backward()  # type: ignore[no-untyped-call]

        before = _judged(task, samples.held_out, weights)
        train_codes(weights, recipe, samples.drawn(), backward, advance=advance)
        after = _judged(task, samples.held_out, weights)
    if after < before:
        return JointCodes(quantized(weights), before, after)
    return JointCodes({layer.name: codes for layer, codes in start.values()}, before, before)


def training_bytes(
    model: ir.Model,
    layers: Iterable[Layer],
    recipe: Recipe,
    shapes: Shapes,
) -> int:
    """Return the bytes of memory that :func:`train_together` takes at most.

    Args:
        model: the float model.
        layers: those that are trained.
        recipe: says how many samples a step has.
        shapes: those of the model's inputs in a sample, by name.
    """
    values = typical_shapes(model, shapes).values()
    fixed = fixed_batch([tensor_spec(value) for value in model.graph.inputs])
    held = (1 if fixed else recipe.batch) * sum(map(prod, values))
    weights = sum(prod(layer.shape) for layer in layers)
    return _FLOAT * (held + _OF_WEIGHTS * weights)


class _Task:
    """The float model with its data, batch by batch.

    Args:
        store: has its inputs; what it says of them is added.
    """

    def __init__(self, model: ir.Model, store: Activations):
        self._module = GraphModule(model)
        names, self._output = self._module.input_names, self._module.output_names[0]
        with torch.no_grad():
            for batch in store.batches(names):
                given = {name: _tensor(array) for name, array in batch.items()}
                store.append(self._output, self._module(**given)[self._output].numpy())
        self._batches = list(store.batches([*names, self._output]))

    def divergence(self, index: int, replaced: Mapping[str, Tensor]) -> Tensor:
        """Return the mean divergence of a batch from the float model, in nats a position."""
        given = {name: _tensor(array) for name, array in self._batches[index].items()}
        target = given.pop(self._output)
        found = self._module(**given, **replaced)[self._output]
        return kl_divergence(found, target, 1.0).mean()


@torch.no_grad()
def _judged(task: _Task, held_out: Sequence[int], weights: TrainedWeights) -> float:
    replaced = rounded_values(weights)
    return sum(float(task.divergence(index, replaced)) for index in held_out) / len(held_out)


def _matrix(model: ir.Model, layer: Layer) -> Tensor:
    weight = tensor_of(model.graph.initializers[layer.weight])
    return layer.canonical(weight).to(torch.float32)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array.copy())  # arrays in files cannot be written to: PyTorch warns
