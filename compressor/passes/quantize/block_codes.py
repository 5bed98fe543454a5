"""Train the codes of a checkpoint block by block, in the memory of one block.

Each block learns to give the float block's outputs behind the quantized blocks before it: Y. Li et
al., BRECQ, 2021 (arXiv:2102.05426), section 3. Errors are weighed by what the rest of the network
makes of them; see :mod:`compressor.run.blocks.sensitivity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.quantize.code_training import (
    Recipe,
    TrainedWeights,
    rounded_values,
    train_codes,
    values_of,
)
from compressor.passes.quantize.kept_samples import Groups
from compressor.passes.quantize.maths.reconstruct import TrainedCodes
from compressor.run.blocks.decoder_blocks import DecoderBlocks
from compressor.run.blocks.whole_blocks import TOKENS_AT_ONCE, Crossing, WholeBlock, WholeBlocks
from compressor.run.weight_pass import Changes, Choice, compared
from compressor.types.layers import Layer, WeightCodes
from compressor.types.passes import PassContext

BY_BLOCK = (
    "reconstruct trains one block after the other, by its outputs, in the memory of one; with "
    "model.factory and metric: perplexity it trains all blocks together, in memory"
)
"""What the plan says."""

_FLOAT = 4
_OF_WEIGHTS = 8  # what is trained, its gradient, Adam's two, and what it stands for on the way
_VALUES = 46  # of a block's width and inner width, for each token; measured


def train_blocks(
    carrier: BlockCheckpoint, choice: Choice, changes: Changes, recipe: Recipe, name: str
) -> Changes:
    """Return the changes of GPTQ with codes and scales that are trained from there.

    A block that gains nothing on the samples held back keeps what it had. Each is in the store once
    it is done, so that a run that was killed goes on with the next. The same start, data and seed
    give the same result.

    Args:
        carrier: the model before the pass.
        choice: its work has the blocks, which the pass has been through.
        changes: what became of the weights.
        recipe: how long and how fast.
        name: of the pass.
    """
    context: PassContext = choice.work.context
    assert isinstance(context.blocks, DecoderBlocks)
    blocks = WholeBlocks(context.blocks)
    trained = Changes()
    with context.progress.stage(f"{name}: reconstruct", len(blocks)) as advance:
        for number, block in enumerate(blocks):
            place = f"{block.path}."
            layers = [x for x in choice.layers(carrier) if x.name.startswith(place)]
            make = partial(_made, block, layers, choice, changes, recipe, context.seed)
            trained.update(block.kept([layer.name for layer in layers], make))
            advance(number + 1)
    result = Changes(dict(changes.weights), dict(changes.outcomes), changes.notes, changes.spans)
    result.update(trained)
    return result


def memory_of_blocks(carrier: BlockCheckpoint, shape: Sequence[int]) -> int:
    """Return about how many bytes of memory training a block takes.

    Args:
        carrier: the model.
        shape: of a sample's tokens.
    """
    widths = [int(carrier.config.get(key, 0)) for key in ("hidden_size", "intermediate_size")]
    values = _VALUES * max(prod(shape), TOKENS_AT_ONCE) * sum(widths)
    return _OF_WEIGHTS * carrier.decoder.largest_block + _FLOAT * values


def _made(
    block: WholeBlock,
    layers: Sequence[Layer],
    choice: Choice,
    changes: Changes,
    recipe: Recipe,
    seed: int,
) -> Changes:
    """Train the codes of a block; return the changes."""
    made = Changes()
    if not layers:
        return made
    floats, weights = dict[str, Tensor](), dict[str, tuple[Layer, TrainedCodes]]()
    for layer in layers:
        inside = layer.weight.removeprefix(f"{block.path}.")
        matrix = floats[inside] = layer.canonical(block.module.get_parameter(inside).detach())
        start = changes.weights[layer.weight]
        assert isinstance(start, WeightCodes)
        weights[inside] = layer, TrainedCodes(matrix, start.compute(matrix))
    groups = Groups(recipe.batch, seed)
    for samples in block.samples:
        groups.add(samples)
    task = _Task(block, weights)
    before = task.judged(groups.held_out)
    train_codes(weights, recipe, groups.drawn(), task.backward)
    after = task.judged(groups.held_out)
    for inside, (layer, codes) in weights.items():
        start = changes.weights[layer.weight]
        assert isinstance(start, WeightCodes)
        found = codes.quantized() if after < before else start.compute(floats[inside])
        made.weights[layer.weight] = WeightCodes.known(layer, found)
        outcome = compared(layer, choice.treatments[layer.name], floats[inside], found)
        details = {"block_nats": min(after, before), "before": before}
        earlier = changes.outcomes[layer.name].details
        made.outcomes[layer.name] = replace(outcome, details={**earlier, **details})
    return made


@dataclass(frozen=True)
class _Task:
    """A block whose codes are trained.

    Attributes:
        weights: by the parameter's name in the block.
    """

    block: WholeBlock
    weights: TrainedWeights

    def backward(self, group: Sequence[int]) -> None:
        """Add the gradients of a group of samples to what is trained."""
        values = values_of(self.weights)
        # Rounded once a step: their gradients are summed over its batches.
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        for number in group:
            error = self._error(self.block.crossing(number), leaves) / len(group)
            error.backward()  # type: ignore[no-untyped-call]
        gradients = [leaf.grad for leaf in leaves.values()]
        torch.autograd.backward(list(values.values()), gradients)

    @torch.no_grad()
    def judged(self, held_out: Sequence[int]) -> float:
        """Return the error of the block's outputs, in nats a token."""
        values = rounded_values(self.weights)
        crossings = (self.block.crossing(number) for number in held_out)
        return sum(float(self._error(x, values)) for x in crossings) / len(held_out)

    def _error(self, found: Crossing, values: Mapping[str, Tensor]) -> Tensor:
        out = found.given.call(self.block.module, found.entering, values)
        error = (out - found.target).flatten(0, -2)
        return ((error @ self.block.felt) * error).sum() / (2 * len(error))
