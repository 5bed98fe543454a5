"""Train the rounding of weights and the steps of activations, block by block, without labels.

Each block learns to give the float block's outputs: Y. Li et al., BRECQ, 2021 (arXiv:2102.05426),
section 3. Some samples come from the float blocks before it, and others from the quantized ones,
and some activations in it are not rounded, drawn at random: X. Wei et al., QDrop, 2022
(arXiv:2203.05740). The steps of activations are trained as in S. Esser et al., Learned step size
quantization, 2020 (arXiv:1902.08153). Memory holds what enters and leaves one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import ModelError, SpecError
from compressor.files import scratch
from compressor.graph.blocks import GraphBlock, block_outputs, extract_block, partition
from compressor.models.element_types import tensor_of
from compressor.models.executor import GraphModule
from compressor.models.torch.smaller_module import check_executable
from compressor.passes.quantize.code_training import (
    Recipe,
    quantized,
    rounded_values,
    train_codes,
    values_of,
)
from compressor.passes.quantize.kept_samples import KeptSamples
from compressor.passes.quantize.maths.reconstruct import TrainedCodes, relative_error
from compressor.passes.quantize.rounded_graph import Drop, RoundedValue, with_rounding
from compressor.run.blocks.blockwise import Activations
from compressor.types.layers import Layer, QuantizedTensor
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, Batch


@dataclass(frozen=True)
class Reconstructed:
    """The trained weights and activations.

    Attributes:
        weights: by the layer's name.
        activations: by the value's name, with the steps that were trained.
        errors: by the layer's name, the squared error of its block's outputs on the samples held
            back, as a share of their squares: with the codes at first, and with those that its own
            training ended with.
    """

    weights: dict[str, QuantizedTensor]
    activations: dict[str, RoundedValue]
    errors: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Start:
    """The model and the codes that training starts from.

    Attributes:
        model: a graph in which nothing is quantized yet.
        layers: those whose weights are trained.
        weights: return the quantized weights, by the layer's name.
        activations: how values are rounded, by their names.
    """

    model: ir.Model
    layers: Sequence[Layer]
    weights: Mapping[str, Callable[[], QuantizedTensor]]
    activations: Mapping[str, RoundedValue]
    recipe: Recipe


def check_reconstruction(model: ir.Model, option: str) -> None:
    """Check that a graph can be trained in PyTorch, which an option asks for.

    Raises:
        SpecError: naming the first operator that cannot.
    """
    try:
        check_executable(model)
    except ModelError as error:
        raise SpecError(
            option,
            f"is reconstruct, which trains in PyTorch, and {error.subject}: {error.problem}",
            "set it to gptq",
        ) from error


def reconstruct(start: Start, context: PassContext, name: str) -> Reconstructed:
    """Train on the calibration data; a block that gains nothing keeps what it had.

    ``name`` is the pass's. The same start, data and seed give the same result.
    """
    blocks, samples = partition(start.model), context.samples
    assert samples is not None
    title = f"{name}: reconstruct"
    with scratch() as folder, context.progress.stage(title, len(blocks)) as advance:
        walk = _Walk(start, folder, context.seed)
        walk.samples.read(start.model, samples, {n for block in blocks for n in block.inputs})
        for index, block in enumerate(blocks):
            walk.visit(block, {name for later in blocks[index + 1 :] for name in later.inputs})
            advance(index + 1)
        return walk.result


@dataclass(frozen=True)
class _Task:
    """One block with its data, batch by batch.

    Attributes:
        module: the block with rounding; weights are those at first.
        entry: name of what it reads from the block before; ``None`` in the first.
        floats: what it reads, as the float blocks give it.
        rounded: its entry, as the quantized blocks before give it; nothing in the first.
        targets: what the float block makes of ``floats``.
    """

    module: GraphModule
    entry: str | None
    floats: Sequence[Batch]
    rounded: Sequence[Batch]
    targets: Sequence[Batch]

    def inputs(self, index: int, drop: Drop) -> dict[str, Tensor]:
        """Return a batch of what the block reads; in training, some samples come as floats."""
        inputs = _tensors({**self.floats[index], **self.rounded[index]})
        if self.entry is not None:
            exact = torch.from_numpy(np.array(self.floats[index][self.entry]))
            inputs[self.entry] = drop(exact, inputs[self.entry])
        return inputs

    def error(self, index: int, drop: Drop, replaced: Mapping[str, Tensor]) -> Tensor:
        """Return the error of the block's outputs for a batch, with some initializers replaced."""
        inputs = self.inputs(index, drop)
        given = {name: inputs[name] for name in self.module.input_names}
        outputs = self.module(**given, **replaced)
        targets = _tensors(self.targets[index])
        return relative_error(list(outputs.values()), [targets[name] for name in outputs])


class _Walk:
    """Visits the blocks in the order of execution."""

    def __init__(self, start: Start, folder: Path, seed: int):
        self.result = Reconstructed({}, dict(start.activations), {})
        self._start, self._model = start, start.model
        self._graph, self._steps = with_rounding(start.model, start.activations)
        self._layers = {layer.weight: layer for layer in start.layers}
        self._drop = Drop(seed)
        self._floats, self._rounded = (Activations(folder / x) for x in ("floats", "rounded"))
        for name in ("floats", "rounded"):
            (folder / name).mkdir()
        self.samples = KeptSamples(self._floats, start.recipe.batch, seed)
        # activations that are not trained any more
        self._seen = {name for name, value in start.activations.items() if value.exact}

    def visit(self, block: GraphBlock, later: Collection[str]) -> None:
        """Train a block, and run it for what the next one starts from.

        Args:
            later: inputs of the model that later blocks read.
        """
        outputs, kept = block_outputs(self._model, block), [block.exit] if block.exit else []
        entry = [block.entry] if block.entry else []
        floats = list(self._floats.batches([*entry, *block.inputs]))
        exact = GraphModule(extract_block(self._model, block, outputs, {}))
        _run(exact, map(_tensors, floats), self._floats)
        layers = [self._layers[name] for name in block.weights if name in self._layers]
        fresh = [layer for layer in layers if layer.name not in self.result.weights]
        for layer in fresh:
            self.result.weights[layer.name] = self._start.weights[layer.name]()
        rounded = list(self._rounded.batches(entry)) if entry else [{}] * len(floats)
        targets = list(self._floats.batches(outputs))
        task = _Task(self._module(block, outputs, layers), block.entry, floats, rounded, targets)
        if self._train(task, fresh):
            task = replace(task, module=self._module(block, outputs, layers))
        if kept:
            inputs = (task.inputs(index, self._drop) for index in range(len(floats)))
            _run(task.module, inputs, self._rounded)
        self._floats.keep([*later, *kept])
        self._rounded.keep(kept)

    def _module(
        self, block: GraphBlock, outputs: Sequence[str], layers: Iterable[Layer]
    ) -> GraphModule:
        """Return a block with rounding, with weights and steps as they are now."""
        changes = {
            layer.weight: layer.stored(self.result.weights[layer.name].dequantize())
            for layer in layers
        }
        part = extract_block(self._graph, block, outputs, changes)
        return GraphModule(part, operators=self._drop.operators)

    def _train(self, task: _Task, layers: Sequence[Layer]) -> bool:
        """Train some layers, and the activations in a block; return whether it is better so."""
        present = task.module.state_dict()
        steps = {
            value: name
            for value, name in self._steps.items()
            if name in present and value not in self._seen
        }
        self._seen.update(steps)
        weights = {
            x.weight: (x, TrainedCodes(self._matrix(x), self.result.weights[x.name]))
            for x in layers
            if x.weight in present  # one that only decides about whole numbers keeps its codes
        }
        sizes = {name: torch.ones(()).requires_grad_() for name in steps.values()}
        before = self._judged(task)

        def backward(group: Sequence[int]) -> None:
            for index in group:
                error = task.error(index, self._drop, {**values_of(weights), **sizes})
                (error / len(group)).backward()  # type: ignore[no-untyped-call]

        groups, recipe = self.samples.drawn(), self._start.recipe
        with self._drop.active():
            train_codes(weights, recipe, groups, backward, factors=sizes.values())
        sizes = {name: size.detach() for name, size in sizes.items()}
        after = self._judged(task, rounded_values(weights) | sizes)
        better = after < before
        self.result.errors.update({x.name: (before, min(after, before)) for x in layers})
        if better:
            self.result.weights.update(quantized(weights))
            self._set_steps(steps, sizes)
        return better

    def _set_steps(self, names: Mapping[str, str], sizes: Mapping[str, Tensor]) -> None:
        for value, name in names.items():
            size, old = sizes[name].numpy(), self._start.activations[value]
            self._graph.graph.initializers[name].const_value = ir.tensor(size, name=name)
            scale = float(size * np.float32(old.scale))
            self.result.activations[value] = replace(old, scale=scale)

    def _matrix(self, layer: Layer) -> Tensor:
        weight = tensor_of(self._model.graph.initializers[layer.weight])
        return layer.canonical(weight).to(torch.float32)

    @torch.no_grad()
    def _judged(
        self,
        task: _Task,
        replaced: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> float:
        batches = self.samples.held_out
        return sum(float(task.error(i, self._drop, replaced)) for i in batches) / len(batches)


@torch.no_grad()
def _run(module: GraphModule, batches: Iterable[Mapping[str, Tensor]], store: Activations) -> None:
    """Run a module, and keep its outputs."""
    for batch in batches:
        given = {name: batch[name] for name in module.input_names}
        for name, value in module(**given).items():
            store.append(name, value.numpy())


def _tensors(batch: Mapping[str, Array]) -> dict[str, Tensor]:
    # Copies: arrays in files, and users' own, cannot be written to, of which PyTorch warns.
    return {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}
