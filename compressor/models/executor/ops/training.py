"""Operators of graphs that are trained, in a domain of our own; they never reach a file."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.fake_quantization import (
    CodeSpan,
    Places,
    fake_quantize,
    round_bias,
)
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.normalization import batch_norm
from compressor.models.executor.program import Op

TRAINING_DOMAIN = "compressor.training"
"""The domain of these operators."""

LEAST_FACTOR = 1e-12
"""What stands for a factor of zero, of a channel that was pruned: it can be divided by."""


def _fake_quantize(node: NodeView) -> Op:
    """Round to codes; scale and zero point may be trained.

    Inputs: ``x``, ``size``, ``unit``, ``zero`` and, each of them optional, ``offset``, ``factor``
    and ``measure``; see
    :func:`compressor.models.executor.fake_quantization.fake_quantize`. Where there is a
    ``factor``, which broadcasts with ``x``, it is ``x * factor`` that is rounded, and the result
    is divided by it. Attributes: ``low``, ``high``, ``axis`` (-1 for one scale) and ``batched``.
    """
    axis = node.integer("axis", -1)
    span = CodeSpan(
        node.integer("low"),
        node.integer("high"),
        None if axis < 0 else axis,
        node.flag("batched"),
    )

    def run(
        x: Tensor,
        size: Tensor,
        unit: Tensor,
        zero: Tensor,
        offset: Tensor | None = None,
        factor: Tensor | None = None,
        measure: Tensor | None = None,
    ) -> Tensor:
        places, wide = Places(zero, offset), x.to(torch.float32)
        if factor is None:
            return fake_quantize(wide, size, unit, places, span, measure)
        return fake_quantize(wide * factor, size, unit, places, span, measure) / factor

    return run


def _folding_factor(node: NodeView) -> Op:
    """What folding a batch norm multiplies a weight with, ``gamma / sqrt(variance + epsilon)``.

    Attributes: ``epsilon``; ``axis`` and ``rank``, the channels and number of axes of what it is
    multiplied with; ``part``: all of it, its ``sign`` or its ``size``.
    """
    epsilon = node.number("epsilon")
    shape = [1] * node.integer("rank")
    shape[node.integer("axis")] = -1
    part = node.choice("part", ("all", "sign", "size"), "all")

    def run(gamma: Tensor, variance: Tensor) -> Tensor:
        if part == "sign":
            factor = torch.where(gamma.detach() < 0, -1.0, 1.0)
        else:
            factor = gamma * torch.rsqrt(variance + epsilon)
            factor = torch.where(factor.abs() < LEAST_FACTOR, LEAST_FACTOR, factor)
            factor = factor.detach().abs() if part == "size" else factor
        return factor.reshape(shape)

    return run


def _freezable_batch_norm(node: NodeView) -> Op:
    """``BatchNormalization`` whose last input says that it no longer takes batches' statistics."""
    run = batch_norm(node)
    live = node.train
    assert live is not None

    def evaluated(
        x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, _: Tensor
    ) -> Tensor:
        found = run(x, scale, bias, mean, variance)
        assert isinstance(found, torch.Tensor)
        return found

    def trained(
        x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, frozen: Tensor
    ) -> Tensor:
        found = (run if bool(frozen) else live)(x, scale, bias, mean, variance)
        assert isinstance(found, torch.Tensor)
        return found

    node.on_host(5)
    node.train = trained
    return evaluated


def _round_bias(node: NodeView) -> Op:
    """Round a bias to what will be stored of it; see :func:`round_bias`.

    Inputs: ``bias``, size and unit of the weight's scale, size and unit of the input's, and, each
    of them optional, what is added to the bias before it is stored, and whether batch norms are
    frozen: before, what a norm adds is not known in training, and nothing is rounded.
    """

    def run(
        bias: Tensor,
        size: Tensor,
        unit: Tensor,
        input_size: Tensor,
        input_unit: Tensor,
        more: Tensor | None = None,
        _: Tensor | None = None,
    ) -> Tensor:
        return round_bias(bias, size * unit * (input_size * input_unit), more)

    def train(bias: Tensor, *rest: Tensor | None) -> Tensor:
        frozen = rest[5] if len(rest) == 6 else None
        if frozen is not None and not bool(frozen):
            return bias
        return run(bias, *rest)  # type: ignore[arg-type]  # only the last two may be absent

    if node.has_input(6):
        node.on_host(6)
    node.train = train
    return run


def _norm_shift(node: NodeView) -> Op:
    """What folding a batch norm adds to its bias, ``(inner - mean) gamma / sqrt(variance + eps)``.

    Inputs: ``gamma``, ``mean``, ``variance`` and, optional, ``inner``, what the layer adds before.
    """
    epsilon = node.number("epsilon")

    def run(gamma: Tensor, mean: Tensor, variance: Tensor, inner: Tensor | None = None) -> Tensor:
        shifted = -mean if inner is None else inner - mean
        return (shifted * gamma * torch.rsqrt(variance + epsilon)).detach()

    return run


def _channel_shift(node: NodeView) -> Op:
    """What constant offsets of a convolution's input channels add to its outputs.

    Inputs: the weight ``[rows, channels, ...]`` and the offsets ``[channels]``.
    """

    def run(weight: Tensor, offsets: Tensor) -> Tensor:
        rows, channels = weight.shape[:2]
        sums = weight.detach().double().reshape(rows, channels, -1).sum(2)
        return (sums @ offsets.double()).to(weight.dtype)

    del node
    return run


def _pad_channels(node: NodeView) -> Op:
    """Pad the spatial axes with a value for each channel.

    Inputs: ``x`` ``[batch, channels, ...]`` and the values ``[channels]``. Attribute: ``pads``,
    beginnings then ends, as convolutions have them.
    """
    pads = node.integers("pads") or ()
    count = len(pads) // 2
    ends = [pads[i + side * count] for i in reversed(range(count)) for side in (0, 1)]

    def run(x: Tensor, values: Tensor) -> Tensor:
        level = values.reshape(-1, *[1] * count)
        return functional.pad(x - level, ends) + level

    return run


TRAINING: Table = {
    "BatchNormalization": _freezable_batch_norm,
    "ChannelShift": _channel_shift,
    "FakeQuantize": _fake_quantize,
    "FoldingFactor": _folding_factor,
    "NormShift": _norm_shift,
    "PadChannels": _pad_channels,
    "RoundBias": _round_bias,
}
