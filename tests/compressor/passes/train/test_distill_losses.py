"""Distances between student and teacher, against PyTorch's own and by definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from compressor.passes.train.distill.taps import Projection, width_axis
from compressor.passes.train.losses import (
    attention_difference,
    attention_map,
    kl_divergence,
    mean_square,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 5), st.integers(2, 7), st.floats(0.5, 20), st.integers(0, 1000))
def test_divergence_is_that_of_the_softened_probabilities(
    samples: int, classes: int, temperature: float, seed: int
) -> None:
    ours, theirs = random(samples, classes, seed=seed), random(samples, classes, seed=seed + 1)
    p = functional.softmax(theirs.double() / temperature, 1)
    q = functional.softmax(ours.double() / temperature, 1)
    wanted = temperature**2 * (p * (p / q).log()).sum(1)
    found = kl_divergence(ours, theirs, temperature)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    assert bool((found > -1e-4).all())


def test_divergence_has_the_gradient_of_the_papers_equation() -> None:
    # Hinton et al., equation 2: dC/dz = (q - p) / T, times T squared here.
    ours, theirs, temperature = random(4, 5).requires_grad_(), random(4, 5, seed=1), 3.0
    (found,) = torch.autograd.grad(kl_divergence(ours, theirs, temperature).sum(), ours)
    q, p = (functional.softmax(z.detach() / temperature, 1) for z in (ours, theirs))
    torch.testing.assert_close(found, temperature * (q - p), rtol=1e-4, atol=1e-5)


def test_divergence_from_itself_is_nothing() -> None:
    logits = random(3, 4)
    torch.testing.assert_close(kl_divergence(logits, logits.clone(), 2.0), torch.zeros(3))


def test_positions_that_do_not_count_are_left_out() -> None:
    ours, theirs = random(2, 3, 5), random(2, 3, 5, seed=1)
    counted = torch.tensor([[True, False, True], [False, False, False]])
    found = kl_divergence(ours, theirs, 2.0, counted)
    each = [kl_divergence(ours[0, i : i + 1], theirs[0, i : i + 1], 2.0) for i in (0, 2)]
    torch.testing.assert_close(found[0], torch.cat(each).mean())
    assert found[1] == 0
    whole = kl_divergence(ours, theirs, 2.0)
    torch.testing.assert_close(whole[1], kl_divergence(ours[1], theirs[1], 2.0).mean())


def test_mean_square() -> None:
    ours, theirs = random(3, 2, 4), random(3, 2, 4, seed=1)
    wanted = functional.mse_loss(ours, theirs, reduction="none").mean((1, 2))
    torch.testing.assert_close(mean_square(ours, theirs), wanted)


def test_attention_maps_know_no_scale_and_no_order_of_channels() -> None:
    values = random(2, 6, 3, 3)
    found = attention_map(values, 1)
    assert found.shape == (2, 9)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(found, attention_map(-5 * values.flip(1), 1))
    by_hand = values[0].square().sum(0).flatten()
    torch.testing.assert_close(found[0], by_hand / by_hand.norm())


def test_attention_maps_of_tokens_are_over_the_width() -> None:
    tokens = random(2, 5, 8)
    assert attention_map(tokens, width_axis(3, convolution=False)).shape == (2, 5)
    assert attention_map(tokens, width_axis(3, convolution=True)).shape == (2, 8)


def test_equal_attention_has_a_gradient() -> None:
    values = random(2, 4, 3, 3).requires_grad_()
    found = attention_map(values, 1)
    difference = attention_difference(found, found.detach().clone())
    (gradient,) = torch.autograd.grad(difference.sum(), values)
    assert bool(gradient.isfinite().all())
    assert bool((difference == 0).all())


def test_opposite_attention_is_two_apart() -> None:
    one, other = torch.eye(2)[:1], torch.eye(2)[1:]
    torch.testing.assert_close(attention_difference(one, other), torch.tensor([2.0]))


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 4, 4), 1), ((2, 5, 3), 2), ((2, 3), 1)])
def test_a_projection_is_a_convolution_of_size_one(shape: tuple[int, ...], axis: int) -> None:
    projection = Projection(axis, 3, 7)
    values = random(*shape)
    found = projection(values)
    assert found.shape == tuple(7 if i == axis else n for i, n in enumerate(shape))
    weight, bias = projection.linear.weight, projection.linear.bias
    flat = values.movedim(axis, 1).reshape(shape[0], 3, -1)
    wanted = functional.conv1d(flat, weight[:, :, None], bias)
    torch.testing.assert_close(found.movedim(axis, 1).reshape(shape[0], 7, -1), wanted)
