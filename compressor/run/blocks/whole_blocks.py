"""The blocks of a checkpoint as a whole, for passes that train each to give what it gave.

Two streams flow from block to block, in files: what the model gives as it was before the pass, and
what it gives with the blocks that the pass has changed. Memory holds one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from compressor.models.resident_memory import return_freed_memory
from compressor.models.transformers.block_stages import BlockArguments, Stage
from compressor.run.blocks.decoder_blocks import DecoderBlocks, DecoderStage, OpenBlock
from compressor.run.blocks.flow import Flow
from compressor.run.blocks.sensitivity import Sensitivity
from compressor.run.weight_pass import Changes
from compressor.types.tensors import Array

_TOKENS = "input_ids"
TOKENS_AT_ONCE = 512
"""Samples that are run together have so many at most, unless one alone has more."""

_PROBED = 4  # of one batch in so many is found what errors do


@dataclass(frozen=True)
class Crossing:
    """A batch at a block.

    Attributes:
        entering: what enters it behind the blocks that the pass has changed, float32
            ``[samples, tokens, channels]``.
        target: what it gave in the model before the pass.
        given: what it is called with besides.
    """

    entering: Tensor
    target: Tensor
    given: BlockArguments


class WholeBlock:
    """One block, with all calibration data; other processes than the first have none.

    Attributes:
        path: where it is in the network.
        samples: how many there are in each batch.
    """

    def __init__(self, run: WholeBlocks, index: int):
        self._run = run
        self._index = index
        self._opened = OpenBlock(run.blocks, index)
        self._givens: list[BlockArguments] = []
        self.path = self._opened.path
        self.samples = [len(tokens) for tokens in run.tokens]

    @property
    def module(self) -> nn.Module:
        """The block in float32, as it was before the pass until :meth:`kept` has been called."""
        return self._opened.module

    def crossing(self, number: int) -> Crossing:
        """Return a batch, in memory that may be written to."""
        if not self._givens:
            self._givens = list(self._given())
        entering = self._run.entering(self._run.changed, self._index, number)
        target = torch.from_numpy(self._run.floats.read(self._index + 1, number))
        return Crossing(entering, target, self._givens[number])

    @cached_property
    def felt(self) -> Tensor:
        """What errors in what flows out of it do; see :mod:`compressor.run.blocks.sensitivity`."""
        return self._run.sensitivity.of(self._index)

    def kept(self, layers: Sequence[str], make: Callable[[], Changes]) -> Changes:
        """Return what a pass makes of layers, from the store if an earlier run came so far."""
        stage = DecoderStage(self._opened, Stage(tuple(layers), {}), f"{self._index}.whole")
        return stage.kept(make if self._run.first else Changes)

    def run(self, flow: Flow) -> Iterator[Array]:
        """Yield what flows out of it, as it is now, for what enters."""
        for number, tokens in enumerate(self._run.tokens):
            yield self._opened.run(tokens, self._run.entering(flow, self._index, number)).numpy()

    def _given(self) -> Iterator[BlockArguments]:
        """Yield what it is called with; tensors that are equal for batches are one."""
        before: list[Any] = []
        for tokens in self._run.tokens:
            given = self._run.blocks.carrier.decoder.arguments(tokens)[self._index]
            leaves, form = tree_flatten((given.args, dict(given.kwargs)))
            before = [
                _same(leaf, before[i] if i < len(before) else None) for i, leaf in enumerate(leaves)
            ]
            args, kwargs = tree_unflatten(before, form)
            yield BlockArguments(torch.empty(0), args, kwargs)  # what enters is in files


class WholeBlocks:
    """The blocks of a checkpoint in the order of execution, behind a pass on their stages.

    Args:
        blocks: the same in stages, which the pass has done with.
    """

    def __init__(self, blocks: DecoderBlocks):
        workspace = blocks.workspace
        self.blocks = blocks
        self.first = workspace.first
        self.floats = Flow(blocks.folder, "floats", workspace.ranks)
        self.changed = Flow(blocks.folder, "changed", workspace.ranks)
        data = workspace.plan.data["calibration"].batches() if self.first else ()
        self.tokens = [
            part for batch in data for part in _parts(torch.from_numpy(batch[_TOKENS].copy()))
        ]
        seed = workspace.plan.spec.seed
        self.sensitivity = Sensitivity(blocks, self.tokens[::_PROBED], seed)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.blocks.carrier.decoder.blocks)

    def __iter__(self) -> Iterator[WholeBlock]:
        """Yield one at a time; what flows on is found once it has been :meth:`WholeBlock.kept`."""
        begun, last = self._begun(), len(self) - 1
        for index in range(len(self)):
            block = WholeBlock(self, index)
            flows = self.first and index >= begun
            if flows and not (index == last and self._done(index)):
                self.floats.write(index + 1, block.run(self.floats))
            yield block
            if flows and index < last:
                self.changed.write(index + 1, block.run(self.changed))
            for flow in (self.floats, self.changed, self.sensitivity):
                flow.forget(index)
            del block
            return_freed_memory()

    def entering(self, flow: Flow, index: int, number: int) -> Tensor:
        """Return what enters a block for a batch, in memory that may be written to."""
        return flow.entering(self.blocks.carrier.decoder, self.tokens[number], index, number)

    def _done(self, index: int) -> bool:
        key = self.blocks.key_of(f"{index}.whole")
        return self.blocks.workspace.store.read(key) is not None

    def _begun(self) -> int:
        """Return the block at which an earlier run was, if what it made of those before is kept."""
        begun = 0
        for index in range(len(self)):
            if self.floats.has(index) and self.changed.has(index):
                begun = index
            if not self._done(index):
                break
        return begun


def _parts(tokens: Tensor) -> Iterator[Tensor]:
    return iter(torch.split(tokens, max(1, TOKENS_AT_ONCE // tokens.shape[1])))


def _same(value: Any, before: Any) -> Any:
    """Return a tensor through which gradients can be found: the one before, if it is equal."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(before, Tensor) and value.shape == before.shape and torch.equal(value, before):
        return before
    return value.clone()
