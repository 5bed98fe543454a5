"""What the network makes of errors behind each of its blocks, found in the memory of one block.

An error ``e`` in what flows out of a block, small and without relation to those of other tokens,
moves the scores of all tokens behind it by a Kullback-Leibler divergence of ``eᵀ F e / 2`` nats in
all, where ``F`` is the mean of ``g gᵀ`` and ``g`` the gradient of minus the log probability of
tokens that are drawn from the network's own scores: J. Martens and R. Grosse, 2015
(arXiv:1503.05671), section 2. Y. Li et al., BRECQ, 2021 (arXiv:2102.05426), section 3.2, weigh the
error of a block's outputs by its diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compressor.models.resident_memory import return_freed_memory
from compressor.models.transformers.block_stages import differentiable
from compressor.run.blocks.decoder_blocks import DecoderBlocks, OpenBlock
from compressor.run.blocks.flow import Flow
from compressor.types.data import Ranks
from compressor.types.tensors import Array

_SCORES = 4 << 20  # of the output layer that are found at once


class Sensitivity:
    """The matrix ``F`` of each block, in a file; float32 ``[channels, channels]``.

    Args:
        blocks: the network as it was before the pass.
        tokens: texts to find it on, batch by batch.
        seed: of the tokens that are drawn.
    """

    def __init__(self, blocks: DecoderBlocks, tokens: Sequence[Tensor], seed: int):
        self._blocks = blocks
        self._tokens = tokens
        self._random = torch.Generator().manual_seed(seed)
        ranks: Ranks = blocks.workspace.ranks
        self._values, self._gradients, self._found = (
            Flow(blocks.folder, name, ranks) for name in ("probed", "gradients", "felt")
        )

    def of(self, index: int) -> Tensor:
        """Return that of a block; those of all are found when one is not there."""
        if not self._found.has(index):
            self._find()
        return torch.from_numpy(self._found.read(index, 0))

    def forget(self, index: int) -> None:
        """Remove that of a block."""
        self._found.forget(index)

    @torch.enable_grad()
    def _find(self) -> None:
        last = len(self._blocks.carrier.decoder.blocks)
        for index in range(last):
            self._values.write(index + 1, self._forward(index))
            return_freed_memory()
        self._gradients.write(last, self._at_the_end(last))
        for index in reversed(range(last)):
            self._found.write(index, [self._mean_square(index + 1)])
            if index:
                self._gradients.write(index, self._backward(index))
            self._gradients.forget(index + 1)
            self._values.forget(index + 1)
            return_freed_memory()

    def _forward(self, index: int) -> Iterator[Array]:
        opened = OpenBlock(self._blocks, index)
        for number, tokens in enumerate(self._tokens):
            yield opened.run(tokens, self._entering(index, number)).numpy()

    def _entering(self, index: int, number: int) -> Tensor:
        decoder = self._blocks.carrier.decoder
        return self._values.entering(decoder, self._tokens[number], index, number)

    def _at_the_end(self, last: int) -> Iterator[Array]:
        """Yield the gradients for what flows out of the last block."""
        decoder = self._blocks.carrier.decoder
        some = max(1, _SCORES // decoder.vocabulary)  # tokens: each has its scores by itself
        for number, tokens in enumerate(self._tokens):
            hidden = self._entering(last, number)
            parts = zip(*(torch.split(x, some, 1) for x in (tokens, hidden)), strict=True)
            yield torch.cat([self._gradient(*part) for part in parts], 1).numpy()

    def _gradient(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden.clone().requires_grad_()
        decoder = self._blocks.carrier.decoder
        scores = decoder.differentiable_logits(tokens, hidden).log_softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(scores.detach().exp(), 1, generator=self._random)
        (gradient,) = torch.autograd.grad(-scores.gather(1, drawn).sum(), hidden)
        return gradient

    def _backward(self, index: int) -> Iterator[Array]:
        """Yield the gradients for what enters a block."""
        opened, decoder = OpenBlock(self._blocks, index), self._blocks.carrier.decoder
        for number, tokens in enumerate(self._tokens):
            (given,) = differentiable([decoder.arguments(tokens)[index]])
            hidden = self._entering(index, number).requires_grad_()
            out = given.call(opened.module, hidden)
            behind = torch.from_numpy(self._gradients.read(index + 1, number))
            (gradient,) = torch.autograd.grad(out, hidden, behind)
            yield gradient.numpy()

    def _mean_square(self, index: int) -> Array:
        summed, count = torch.zeros(()), 0
        for number in range(len(self._tokens)):
            gradients = torch.from_numpy(self._gradients.read(index, number)).flatten(0, -2)
            summed = summed + gradients.T @ gradients
            count += len(gradients)
        found: Array = (summed / count).numpy()
        return found
