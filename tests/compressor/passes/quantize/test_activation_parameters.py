"""Scales and zero points of activations, from the ranges of their values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.quantize.maths.affine import (
    SMALLEST_SCALE,
    activation_parameters,
    stored_scale,
)
from compressor.types.layers import Scheme
from compressor.types.statistics import Range

SLACK = 1e-4  # in scales: x / scale reaches 255, float32 has 24 bits


@given(
    low=st.floats(-1e30, 0),
    high=st.floats(0, 1e30),
    bits=st.integers(2, 8),
    signed=st.booleans(),
    symmetric=st.booleans(),
)
def test_activation_ranges(
    low: float, high: float, bits: int, signed: bool, symmetric: bool
) -> None:
    low = 0.0 if symmetric and not signed else low
    scheme = Scheme(bits, symmetric, signed, "tensor")
    scale, zero = activation_parameters(Range(low, high), bits, signed, symmetric)
    assert scale == float(np.float32(scale))
    assert scale >= SMALLEST_SCALE
    assert scheme.low <= zero <= scheme.high
    assert zero == 0 or not symmetric
    for end in (low, high):
        code = min(max(round(end / scale) + zero, scheme.low), scheme.high)
        assert abs(end - (code - zero) * scale) <= scale * (0.5 + SLACK)


def test_activation_ranges_by_hand() -> None:
    assert activation_parameters(Range(0.0, 0.0), 8, signed=True, symmetric=True) == (1.0, 0)
    assert activation_parameters(Range(0.0, 0.0), 8, signed=False, symmetric=False) == (1.0, 0)
    assert activation_parameters(Range(-127.0, 3.0), 8, signed=True, symmetric=True) == (1.0, 0)
    assert activation_parameters(Range(0.0, 255.0), 8, signed=False, symmetric=False) == (1.0, 0)
    assert activation_parameters(Range(0.0, 255.0), 8, signed=True, symmetric=False) == (1.0, -128)
    assert activation_parameters(Range(-64.0, 191.0), 8, signed=False, symmetric=False) == (1.0, 64)
    with pytest.raises(ValueError, match="finite"):
        activation_parameters(Range(0.0, math.inf), 8, signed=True, symmetric=True)


def test_codes_without_a_sign_refuse_negative_values() -> None:
    with pytest.raises(ValueError, match="negative"):
        activation_parameters(Range(-1.0, 1.0), 8, signed=False, symmetric=True)


def test_signed_codes_that_are_not_symmetric() -> None:
    exact = torch.tensor([1.0001], dtype=torch.float64)
    scheme = Scheme(8, symmetric=False, signed=True, scale_type="bfloat16")
    assert float(stored_scale(exact, scheme)) == 1 + 1 / 128
    for signed, zero in ((True, -128), (False, 0)):
        found = activation_parameters(Range(0.0, 510.0), 8, signed=signed, symmetric=False)
        assert found == (2.0, zero)
        found = activation_parameters(Range(255.0, 510.0), 8, signed=signed, symmetric=False)
        assert found == (2.0, zero), "zero is in the range"
    for high in (0.1, 0.3, 0.7, 1.1):
        scale, _ = activation_parameters(Range(0.0, high), 8, signed=False, symmetric=False)
        assert scale == float(np.float32(high / 255))
