"""Properties of affine maps of channels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from compressor.passes.fuse.affine import batch_norm, identity

SIZES = st.integers(1, 8)


def draw(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(0, 1000), st.sampled_from([1e-12, 1e-5, 1e-3]))
def test_layer_and_batch_norm_are_the_folded_layer(rows, columns, seed, epsilon):
    weight, bias, x = draw(seed, rows, columns), draw(seed + 1, rows), draw(seed + 2, 5, columns)
    gamma, beta, mean = (draw(seed + i, rows) for i in (3, 4, 5))
    variance = draw(seed + 6, rows).abs() + 1e-3
    affine = batch_norm(gamma, beta, mean, variance, epsilon)
    expected = functional.batch_norm(
        functional.linear(x, weight, bias), mean, variance, gamma, beta, eps=epsilon
    )
    folded = functional.linear(x, affine.weight(weight), affine.bias(bias))
    torch.testing.assert_close(folded, expected, rtol=1e-10, atol=1e-10)


def test_identity_changes_nothing():
    weight, bias = draw(0, 3, 4), draw(1, 3)
    assert torch.equal(identity().weight(weight), weight)
    assert torch.equal(identity().bias(bias), bias)


@pytest.mark.parametrize("variance", [-1e-5, -2.0, float("nan")])
def test_a_variance_that_is_not_positive_is_refused(variance):
    ones = torch.ones(3, dtype=torch.float64)
    bad = torch.tensor([1.0, 1.0, variance], dtype=torch.float64)
    with pytest.raises(ValueError, match="channel 2"):
        batch_norm(ones, ones, ones, bad, 1e-5)
