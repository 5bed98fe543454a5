"""AWQ on the layers of a model, block by block, and what absorbs its factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import onnx_ir as ir
import torch

from compressor.errors import SpecError
from compressor.graph.blocks import partition
from compressor.models.transformers.block_checkpoint import BLOCK, BlockCheckpoint
from compressor.passes.prepare.sources import (
    InputGroup,
    input_groups,
    touched,
)
from compressor.passes.quantize.maths.awq import awq
from compressor.passes.quantize.maths.floating import RangeSearch
from compressor.passes.quantize.maths.gptq import join_rows
from compressor.passes.quantize.weights.gptq import UNOBSERVED, observed
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.statistics import Block, Moments, Request
from compressor.types.tensors import below

_Operator: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Scaling: TypeAlias = tuple[_Operator, torch.Tensor]


def awq_groups(
    model: ir.Model, schemes: Mapping[str, Scheme], parameters: Iterable[str]
) -> tuple[InputGroup, ...]:
    """Return the layers by what they read, and which ``parameters`` absorb their factors."""
    blocks = partition(model)
    home = {
        name: index for index, block in reversed([*enumerate(blocks)]) for name in block.weights
    }
    groups = []
    for group in input_groups(model, schemes, set(parameters)):
        names = [layer.weight for layer in group.layers]
        names += [] if group.source is None else touched(group.source)
        if len({home[name] for name in names}) > 1:
            group = replace(group, source=None, reason="what absorbs factors is in another block")
        groups.append(group)
    return tuple(groups)


def block_groups(
    carrier: BlockCheckpoint, schemes: Mapping[str, Scheme], parameters: Collection[str]
) -> tuple[InputGroup, ...]:
    """Return the same for a checkpoint, from the graphs of its blocks."""
    layers = {layer.name: layer for layer in carrier.layers()}
    groups = []
    for index, block in enumerate(carrier.decoder.blocks):
        lowered, path = carrier.graph_of_block(index), f"{block.path}."
        here = {BLOCK + name: scheme for name, scheme in below(path, schemes).items()}
        free = [BLOCK + name.removeprefix(path) for name in parameters if name.startswith(path)]
        for group in awq_groups(lowered.graph(), here, free):
            named = [layers[path + layer.name.removeprefix(BLOCK)] for layer in group.layers]
            value, source = carrier.observed[named[0].name], group.source
            if source is not None:
                owner = source.layer
                vectors = [path + name.removeprefix(BLOCK) for name in source.vectors]
                owner = None if owner is None else layers[path + owner.name.removeprefix(BLOCK)]
                source = replace(source, vectors=tuple(vectors), layer=owner)
            request = replace(group.request, tensor=value)
            groups.append(replace(group, request=request, layers=tuple(named), source=source))
    return tuple(groups)


@dataclass
class Folded:
    """Float parameters as factors have changed them.

    Of a layer there are the factors alone, and its weight is computed when it is wanted: those of a
    block in float32 would take as much memory as all that is done to one of them.
    """

    read: Callable[[str], torch.Tensor]  # returns a parameter as the model has it, by name
    # norms and biases that have changed, in float32
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    # by a layer's weight: what is done to it in canonical form, one after the other
    scaled: dict[str, tuple[Layer, list[_Scaling]]] = field(default_factory=dict)
    # the factors that groups got so far
    done: list[tuple[InputGroup, torch.Tensor]] = field(default_factory=list)

    def matrix(self, layer: Layer) -> torch.Tensor:
        """Return a layer's weight as it is now, ``[rows, columns]``; float32 if it has changed."""
        matrix = layer.canonical(self.read(layer.weight))
        _, scalings = self.scaled.get(layer.weight, (layer, []))
        for operator, factors in scalings:
            matrix = operator(matrix.to(torch.float32), factors)
        return matrix

    def fold(self, group: InputGroup, factors: torch.Tensor) -> None:
        """Multiply the columns of a group's layers with factors and divide its source by them.

        Factors are one a column, the same for columns of one channel of the source.
        """
        for layer in group.layers:
            self._scale(layer, torch.mul, factors)
        source = group.source
        assert source is not None
        self.done.append((group, factors))
        divisor = torch.ones(source.count)
        divisor[torch.tensor(source.channels)] = factors.to(torch.float32)
        for name in source.vectors:
            vector = self.vectors[name] if name in self.vectors else self.read(name)
            self.vectors[name] = vector.to(torch.float32) / divisor
        if source.layer is not None:
            self._scale(source.layer, torch.div, divisor[:, None])

    def taken(self, weights: Collection[str]) -> dict[str, torch.Tensor]:
        """Forget what has changed, and return it in its own dtype, except ``weights``.

        Weights of layers are in canonical form.
        """
        matrices = {
            name: self.matrix(layer)
            for name, (layer, _) in self.scaled.items()
            if name not in weights
        }
        changed = {**self.vectors, **matrices}
        self.vectors.clear()
        self.scaled.clear()
        return {name: tensor.to(self.read(name).dtype) for name, tensor in changed.items()}

    def _scale(self, layer: Layer, operator: _Operator, factors: torch.Tensor) -> None:
        self.scaled.setdefault(layer.weight, (layer, []))[1].append((operator, factors))


@dataclass(frozen=True, eq=False)
class AwqWork:
    """AWQ on the chosen layers; ``groups`` come in the order of execution."""

    schemes: Mapping[str, Scheme]
    groups: Sequence[InputGroup]
    folded: Folded
    search: RangeSearch

    @property
    def by_layer(self) -> Mapping[str, Request]:
        """What calibration has to find, by the names of the layers that it is for."""
        return {layer.name: group.request for group in self.groups for layer in group.layers}

    @property
    def remarks(self) -> Mapping[str, str]:
        """What is said in the plan about a layer, by its name."""
        remarks = dict.fromkeys(self.schemes, UNOBSERVED)
        for group in self.groups:
            fixed = f"range search only: {group.reason}" if group.source is None else ""
            remarks.update({layer.name: fixed for layer in group.layers})
        return {name: remark for name, remark in remarks.items() if remark}

    def check(self) -> None:
        """Check that AWQ has something to do that another method does not do better.

        Raises:
            SpecError: no factor can be moved.
        """
        if all(group.source is None for group in self.groups):
            reasons = Counter(group.reason for group in self.groups).most_common(1)
            raise SpecError(
                "method 'awq'",
                "finds no layer whose input scale can be moved"
                + "".join(f" ({reason})" for reason, _ in reasons),
                "use method gptq, or rtn with range: mse",
            )

    @property
    def rescale(self) -> Callable[[Carrier], Carrier] | None:
        """What scales the channels of another model alike; it holds no weights."""
        return partial(_alike, tuple(self.folded.done)) if self.folded.done else None

    def matrix(self, layer: Layer) -> torch.Tensor:
        """Return the weight that a layer's codes stand for, of any float type."""
        return self.folded.matrix(layer)

    def quantized(self, layers: Sequence[Layer], block: Block) -> dict[str, WeightCodes]:
        """Quantize those layers of a block that calibration has seen; codes by weight.

        The groups come in the reverse order of execution: what a source is divided by is then
        known before the source itself is quantized.

        Raises:
            DataError: calibration found nothing about a layer's inputs.
        """
        here = {layer.weight for layer in layers}
        codes: dict[str, WeightCodes] = {}
        for group in reversed(self.groups):
            if group.layers[0].weight in here:
                codes.update(self._group(group, block))
        return codes

    def _group(self, group: InputGroup, block: Block) -> dict[str, WeightCodes]:
        moments = observed(group.layers[0], group.request, block)
        matrices = [self.folded.matrix(layer) for layer in group.layers]
        wanted = [self.schemes[layer.name] for layer in group.layers]
        if group.source is None:
            weights = _searched(matrices, moments, wanted, self.search)
        else:
            channels = group.source.channels
            shared = len(set(channels)) < len(channels)
            tied = torch.tensor(channels) if shared else None
            scaled = awq(matrices, moments.second[0], wanted, self.search, tied)
            self.folded.fold(group, scaled.factors)
            weights = list(scaled.weights)
        return {
            layer.weight: WeightCodes.known(layer, weight)
            for layer, weight in zip(group.layers, weights, strict=True)
        }

    def floats(self) -> dict[str, torch.Tensor]:
        """Return norms and biases that have changed since the last call, in their own dtype."""
        return self.folded.taken({layer.weight for g in self.groups for layer in g.layers})


def _alike(scaled: Sequence[tuple[InputGroup, torch.Tensor]], carrier: Carrier) -> Carrier:
    """Return a model with channels scaled as another one's were; its function stays."""
    stored, layers = carrier.tensors(), {layer.weight: layer for layer in carrier.layers()}
    folded = Folded(lambda name: stored[name].read())
    for group, factors in scaled:
        folded.fold(group, factors)
    changed = folded.taken(())
    return carrier.with_weights(
        {name: layers[name].stored(t) if name in layers else t for name, t in changed.items()}
    )


def plan_awq(carrier: Carrier, schemes: Mapping[str, Scheme], search: RangeSearch) -> AwqWork:
    """Plan AWQ on the chosen layers of a model.

    Raises:
        ModelError: a block of a checkpoint cannot be lowered to a graph.
    """
    stored = carrier.tensors()
    kept = {layer.weight for layer in carrier.layers() if layer.name not in schemes}
    parameters = stored.keys() - kept
    groups = (
        block_groups(carrier, schemes, parameters)
        if isinstance(carrier, BlockCheckpoint)
        else awq_groups(carrier.graph(), schemes, parameters)
    )
    return AwqWork(schemes, groups, Folded(lambda name: stored[name].read()), search)


def _searched(
    matrices: Sequence[torch.Tensor],
    moments: Moments,
    schemes: Sequence[Scheme],
    search: RangeSearch,
) -> list[QuantizedTensor]:
    """Quantize weights whose input cannot be scaled: only their ranges are searched."""
    fixed = torch.zeros(matrices[0].shape[1], dtype=torch.int64)
    count = len(moments.second)
    parts = [
        awq([m.chunk(count)[index] for m in matrices], moment, schemes, search, fixed).weights
        for index, moment in enumerate(moments.second)
    ]
    return [join_rows(weights) for weights in zip(*parts, strict=True)]
