"""Fake quantization: its rounding beside PyTorch's own kernels, and the gradients of scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.train.qat.operators import (
    CodeSpan,
    Places,
    fake_quantize,
    round_bias,
)

# PyTorch 2.13 truncates towards zero where codes are negative, so it is asked about others only.
UNSIGNED = ((0, 255), (0, 15), (0, 3))
SIGNED = ((-128, 127), (-7, 7), (-2, 1))


def values(span: CodeSpan, scale: Tensor, zero: Tensor, seed: int) -> Tensor:
    """Return values whose codes lie a tenth of a step off any tie or end, some out of range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, len(scale) if scale.dim() else 3, 5)
    whole = torch.randint(span.low - 6, span.high + 7, shape, generator=generator).float()
    off = torch.rand(shape, generator=generator) * 0.8 - 0.4
    # LSQ lets gradients pass up to the last code, PyTorch half a step further.
    off = torch.where(whole >= span.high, off.abs() + 1.6, off)
    off = torch.where(whole <= span.low, -off.abs() - 1.6, off)
    return (whole + off - span.spread(zero, whole)) * span.spread(scale, whole)


@given(
    st.sampled_from(UNSIGNED), st.floats(1e-3, 10), st.integers(0, 10), st.booleans(), st.integers()
)
def test_values_and_gradients_are_those_of_pytorch(
    ends: tuple[int, int], size: float, place: int, channels: bool, seed: int
) -> None:
    span = CodeSpan(*ends, axis=1 if channels else None)
    scale = size * (torch.tensor([1.0, 2.0, 3.0]) if channels else torch.tensor(1.0))
    zero = torch.full_like(scale, min(max(place + span.low, span.low), span.high))
    x = values(span, scale, zero, seed % 1000).requires_grad_(True)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    theirs_scale, theirs_zero = (t.clone().reshape(-1).requires_grad_(True) for t in (scale, zero))
    if channels:
        theirs = torch._fake_quantize_learnable_per_channel_affine(
            x, theirs_scale, theirs_zero, 1, *ends, 1.0
        )
    else:
        theirs = torch._fake_quantize_learnable_per_tensor_affine(
            x, theirs_scale, theirs_zero, *ends, 1.0
        )
    of_x, of_scale, of_zero = torch.autograd.grad(theirs, (x, theirs_scale, theirs_zero), gradient)
    own_size = torch.ones_like(scale).requires_grad_(True)
    offset = torch.zeros_like(scale).requires_grad_(True)
    ours = fake_quantize(x, own_size, scale, Places(zero, offset), span)
    torch.testing.assert_close(ours, theirs)
    own_x, own_scale, own_offset = torch.autograd.grad(ours, (x, own_size, offset), gradient)
    torch.testing.assert_close(own_x, of_x)
    factor = span.gradient_scale(x)
    # A step along these moves scale and zero point as LSQ and LSQ+ do.
    wide = float(gradient.abs().sum()) * factor
    torch.testing.assert_close(
        own_scale * scale, factor * of_scale.reshape(scale.shape), rtol=1e-3, atol=1e-4 * wide
    )
    wanted = factor * of_zero.reshape(scale.shape) / scale**2 / span.steps
    torch.testing.assert_close(own_offset, wanted, rtol=1e-3, atol=1e-5 * wide / float(scale.min()))


@given(st.sampled_from(SIGNED), st.floats(1e-3, 10), st.integers(0, 255), st.booleans())
def test_what_codes_are_called_changes_nothing(
    ends: tuple[int, int], size: float, place: int, channels: bool
) -> None:
    axis = 1 if channels else None
    signed, unsigned = CodeSpan(*ends, axis), CodeSpan(0, ends[1] - ends[0], axis)
    scale = size * (torch.tensor([1.0, 2.0, 3.0]) if channels else torch.tensor(1.0))
    zero = torch.full_like(scale, min(place, unsigned.high))
    x = values(unsigned, scale, zero, place)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for span, places in ((signed, zero + signed.low), (unsigned, zero)):
        trained = [
            t.clone().requires_grad_(True)
            for t in (x, torch.ones_like(scale), torch.zeros_like(scale))
        ]
        rounded = fake_quantize(trained[0], trained[1], scale, Places(places, trained[2]), span)
        of_x, of_size, of_offset = torch.autograd.grad(rounded, trained, gradient)
        factor = span.gradient_scale(x)
        found.append((rounded.detach(), of_x, of_size / factor, of_offset / factor))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


def test_gradients_are_scaled_by_features_and_codes() -> None:
    x = torch.zeros(8, 4, 5, 5)
    assert CodeSpan(0, 15, batched=True).gradient_scale(x) == pytest.approx((100 * 15) ** -0.5)
    assert CodeSpan(-7, 7, axis=0).gradient_scale(x) == pytest.approx((100 * 7) ** -0.5)
    assert CodeSpan(-2, 1).gradient_scale(x) == pytest.approx(800**-0.5)


def test_a_zero_point_stays_among_the_codes() -> None:
    span = CodeSpan(0, 15)
    for offset, wanted in ((-10.0, 0.0), (0.1, 4.0), (10.0, 15.0)):
        assert Places(torch.tensor(2.0), torch.tensor(offset)).codes(span) == wanted


def test_a_bias_is_rounded_together_with_what_is_added_to_it() -> None:
    bias = torch.tensor([0.26, -1.0, 3.1], requires_grad=True)
    scale, more = torch.tensor([0.5, 0.3, 1.0]), torch.tensor([0.1, 0.05, -0.2])
    found = round_bias(bias, scale, more)
    codes = (found.detach() + more) / scale
    torch.testing.assert_close(codes, codes.round())
    assert bool(((found - bias).detach().abs() <= 0.5 * scale).all())
    found.sum().backward()
    assert torch.equal(bias.grad, torch.ones(3))
