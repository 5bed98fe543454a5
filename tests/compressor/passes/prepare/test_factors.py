"""Factors: the predicted error never rises, and falls where channels differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prepare.maths.factors import Columns, Part, Rows, Span, find_factors


def parts(seed: int, count: int, spread: float, *, shared: bool) -> list[Part]:
    """Return a value and the weight that reads it, with channels of very different size."""
    random = torch.Generator().manual_seed(seed)
    size = torch.exp2(spread * torch.randn(count, generator=random))
    weight = torch.randn(1, 7, count, generator=random).abs() / size
    index = torch.arange(count)
    span = Span(torch.stack([0.1 * size, size]), weight[0].square().sum(0), index, 255, False)
    power = size.square()[None] / 4
    columns = Columns(weight, power, torch.ones(1, 7), index[None], 254, shared)
    rows = Rows(size, torch.ones(count), weight[0].square().sum(0), index, 254)
    return [span, columns, rows] if shared else [span, columns]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 12),
    spread=st.floats(0, 5),
    shared=st.booleans(),
)
def test_the_predicted_error_never_rises(seed: int, count: int, spread: float, shared: bool):
    problem = parts(seed, count, spread, shared=shared)
    found = find_factors(problem, count)
    assert found.after <= found.before
    assert bool((found.factors > 0).all())
    given_back = torch.cat([found.factors, torch.ones(1)])
    ones = torch.ones(count + 1)
    assert float(sum(p.error(ones) for p in problem)) == pytest.approx(found.before, rel=1e-6)
    assert float(sum(p.error(given_back) for p in problem)) == pytest.approx(found.after, rel=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_factors_undo_what_makes_channels_differ(shared: bool):
    even = find_factors(parts(1, 16, 0.0, shared=shared), 16)
    uneven = find_factors(parts(1, 16, 3.0, shared=shared), 16)
    assert uneven.before > 50 * even.before
    assert uneven.after < 1.5 * even.after


def test_a_channel_without_a_factor_keeps_its_scale():
    reach, gain = torch.tensor([[0.0, 0.0, 0.0], [1.0, 8.0, 2.0]]), torch.zeros(3)
    gain[2] = 1.0
    span = Span(reach, gain, torch.tensor([0, 1, -1]), 255, False)
    # The widest channel that is left is the one without a factor, whose step is 2 / 255.
    error = span.error(torch.tensor([1.0, 1e9, 1.0]))
    assert float(error) == pytest.approx((2 / 255) ** 2 / 12)
