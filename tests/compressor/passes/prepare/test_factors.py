"""Factors: the predicted error never rises, and falls where channels differ."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.prepare.maths.factors import find_factors
from compressor.passes.prepare.maths.parts import Columns, Part, Rows, Span


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_softened_errors_are_near_the_exact_ones_and_their_slopes_are_derivatives(
    shared: bool, symmetric: bool
):
    random = torch.Generator().manual_seed(3)
    span, columns, *rows = parts(3, 12, 2.0, shared=shared)
    assert isinstance(span, Span)
    assert isinstance(columns, Columns)
    kept = span.index.clone()
    kept[4] = -1  # a channel without a factor
    problem = [
        Span(span.reach, span.gain, kept, span.steps, symmetric),
        Columns(columns.peaks, columns.power, columns.gain, kept[None], columns.steps, shared),
        *rows,
    ]
    logarithms = torch.randn(13, generator=random, dtype=torch.float64)
    logarithms[-1] = 0.0
    for part in problem:
        soft = part.softened()
        error, slopes = soft(logarithms)
        # A norm of exponent 24 of n sizes exceeds the greatest by a factor of n^(1/24) at most;
        # n is at most the weights of all rows, and an error goes by its square.
        exact = float(part.error(torch.exp2(logarithms).to(torch.float32)))
        assert exact * (1 - 1e-5) <= float(error) <= exact * (7 * 12) ** (2 / 24)
        for place in range(12):
            moved = logarithms.clone()
            moved[place] += 1e-6
            difference = float(soft(moved)[0] - error) / (1e-6 * math.log(2))
            assert difference == pytest.approx(float(slopes[place]), abs=1e-5 * float(error))
