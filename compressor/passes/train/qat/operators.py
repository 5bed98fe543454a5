"""The operators of graphs that are trained; they never reach a file."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.models.executor.node import Host, Ints, Operator, Operators, along, one_of
from compressor.models.executor.ops.layers import batch_norm, check_evaluated, live_batch_norm
from compressor.models.executor.ops.windows import Pads
from compressor.passes.train.qat.fake_quantization import (
    CodeSpan,
    Places,
    fake_quantize,
    round_bias,
)

TRAINING_DOMAIN = "compressor.training"
"""The domain of the operators."""

LEAST_FACTOR = 1e-12
"""What stands for a factor of zero, of a channel that was pruned: it can be divided by."""


def _fake_quantize(
    x: Tensor,
    size: Tensor,
    unit: Tensor,
    zero: Tensor,
    offset: Tensor | None = None,
    factor: Tensor | None = None,
    measure: Tensor | None = None,
    *,
    low: int,
    high: int,
    axis: int = -1,
    batched: bool = False,
) -> Tensor:
    """Round to codes; scale and zero point may be trained; see :func:`fake_quantize`.

    Where there is a ``factor``, which broadcasts with ``x``, it is ``x * factor`` that is rounded,
    and the result is divided by it. An ``axis`` of -1 stands for one scale.
    """
    span = CodeSpan(low, high, None if axis < 0 else axis, batched)
    places, wide = Places(zero, offset), x.to(torch.float32)
    if factor is None:
        return fake_quantize(wide, size, unit, places, span, measure)
    return fake_quantize(wide * factor, size, unit, places, span, measure) / factor


_PART = one_of("all", "sign", "size")


def _folding_factor(
    gamma: Tensor, variance: Tensor, *, epsilon: float, rank: int, axis: int, part: str = _PART
) -> Tensor:
    """What folding a batch norm multiplies a weight with, ``gamma / sqrt(variance + epsilon)``.

    Args:
        gamma: ``[channels]``.
        variance: ``[channels]``.
        epsilon: of the norm.
        rank: number of axes of what it is multiplied with.
        axis: the channels among them.
        part: all of it, its ``sign`` or its ``size``.
    """
    if part == "sign":
        factor = torch.where(gamma.detach() < 0, -1.0, 1.0)
    else:
        factor = gamma * torch.rsqrt(variance + epsilon)
        factor = torch.where(factor.abs() < LEAST_FACTOR, LEAST_FACTOR, factor)
        factor = factor.detach().abs() if part == "size" else factor
    return along(factor, axis, rank)


def _frozen_batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    _: Host,
    *,
    epsilon: float = 1e-5,
) -> Tensor:
    return batch_norm(x, scale, bias, mean, variance, epsilon=epsilon)


def _freezable_batch_norm(
    x: Tensor, *norm: Tensor, epsilon: float = 1e-5, momentum: float = 0.9
) -> Tensor:
    """``BatchNormalization`` whose last input says that it no longer takes batches' statistics."""
    scale, bias, mean, variance, frozen = norm
    if bool(frozen):
        return batch_norm(x, scale, bias, mean, variance, epsilon=epsilon)
    return live_batch_norm(x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum)


def _round_bias(
    bias: Tensor,
    size: Tensor,
    unit: Tensor,
    input_size: Tensor,
    input_unit: Tensor,
    more: Tensor | None = None,
    _: Host | None = None,
) -> Tensor:
    """Round a bias to what will be stored of it; see :func:`round_bias`.

    Inputs: ``bias``, size and unit of the weight's scale, size and unit of the input's, and, each
    of them optional, what is added to the bias before it is stored, and whether batch norms are
    frozen: before, what a norm adds is not known in training, and nothing is rounded.
    """
    return round_bias(bias, size * unit * (input_size * input_unit), more)


def _round_frozen_bias(
    bias: Tensor,
    size: Tensor,
    unit: Tensor,
    input_size: Tensor,
    input_unit: Tensor,
    more: Tensor | None = None,
    frozen: Host | None = None,
) -> Tensor:
    if frozen is not None and not bool(frozen):
        return bias
    return _round_bias(bias, size, unit, input_size, input_unit, more)


def _norm_shift(
    gamma: Tensor, mean: Tensor, variance: Tensor, inner: Tensor | None = None, *, epsilon: float
) -> Tensor:
    """What folding a batch norm adds to its bias, ``(inner - mean) gamma / sqrt(variance + eps)``.

    ``inner`` is what the layer adds before.
    """
    shifted = -mean if inner is None else inner - mean
    return (shifted * gamma * torch.rsqrt(variance + epsilon)).detach()


def _channel_shift(weight: Tensor, offsets: Tensor) -> Tensor:
    """What constant offsets of a convolution's input channels add to its outputs.

    Args:
        weight: ``[rows, channels, ...]``.
        offsets: ``[channels]``.
    """
    rows, channels = weight.shape[:2]
    sums = weight.detach().double().reshape(rows, channels, -1).sum(2)
    return (sums @ offsets.double()).to(weight.dtype)


def _pad_channels(x: Tensor, values: Tensor, *, pads: Ints = None) -> Tensor:
    """Pad the spatial axes with a value for each channel.

    Args:
        x: ``[batch, channels, ...]``.
        values: ``[channels]``.
        pads: beginnings, then ends, as convolutions have them.
    """
    amounts = pads or ()
    count = len(amounts) // 2
    level = along(values, 1, count + 2)
    return Pads(amounts[:count], amounts[count:]).apply(x - level) + level


TRAINING: Operators = {
    (TRAINING_DOMAIN, "BatchNormalization"): Operator(
        _frozen_batch_norm, check=check_evaluated, train=_freezable_batch_norm
    ),
    (TRAINING_DOMAIN, "ChannelShift"): Operator(_channel_shift),
    (TRAINING_DOMAIN, "FakeQuantize"): Operator(_fake_quantize),
    (TRAINING_DOMAIN, "FoldingFactor"): Operator(_folding_factor),
    (TRAINING_DOMAIN, "NormShift"): Operator(_norm_shift),
    (TRAINING_DOMAIN, "PadChannels"): Operator(_pad_channels),
    (TRAINING_DOMAIN, "RoundBias"): Operator(_round_bias, train=_round_frozen_bias),
}
"""What runs a node, by its domain and operator; the executor takes them beside its own."""
