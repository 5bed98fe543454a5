"""Learn the matrices that a decoder is rotated by, from the loss that rounding causes.

What is made small is the Kullback-Leibler divergence of the rounded network from the float one on
calibration text. A network in floats computes the same whatever the matrices are, so that all of
the gradient is due to rounding. The original (Liu et al. 2024, arXiv:2405.16406) descends along the
cross entropy, whose gradient is that of the divergence and a noise that depends on the text.

Memory holds one block: what flows between blocks is kept, and each is run once more when gradients
come back to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compressor.errors import DataError
from compressor.models.rounded_inputs import rounded_inputs
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, opened_block
from compressor.models.transformers.block_stages import BlockArguments, differentiable
from compressor.passes.prepare.maths.orthogonal import OrthogonalDescent, Rounding
from compressor.passes.prepare.maths.rotation import DenseRotation
from compressor.passes.prepare.rotated_decoder import (
    NORMS,
    AnyRotation,
    Rotations,
    norm_before,
    rotated_bias,
    rotated_weight,
)
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.weights.layers import PRESETS, Preset
from compressor.types.layers import Layer, Scheme
from compressor.types.passes import PassContext
from compressor.types.rounded_inputs import InputScheme

_TOKENS = "input_ids"
_ANGLE = 0.05  # radians that axes are rotated by in the first step; none in the last
_TOKENS_IN_A_STEP = 2048
_HELD_BACK = 8  # one batch of so many judges
_KEPT_EVERY = 10  # steps
_STEP = "step"
_WEIGHTS, _VALUES, _LOGITS = 6, 46, 6  # copies of a block, of values in it, of outputs; measured


@dataclass(frozen=True)
class Recipe:
    """The rounding that matrices are learned for, and the number of steps.

    Attributes:
        preset: what weights, and inputs of layers, are rounded to.
        steps: how many gradients are followed.
    """

    preset: Preset
    steps: int

    def of_weight(self, layer: Layer) -> Rounding | None:
        """Return how a layer's weight is rounded; ``None`` where the preset leaves it alone."""
        scheme = PRESETS[self.preset].scheme(layer)
        if scheme.group is not None and layer.columns % scheme.group:
            return None
        return Rounding(partial(_nearest, scheme), scheme.group, scheme.symmetric)

    def of_inputs(self, layer: Layer) -> Rounding | None:
        """Return how what a layer reads is rounded; ``None`` where it is not."""
        scheme = PRESETS[self.preset].inputs
        if scheme is None or self.of_weight(layer) is None:
            return None
        return Rounding(partial(_nearest_inputs, scheme), scheme.group)


@dataclass(frozen=True)
class Learned:
    """The matrices, and the loss with the first ones and with the learned ones.

    Attributes:
        rotations: the matrices: the learned ones, or those at the start where they are as good.
        before: divergence at the start on what was held back, in nats a token.
        after: that of the learned ones.
    """

    rotations: Rotations
    before: float
    after: float

    @property
    def note(self) -> str:
        """What a report says of it."""
        found = f"{self.before:.4f} nats a token from the float network at first, then"
        kept = "" if self.after < self.before else "; no better, so the random ones stay"
        return f"learned on text, judged on text held back: {found} {self.after:.4f}{kept}"


def learned(
    carrier: BlockCheckpoint, start: Rotations, recipe: Recipe, context: PassContext
) -> Learned:
    """Learn matrices from given ones.

    Args:
        carrier: the decoder as it is before it is rotated.
        context: with the text, and a place for what is found on the way, from which a run that was
            killed goes on.

    Raises:
        DataError: there is no text.
    """
    batches = _batches(context)
    held = _grouped(batches[::_HELD_BACK])
    groups = _grouped([b for i, b in enumerate(batches) if i % _HELD_BACK]) or held
    network = RotatedNetwork(carrier, recipe)
    kept = context.kept_tensors
    state = _State.restored(start, {} if kept is None else kept.read())
    order = torch.Generator().manual_seed(context.seed)
    places = [p for _ in range(-(-recipe.steps // len(groups))) for p in _mixed(groups, order)]
    with context.progress.stage("learn the rotation", recipe.steps) as advance:
        for step in range(state.step, recipe.steps):
            value, gradients = network.gradients(groups[places[step]], state.rotations)
            state.follow(gradients, _ANGLE * (1 - step / recipe.steps))
            if kept is not None and (state.step % _KEPT_EVERY == 0 or state.step == recipe.steps):
                kept.write(state.tensors())
            advance(state.step, f"{value:.4f} nats")
    before, after = (network.mean_loss(held, rotations) for rotations in (start, state.rotations))
    return Learned(state.rotations if after < before else start, before, after)


class RotatedNetwork:
    """A decoder whose weights are rotated and rounded as it runs, in the memory of one block.

    Args:
        carrier: the decoder as it is before it is rotated.
        recipe: how it is rounded.
    """

    def __init__(self, carrier: BlockCheckpoint, recipe: Recipe):
        self._carrier = carrier
        self._recipe = recipe
        self._tensors = carrier.tensors()
        self._layers: dict[int, list[Layer]] = {
            index: [x for x in carrier.layers() if x.name.startswith(f"{block.path}.")]
            for index, block in enumerate(carrier.decoder.blocks)
        }

    def loss(self, tokens: Tensor, rotations: Rotations) -> float:
        """Return the mean divergence from the float network, in nats a token."""
        with torch.no_grad():
            return self._divergence(tokens, self._hidden(tokens, _narrow(rotations)))

    def mean_loss(self, groups: Sequence[Tensor], rotations: Rotations) -> float:
        """Return the mean over all tokens of some groups of texts."""
        summed = sum(tokens.numel() * self.loss(tokens, rotations) for tokens in groups)
        return summed / sum(tokens.numel() for tokens in groups)

    def gradients(self, tokens: Tensor, rotations: Rotations) -> tuple[float, list[Tensor]]:
        """Return the divergence, and its gradients by the matrices: the stream's, then heads'."""
        narrow = _narrow(rotations)
        leaves = [each.matrix.requires_grad_() for each in _all(narrow)]
        hidden = self._hidden(tokens, narrow)
        above = hidden.detach().requires_grad_()
        value = self._divergence(tokens, above)
        assert above.grad is not None
        torch.autograd.backward(hidden, above.grad)
        return value, [_gradient(leaf) for leaf in leaves]

    def _hidden(self, tokens: Tensor, rotations: Rotations) -> Tensor:
        """Return what flows out of the last block, rotated back."""
        decoder = self._carrier.decoder
        given = differentiable(decoder.arguments(tokens))
        hidden = rotations.residual.times(given[0].hidden)
        for index, each in enumerate(given):
            arguments = (partial(self._block, index, each, rotations), hidden)
            hidden = checkpoint(*arguments, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(rotations.residual, DenseRotation)
        return hidden @ rotations.residual.matrix.T

    def _block(
        self, index: int, given: BlockArguments, rotations: Rotations, hidden: Tensor
    ) -> Tensor:
        module = opened_block(self._carrier, index)
        path = self._carrier.decoder.blocks[index].path
        values = {f"{path}.{name}": value for name, value in module.named_parameters()}
        changed = {n: torch.ones_like(v) for n, v in values.items() if n.endswith(NORMS)}
        for layer in self._layers[index]:
            scale = norm_before(layer.name, self._tensors)
            weight = rotated_weight(layer.name, rotations, scale, values[layer.weight])
            rounding = self._recipe.of_weight(layer)
            changed[layer.weight] = weight if rounding is None else rounding(weight)
            bias, heads = f"{layer.name}.bias", rotations.of_block(layer.name)
            if bias in values and heads is not None and layer.name.endswith("v_proj"):
                changed[bias] = rotated_bias(values[bias], heads)
            inputs = self._recipe.of_inputs(layer)
            if inputs is not None:
                _round_inputs(module.get_submodule(layer.name.removeprefix(f"{path}.")), inputs)
        inside = {name.removeprefix(f"{path}."): value for name, value in changed.items()}
        return given.call(module, hidden, inside)

    def _divergence(self, tokens: Tensor, hidden: Tensor) -> float:
        """Return the divergence, and find its gradient for ``hidden``, one text at a time."""
        decoder, count = self._carrier.decoder, tokens.numel()
        exact = self._exact(tokens)
        whole = 0.0
        for row in range(len(tokens)):
            part = slice(row, row + 1)
            wanted = decoder.logits(tokens[part], exact[part]).log_softmax(-1).clone()
            got = decoder.differentiable_logits(tokens[part], hidden[part]).log_softmax(-1)
            value = (wanted.exp() * (wanted - got)).sum() / count
            if hidden.requires_grad:
                torch.autograd.backward(value)
            whole += float(value.detach())
        return whole

    def _exact(self, tokens: Tensor) -> Tensor:
        """Return what flows out of the last block of the float network."""
        decoder = self._carrier.decoder
        given = decoder.arguments(tokens)
        hidden = given[0].hidden
        for index, each in enumerate(given):
            hidden = decoder.run(opened_block(self._carrier, index), hidden, each)
        return hidden


class _State:
    """State of the descent."""

    def __init__(self, start: Rotations, step: int, descents: Sequence[OrthogonalDescent]):
        self._start = start
        self.step = step
        self._descents = tuple(descents)

    @classmethod
    def restored(cls, start: Rotations, tensors: Mapping[str, Tensor]) -> _State:
        """Return the state that was kept, or the first one."""
        if _STEP in tensors:
            kept = [
                OrthogonalDescent(tensors[f"{i}.matrix"], tensors[f"{i}.momentum"])
                for i in range(1 + len(start.heads))
            ]
            return cls(start, int(tensors[_STEP]), kept)
        first = [OrthogonalDescent(_matrix(each)) for each in (start.residual, *start.heads)]
        return cls(start, 0, first)

    def follow(self, gradients: Sequence[Tensor], angle: float) -> None:
        """Take the next step."""
        for descent, gradient in zip(self._descents, gradients, strict=True):
            descent.step(gradient, angle)
        self.step += 1

    @property
    def rotations(self) -> Rotations:
        """The matrices as they are now."""
        residual, *heads = (DenseRotation(descent.matrix) for descent in self._descents)
        return Rotations(residual, tuple(heads))

    def tensors(self) -> dict[str, Tensor]:
        """Return all that has to be kept."""
        kept = {_STEP: torch.tensor(self.step)}
        for i, descent in enumerate(self._descents):
            kept |= {f"{i}.matrix": descent.matrix, f"{i}.momentum": descent.momentum}
        return kept


def memory_of(carrier: BlockCheckpoint, context: PassContext) -> int:
    """Return about how many bytes learning takes.

    A block is there as it is, rotated, rounded, and with gradients; so are the values in it and
    those of the output layer for one text; what enters each block waits until the way back.
    """
    decoder = carrier.decoder
    width, inner = (carrier.config.get(key, 0) for key in ("hidden_size", "intermediate_size"))
    length = context.shapes.get(_TOKENS, (_TOKENS_IN_A_STEP,))[-1]
    tokens = max(length, _TOKENS_IN_A_STEP)
    flowing = tokens * (len(decoder.blocks) * width + _VALUES * (width + inner))
    ends = _LOGITS * length * decoder.vocabulary
    return _WEIGHTS * decoder.largest_block + 4 * int(flowing + ends) + 6 * 8 * int(width) ** 2


def _batches(context: PassContext) -> list[Tensor]:
    samples = context.samples
    found = [] if samples is None else [torch.from_numpy(b[_TOKENS]) for b in samples.batches()]
    if not found:
        raise DataError("calibration data", "has no samples", "give at least one batch")
    return found


def _grouped(batches: Sequence[Tensor]) -> list[Tensor]:
    """Join batches of one length until a step has enough tokens.

    Most of a step's time is that of rotating the weights, however many tokens there are.
    """
    groups: list[Tensor] = []
    for batch in batches:
        last = groups[-1] if groups else batch[:0]
        if last.shape[1] != batch.shape[1] or last.numel() >= _TOKENS_IN_A_STEP or not len(last):
            groups.append(batch)
        else:
            groups[-1] = torch.cat([last, batch])
    return groups


def _mixed(groups: Sequence[Tensor], order: torch.Generator) -> list[int]:
    places: list[int] = torch.randperm(len(groups), generator=order).tolist()
    return places


def _narrow(rotations: Rotations) -> Rotations:
    """Return matrices in float32, each of a block its own."""
    every = (_matrix(each).to(torch.float32) for each in (rotations.residual, *rotations.heads))
    residual, *heads = map(DenseRotation, every)
    return Rotations(residual, tuple(heads))


def _matrix(rotation: AnyRotation) -> Tensor:
    return rotation.times(torch.eye(len(rotation), dtype=torch.float64))


def _all(rotations: Rotations) -> Iterator[DenseRotation]:
    for each in (rotations.residual, *rotations.heads):
        assert isinstance(each, DenseRotation)
        yield each


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _round_inputs(layer: nn.Module, rounding: Rounding) -> None:
    def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounding(args[0]), *args[1:])

    layer.register_forward_pre_hook(rounded)


def _nearest(scheme: Scheme, matrix: Tensor) -> Tensor:
    return round_to_nearest(matrix, scheme).dequantize()


def _nearest_inputs(scheme: InputScheme, values: Tensor) -> Tensor:
    # A stored scale would come from calibration; the text at hand stands for it.
    largest = float(values.abs().amax()) if scheme.calibrated else None
    return rounded_inputs(values, replace(scheme, largest=largest))
