"""GPTQ on the layers of a model, with the moments of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from compressor.errors import SpecError
from compressor.models.layer_uses import observed_inputs
from compressor.models.resident_memory import return_freed_memory
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.quantize.block_codes import memory_of_blocks, train_blocks
from compressor.passes.quantize.code_training import Recipe
from compressor.passes.quantize.joint_codes import train_together, training_bytes
from compressor.passes.quantize.maths.floating import RangeSearch
from compressor.passes.quantize.maths.gptq import gptq_weights, join_rows, split_rows
from compressor.passes.quantize.reconstruct import Start, check_reconstruction, reconstruct
from compressor.run.weight_pass import Changes, Choice, Treatment, compared
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.parallel import in_threads
from compressor.types.passes import PassContext
from compressor.types.statistics import Block, Moments, Request, found_about

_ROWS_PER_COLUMN = 16  # input vectors for each of their elements, from which moments are found
_FEW_BITS, _SWEEPS = 3, 8  # steps are so wide that a code that moves leaves others to be moved
_RECIPE = Recipe(steps=64, batch=4, rate=0.02, size_rate=0.01)  # samples are whole sequences
_STREAMED = Recipe(steps=64, batch=8, rate=0.02, size_rate=0.01)
_JOINT = Recipe(steps=96, batch=4, rate=0.015, size_rate=0.015, memory=0.95)
_OF_SCORES = ("perplexity", "accuracy", "top5")  # metrics of outputs that hold scores of classes
_ROOM = 128 << 20  # bytes that layers take which are rounded at once
_OF_WEIGHT, _OF_MOMENT = 4, 8  # bytes for an element of each: read as floats; two more matrices
_OF_ROUNDED, _ROUNDED = 50, 1 << 21  # bytes for a weight, and how many are rounded together
_Stacked: TypeAlias = tuple[Sequence[Layer], Moments]  # layers that read the same, and what
UNOBSERVED = "rounded to nearest: its input is not a value that calibration sees"


def observed(layer: Layer, request: Request, block: Block) -> Moments:
    """Return the moments of a layer's inputs.

    Raises:
        DataError: calibration did not find them.
    """
    return found_about(layer.name, request, block.statistics, Moments, "use method rtn")


def _sweeps(scheme: Scheme) -> int:
    """Return how often coordinate descent visits every code and scale."""
    return _SWEEPS if scheme.element == "int" and scheme.bits <= _FEW_BITS else 1


def _by_rows(scheme: Scheme) -> bool:
    return scheme.scale_type != "e4m3" and scheme.granularity != "tensor"


def _taken(job: _Stacked) -> int:
    """Return the bytes that rounding takes besides the moment."""
    stacked, _ = job
    weights = sum(layer.rows * layer.columns for layer in stacked)
    moment = stacked[0].columns ** 2
    return _OF_WEIGHT * weights + _OF_ROUNDED * min(weights, _ROUNDED) + _OF_MOMENT * moment


@dataclass(frozen=True, eq=False)
class GptqWork:
    """GPTQ on the chosen layers of a model, by their names."""

    schemes: Mapping[str, Scheme]
    by_layer: Mapping[str, Request]  # for the moment of its inputs, where it can be seen
    matrix: Callable[[Layer], torch.Tensor]  # what codes stand for, ``[rows, columns]``
    search: RangeSearch
    context: PassContext | None = None  # has the data that codes are trained on afterwards

    @property
    def remarks(self) -> Mapping[str, str]:
        """What is said in the plan about a layer, by its name."""
        return {name: UNOBSERVED for name in self.schemes if name not in self.by_layer}

    @property
    def rescale(self) -> None:
        """What scales the channels of another model alike: no channels are scaled."""

    def check(self) -> None:
        """Check that there is something to do.

        Raises:
            SpecError: no layer's input can be observed.
        """
        if not self.by_layer:
            raise SpecError("method 'gptq'", "finds no layer whose input it can see", "use rtn")

    def quantized(self, layers: Sequence[Layer], block: Block) -> dict[str, WeightCodes]:
        """Quantize those layers of a block that calibration has seen; codes by weight.

        Raises:
            DataError: calibration found nothing about a layer's inputs.
        """
        together: dict[tuple[str, Scheme, int], list[Layer]] = {}
        for index, layer in enumerate(layers):
            if layer.name in self.by_layer:
                scheme = self.schemes[layer.name]
                alone = 0 if layer.groups == 1 and _by_rows(scheme) else index + 1
                key = (self.by_layer[layer.name].key, scheme, alone)
                together.setdefault(key, []).append(layer)
        jobs = [
            (stacked, observed(stacked[0], self.by_layer[stacked[0].name], block))
            for stacked in together.values()
        ]
        codes: dict[str, WeightCodes] = {}
        for some in in_threads(self._rounded, jobs, _taken, _ROOM):
            codes.update(some)
        return codes

    def _rounded(self, job: _Stacked) -> dict[str, WeightCodes]:
        """Quantize layers that read the same input; codes by weight."""
        stacked, moments = job
        scheme = self.schemes[stacked[0].name]
        sweeps = _sweeps(scheme)
        given = [self.matrix(layer) for layer in stacked]
        if len(moments.second) == 1:
            # Between parts of a large weight: what one took lies in pieces that the next one
            # does not fit into, and so memory would grow with each.
            codes = gptq_weights(
                given,
                moments.second[0],
                scheme,
                self.search,
                sweeps=sweeps,
                between=return_freed_memory,
            )
        else:  # the rows of each channel group go by the moment of that group's inputs
            groups = zip(given[0].chunk(len(moments.second)), moments.second, strict=True)
            parts = [gptq_weights(w, m, scheme, self.search, sweeps=sweeps) for w, m in groups]
            codes = join_rows(parts)
        pieces = split_rows(codes, [layer.rows for layer in stacked])
        return_freed_memory()  # the next moment's factor takes as much
        return {x.weight: WeightCodes.known(x, y) for x, y in zip(stacked, pieces, strict=True)}

    def floats(self) -> dict[str, torch.Tensor]:
        """Return the other parameters that have changed since the last call: none."""
        return {}


def plan_gptq(carrier: Carrier, schemes: Mapping[str, Scheme], search: RangeSearch) -> GptqWork:
    """Plan GPTQ on the chosen layers of a model."""
    groups = {layer.name: layer.groups for layer in carrier.layers()}
    by_layer = {
        name: request
        for name, request in observed_inputs(carrier, _ROWS_PER_COLUMN).items()
        if name in schemes and (groups[name] == 1 or _by_rows(schemes[name]))
    }
    return GptqWork(schemes, by_layer, lambda x: x.canonical(carrier.weight(x)), search)


def check_training(carrier: Carrier, treatments: Mapping[str, Treatment]) -> None:
    """Check that codes can be trained.

    Args:
        treatments: what happens to layers, by name.

    Raises:
        SpecError: a scheme is not one of integers, inputs are rounded, a weight of a graph is not
            float32, or PyTorch does not run an operator of it.
    """
    blocks = isinstance(carrier, BlockCheckpoint)
    for layer in carrier.layers():
        scheme, inputs = treatments[layer.name].scheme, treatments[layer.name].inputs
        if scheme is None:
            continue
        if scheme.element != "int" or not (blocks or layer.dtype == "float32"):
            raise SpecError(
                "method 'reconstruct'",
                f"trains weights{'' if blocks else ' of float32'} to integers, layer "
                f"{layer.name!r} has {layer.dtype} and is to be {scheme}",
                "use method gptq",
            )
        if inputs is not None:
            raise SpecError(
                "method 'reconstruct'",
                f"trains weights whose inputs are floats, and those of layer {layer.name!r} are "
                f"to be {inputs}",
                "use method gptq, or a preset for weights alone",
            )
    if not blocks:
        check_reconstruction(carrier.graph(), "method")


def memory_of_training(carrier: Carrier, layers: Sequence[Layer], context: PassContext) -> int:
    """Return the bytes that training takes; 0 for the blocks of a graph, which add little."""
    if isinstance(carrier, BlockCheckpoint):
        return memory_of_blocks(carrier, context.shapes[carrier.inputs[0].name])
    if context.metric not in _OF_SCORES:
        return 0
    return training_bytes(carrier.graph(), layers, _JOINT, context.shapes)


def with_trained_codes(carrier: Carrier, choice: Choice, changes: Changes, name: str) -> Changes:
    """Return the changes of GPTQ with codes that are trained from there.

    Where the metric reads scores of classes, they are trained together, by the divergence of these
    scores; else, and in a checkpoint that is streamed, block by block. Tables, whose rows are
    looked up, stay as they are.

    Args:
        carrier: the float model.
        choice: its work has the calibration data.
        name: of the pass.
    """
    if isinstance(carrier, BlockCheckpoint):
        return train_blocks(carrier, choice, changes, _STREAMED, name)
    codes: dict[str, QuantizedTensor] = {}
    layers = []
    for layer in choice.layers(carrier):
        change = changes.weights[layer.weight]
        if isinstance(change, WeightCodes) and not (layer.is_table or layer.is_recurrent):
            codes[layer.name] = change.read(carrier.weight)
            layers.append(layer)
    context, notes, details = choice.work.context, changes.notes, dict[str, dict[str, float]]()
    if context.metric in _OF_SCORES:
        start = {layer.weight: (layer, codes[layer.name]) for layer in layers}
        joint = train_together(carrier.graph(), start, _JOINT, context, name)
        found = joint.weights
        notes += (
            "training all codes and scales together took the divergence from the float model, on "
            f"calibration data held back, from {joint.before:.3g} to {joint.after:.3g} nats",
        )
    else:
        starts = {key: partial(codes.__getitem__, key) for key in codes}
        blocks = Start(carrier.graph(), layers, starts, {}, _RECIPE)
        trained = reconstruct(blocks, context, name)
        found = trained.weights
        for key, (before, error) in trained.errors.items():
            details[key] = {"block_error": error, "before": before}
    result = Changes(dict(changes.weights), dict(changes.outcomes), notes)
    for layer in layers:
        if layer.name not in found:  # a branch or a body reads it
            continue
        matrix = layer.canonical(carrier.weight(layer))
        outcome = compared(layer, choice.treatments[layer.name], matrix, found[layer.name])
        more = {**outcome.details, **details.get(layer.name, {})}
        result.outcomes[layer.name] = replace(outcome, details=more)
        result.weights[layer.weight] = WeightCodes.known(layer, found[layer.name])
    return result
