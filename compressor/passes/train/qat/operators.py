"""The operators of graphs that are trained; they never reach a file.

Fake quantization rounds values to what codes represent, with gradients for the scales. The rounding
is that of ``QuantizeLinear``. PyTorch's own kernels do the same, element by element: measured on
one core on ``[64, 16, 32, 32]``, 14 ms forward where the vectorized operators used here take 0.3 ms
(PyTorch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.models.executor.node import Host, Ints, Operator, Operators, along, one_of
from compressor.models.executor.ops.layers import batch_norm, check_evaluated, live_batch_norm
from compressor.models.executor.ops.windows import Pads
from compressor.passes.quantize.maths.pairs import clip_pairs

TRAINING_DOMAIN = "compressor.training"
"""The domain of the operators."""

LEAST_FACTOR = 1e-12
"""What stands for a factor of zero, of a channel that was pruned: it can be divided by."""


@dataclass(frozen=True)
class CodeSpan:
    """The codes that values are rounded to.

    Attributes:
        low: smallest code.
        high: largest code.
        axis: where the channels lie that have a scale each; ``None`` if one scale serves all.
        batched: the first axis runs over samples.
        paired: positions of a kernel whose codes may not overflow in pairs, 0 for any codes; see
            :class:`compressor.types.layers.Scheme`.
        columns_first: a matrix has what is summed over first.
    """

    low: int
    high: int
    axis: int | None = None
    batched: bool = False
    paired: int = 0
    columns_first: bool = False

    @property
    def steps(self) -> int:
        """Distance from the smallest to the largest code."""
        return self.high - self.low

    def fitting(self, codes: Tensor) -> Tensor:
        """Return codes of which no pair overflows."""
        if not self.paired:
            return codes
        rows = codes.T if self.columns_first else codes.reshape(len(codes), -1)
        clipped = clip_pairs(rows, self.paired)
        return clipped.T if self.columns_first else clipped.reshape(codes.shape)

    def spread(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Shape a vector of the channels so that it broadcasts with ``x``."""
        if self.axis is None:
            return parameter.reshape(())
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return parameter.reshape(shape)

    def total(self, values: Tensor) -> Tensor:
        """Sum over everything that shares a scale."""
        if self.axis is None:
            return values.sum()
        return values.sum([axis for axis in range(values.dim()) if axis != self.axis])

    def gradient_scale(self, x: Tensor) -> float:
        """What LSQ multiplies the gradient of a step size with: ``1 / sqrt(n * Qp)``.

        ``n`` counts the weights, or the features of one sample, that share the scale.
        """
        count = x.numel() // (x.shape[0] if self.batched else 1)
        if self.axis is not None:
            count //= x.shape[self.axis]
        return float((max(count, 1) * max(self.high, 1)) ** -0.5)


def fake_quantize(
    x: Tensor,
    size: Tensor,
    unit: Tensor,
    places: Places,
    span: CodeSpan,
    measure: Tensor | None = None,
) -> Tensor:
    """Return ``clamp(round(x / s), low - z, high - z) * s``, with ``s = size * unit``.

    Gradients are those of S. Esser et al., Learned step size quantization, 2020 (arXiv:1902.08153),
    equations 1 to 3 and section 2.2: inside the range rounding passes a gradient on as it is. That
    of zero points is the one of Y. Bhalgat et al., LSQ+, 2020 (arXiv:2004.09576), section 3.1; here
    they are rounded, so that zero is represented exactly.

    What is trained has no unit: ``size`` is the scale as a multiple of the one at the beginning,
    so that a step of Adam changes it by a share. Its gradient is divided by the square of the
    unit, which makes a step of gradient descent change ``s`` as it would if ``s`` itself were
    trained.

    Args:
        x: any shape, float32.
        size: ``[]`` or ``[channels]``, positive.
        unit: likewise, constant.
        places: the zero points.
        span: the codes.
        measure: takes the unit's part in the gradient. Where ``x`` is a multiple of what is
            trained, it is the unit without that factor: ``s`` then moves as it would for the
            thing itself.
    """
    measure = unit if measure is None else measure
    result: Tensor = _FakeQuantize.apply(  # type: ignore[no-untyped-call]  # PyTorch's has no types
        x, size, unit, measure, places.offset, places.zero, span
    )
    return result


@dataclass(frozen=True)
class Places:
    """Zero points.

    Attributes:
        zero: the zero points at the beginning, as floats in the shape of the scales.
        offset: what is added to them, in multiples of the range; ``None`` if they are not trained.
    """

    zero: Tensor
    offset: Tensor | None = None

    def codes(self, span: CodeSpan) -> Tensor:
        """Return the zero points, whole numbers."""
        if self.offset is None:
            return self.zero
        return (self.zero + self.offset * span.steps).round().clamp(span.low, span.high)


def round_bias(bias: Tensor, scale: Tensor, more: Tensor | None = None) -> Tensor:
    """Round a bias to whole multiples of the accumulator's scale; gradients pass as they are.

    B. Jacob et al., Quantization and training of neural networks for efficient integer-arithmetic-
    only inference, 2017 (arXiv:1712.05877), section 2.4.

    Args:
        bias: ``[rows]``.
        scale: ``[rows]`` or ``[]``, the product of the input's and the weight's scale.
        more: ``[rows]``, what is added to the bias before it is stored; the result is still
            without it.
    """
    with torch.no_grad():
        whole = bias.double() if more is None else bias.double() + more.double()
        wide = scale.double()
        change = (torch.round(whole / wide) * wide - whole).to(bias.dtype)
    return bias + change


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        size: Tensor,
        unit: Tensor,
        measure: Tensor,
        offset: Tensor | None,
        zero: Tensor,
        span: CodeSpan,
    ) -> Tensor:
        place = span.spread(Places(zero, offset).codes(span), x)
        scale = span.spread(size * unit, x)
        least, most = (span.low - place) * scale, (span.high - place) * scale
        quantized = _clamped(x, least, most)
        divisor = _number(scale)
        quantized = span.fitting(quantized.div_(divisor).round_()).mul_(divisor)
        ctx.save_for_backward(x, quantized, scale, unit, measure, least, most)
        ctx.span = span
        return quantized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, quantized, scale, unit, measure, least, most = ctx.saved_tensors
        span: CodeSpan = ctx.span
        passed = _passed(gradient, x, least, most)
        of_size = of_offset = None
        factor = span.gradient_scale(x)
        flat = scale.reshape(unit.shape)
        if ctx.needs_input_grad[1]:
            # Inside the range quantized - x, outside of it the end of the range; both over s.
            step = _inner(gradient, quantized, passed, x, span).reshape(unit.shape) / flat
            of_size = step * factor * unit / measure.square()
        if ctx.needs_input_grad[4]:
            outside = (span.total(gradient) - span.total(passed)).reshape(unit.shape)
            of_offset = -outside * factor / (flat * span.steps)
        return (
            passed if ctx.needs_input_grad[0] else None,
            of_size,
            None,
            None,
            of_offset,
            None,
            None,
        )


def _clamped(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
    if least.numel() == 1 and least.is_cpu:
        return torch.clamp(x, least.item(), most.item())
    return torch.clamp(x, least, most)


def _passed(gradient: Tensor, x: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Return the gradient where a value lies inside the range, and zero elsewhere."""
    if least.numel() == 1 and least.is_cpu:
        passed: Tensor = torch.ops.aten.hardtanh_backward(gradient, x, least.item(), most.item())
        return passed
    return gradient * ((x > least) & (x < most))


def _number(scale: Tensor) -> Tensor | float:
    """Return a scale as a number where that is at hand: operators are faster with one."""
    return scale.item() if scale.numel() == 1 and scale.is_cpu else scale


def _inner(
    gradient: Tensor, quantized: Tensor, passed: Tensor, x: Tensor, span: CodeSpan
) -> Tensor:
    """Sum ``gradient * quantized - passed * x`` over what shares a scale."""
    if span.axis is None:
        parts = (t.reshape(-1) for t in (gradient, quantized, passed, x))
        first, second, third, fourth = parts
        return torch.dot(first, second) - torch.dot(third, fourth)
    return span.total(gradient * quantized - passed * x)


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
    paired: int = 0,
    columns_first: bool = False,
) -> Tensor:
    """Round to codes; scale and zero point may be trained; see :func:`fake_quantize`.

    Where there is a ``factor``, which broadcasts with ``x``, it is ``x * factor`` that is rounded,
    and the result is divided by it. An ``axis`` of -1 stands for one scale.
    """
    span = CodeSpan(low, high, None if axis < 0 else axis, batched, paired, columns_first)
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


def _frozen_batch_norm(x: Tensor, *norm: Tensor, epsilon: float = 1e-5) -> Tensor:
    return batch_norm(x, *norm[:4], epsilon=epsilon)


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


def _round_frozen_bias(bias: Tensor, *others: Any) -> Tensor:
    frozen = others[5] if len(others) > 5 else None
    return bias if frozen is not None and not bool(frozen) else _round_bias(bias, *others)


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
