"""Scales, zero points and rounding."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths.affine import (
    SMALLEST_SCALE,
    absmax_parameters,
    extremes,
    in_groups,
    mse_parameters,
    parameters,
    quantize,
    stored_scale,
    zero_point_of,
)
from compressor.types.layers import Granularity, QuantizedTensor, ScaleType, Scheme

SLACK = 1e-4  # in scales: x / scale reaches 255, float32 has 24 bits

SCALE_TYPES: list[ScaleType] = ["float32", "float16", "bfloat16"]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

values = st.floats(-1e4, 1e4, width=32)


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    kinds: list[Granularity] = ["tensor", "channel", "group"]
    granularity = draw(st.sampled_from(kinds))
    return Scheme(
        bits=draw(st.integers(2, 8)),
        symmetric=draw(st.booleans()),
        signed=draw(st.booleans()),
        granularity=granularity,
        group=draw(st.integers(1, 4)) if granularity == "group" else None,
        scale_type=draw(st.sampled_from(SCALE_TYPES)),
        narrow=draw(st.booleans()),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Scheme]:
    scheme = draw(schemes())
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    columns = groups * (scheme.group or draw(st.integers(1, 4)))
    entries = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    matrix = torch.tensor(entries, dtype=torch.float32).reshape(rows, columns)
    if scheme.symmetric and not scheme.signed:
        matrix = matrix.abs()
    return matrix, scheme


def spread(parameter: Tensor, matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return parameter.repeat_interleave(columns // parameter.shape[1], 1).expand(rows, columns)


def rounded(matrix: Tensor, scheme: Scheme) -> QuantizedTensor:
    return quantize(matrix, *absmax_parameters(matrix, scheme), scheme)


@given(problems())
def test_error_is_at_most_half_a_step(problem: tuple[Tensor, Scheme]) -> None:
    matrix, scheme = problem
    result = rounded(matrix, scheme)
    error = (matrix - result.dequantize()).abs()
    assert torch.all(error <= spread(result.scale, matrix) * (0.5 + SLACK))


@given(problems())
def test_codes_and_parameters_have_the_form_of_the_scheme(problem: tuple[Tensor, Scheme]) -> None:
    matrix, scheme = problem
    result = rounded(matrix, scheme)
    dtype = torch.int8 if scheme.signed else torch.uint8
    rows = 1 if scheme.granularity == "tensor" else matrix.shape[0]
    groups = matrix.shape[1] // scheme.group if scheme.group else 1
    assert result.codes.shape == matrix.shape
    assert result.scale.shape == result.zero_point.shape == (rows, groups)
    assert (result.codes.dtype, result.zero_point.dtype) == (dtype, dtype)
    assert result.scale.dtype == torch.float32
    for codes in (result.codes, result.zero_point):
        assert int(codes.min()) >= scheme.low
        assert int(codes.max()) <= scheme.high
    if scheme.symmetric:
        assert not result.zero_point.any()
    if scheme.scale_type in HALVES:
        stored = result.scale.to(HALVES[scheme.scale_type])
        assert torch.equal(stored.to(torch.float32), result.scale)
    assert bool(((result.scale > 0) & torch.isfinite(result.scale)).all())


@given(problems())
def test_quantizing_what_was_quantized_changes_nothing(problem: tuple[Tensor, Scheme]) -> None:
    matrix, scheme = problem
    once = rounded(matrix, scheme)
    again = quantize(once.dequantize(), once.scale, once.zero_point, scheme)
    assert torch.equal(once.codes, again.codes)


@given(problems())
def test_zero_is_represented_exactly(problem: tuple[Tensor, Scheme]) -> None:
    matrix, scheme = problem
    scale, zero = absmax_parameters(matrix, scheme)
    result = quantize(torch.zeros_like(matrix), scale, zero, scheme)
    assert not result.dequantize().any()


@given(problems())
@settings(max_examples=50)
def test_search_of_the_range_is_never_worse_than_the_full_range(
    problem: tuple[Tensor, Scheme],
) -> None:
    matrix, scheme = problem

    def errors(parameters: tuple[Tensor, Tensor]) -> Tensor:
        found = quantize(matrix, *parameters, scheme).dequantize() - matrix
        squares = found.to(torch.float64).square()
        if scheme.granularity == "tensor":
            return squares.sum()
        return squares.reshape(matrix.shape[0], parameters[0].shape[1], -1).sum(-1)

    full, searched = absmax_parameters(matrix, scheme), mse_parameters(matrix, scheme)
    assert torch.all(errors(searched) <= errors(full))


def test_the_full_range_of_codes_is_used_unless_narrow() -> None:
    matrix = torch.tensor([[-16.0, 7.0], [-8.0, 14.0], [-8.0, 3.0]])
    scale, _ = absmax_parameters(matrix, Scheme(4, narrow=False))
    assert scale.tolist() == [[2.0], [2.0], [1.0]]
    codes = quantize(matrix, scale, torch.zeros(3, 1, dtype=torch.int8), Scheme(4, narrow=False))
    assert codes.codes.tolist() == [[-8, 4], [-4, 7], [-8, 3]]
    scale, _ = absmax_parameters(matrix, Scheme(4, narrow=True))
    assert scale.tolist() == [[np.float32(16 / 7)], [2.0], [np.float32(8 / 7)]]


def test_a_signed_scale_puts_the_greatest_magnitude_where_codes_reach_farthest() -> None:
    matrix = torch.tensor([[-7.0, 16.0], [-16.0, 7.0], [-8.0, 14.0], [0.0, 0.0]])
    scheme = Scheme(4, narrow=False, signed_scale=True)
    scale, zero = absmax_parameters(matrix, scheme)
    assert scale.tolist() == [[-2.0], [2.0], [-1.75], [1.0]]
    codes = quantize(matrix, scale, zero, scheme).codes
    assert codes.tolist() == [[4, -8], [-8, 4], [5, -8], [0, 0]]


@pytest.mark.parametrize("scale_type", ["float32", "float16", "bfloat16"])
def test_signed_scales_have_finer_steps(scale_type: ScaleType) -> None:
    matrix = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    plain = Scheme(2, granularity="group", group=32, scale_type=scale_type, narrow=False)
    signed = replace(plain, signed_scale=True)
    (ours, _), (theirs, _) = (absmax_parameters(matrix, scheme) for scheme in (signed, plain))
    assert 0.3 < float((ours < 0).float().mean()) < 0.7
    assert torch.all(ours.abs() <= theirs)
    errors = [
        (quantize(matrix, *find(matrix, scheme), scheme).dequantize() - matrix).square().mean()
        for find in (absmax_parameters, mse_parameters)
        for scheme in (signed, plain)
    ]
    assert errors[0] < 0.8 * errors[1]
    assert errors[2] < 0.95 * errors[3]


def test_scales_are_rounded_before_codes_are_found() -> None:
    scheme = Scheme(8, scale_type="bfloat16", narrow=False)
    matrix = torch.linspace(-1, 1, 201)[None]
    result = rounded(matrix, scheme)
    expected = float(torch.tensor(1 / 127, dtype=torch.bfloat16))
    assert float(result.scale) == expected != 1 / 127
    assert torch.equal(result.codes[0].to(torch.float32), (matrix[0] / expected).round())


@pytest.mark.parametrize("scale_type", ["float16", "bfloat16"])
def test_asymmetric_scales_are_rounded_up(scale_type: ScaleType) -> None:
    exact = torch.rand(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(8, symmetric=False, signed=False, scale_type=scale_type)
    dtype = HALVES[scale_type]
    found = stored_scale(exact, scheme)
    nearest = exact.to(torch.float32).to(dtype)
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    expected = torch.where(nearest.double() < exact, above.double(), nearest.double())
    assert torch.equal(found.double(), expected)
    assert not torch.equal(found, nearest.float())


@pytest.mark.parametrize(("scale_type", "largest"), [("float16", 65504.0), ("bfloat16", 3.38e38)])
def test_scales_round_neither_to_zero_nor_to_infinity(
    scale_type: ScaleType, largest: float
) -> None:
    for symmetric in (True, False):
        scheme = Scheme(4, symmetric=symmetric, scale_type=scale_type)
        exact = torch.tensor([1e-300, 1e-30, 1e-8, 0.0, 65519.0, 1e30, 1e300], dtype=torch.float64)
        found = stored_scale(exact, scheme)
        assert bool((found > 0).all())
        assert bool(torch.isfinite(found).all())
        assert float(found[3]) == 1
        assert float(found[-1]) == pytest.approx(largest, rel=0.01)
    # The least numbers of float16 are few: the nearest to 1.4 of them would clip much.
    least = torch.tensor([1.4 * 2.0**-24], dtype=torch.float64)
    assert float(stored_scale(least, Scheme(8, scale_type="float16"))) == 2 * 2.0**-24


@pytest.mark.parametrize("find", [absmax_parameters, mse_parameters])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_in_pieces_are_the_same(find: Any, dtype: torch.dtype) -> None:
    matrix = torch.randn(6, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    for symmetric in (True, False):
        scheme = Scheme(4, symmetric, symmetric, "group", 32, scale_type="bfloat16", narrow=False)
        whole = quantize(matrix, *find(matrix, scheme), scheme)
        for size in (1, 4, 5):
            parts = [quantize(p, *find(p, scheme), scheme) for p in matrix.split(size)]
            for field in ("codes", "scale", "zero_point"):
                joined = torch.cat([getattr(part, field) for part in parts])
                assert torch.equal(getattr(whole, field), joined)


def test_matrices_without_rows_or_columns() -> None:
    for scheme in (Scheme(4), Scheme(4, granularity="group", group=8, scale_type="float16")):
        for find in (absmax_parameters, mse_parameters):
            scale, zero = find(torch.zeros(0, 16), scheme)
            assert quantize(torch.zeros(0, 16), scale, zero, scheme).codes.shape == (0, 16)
    scale, _ = absmax_parameters(torch.zeros(3, 0), Scheme(4))
    assert scale.tolist() == [[1.0]] * 3


def test_transposed_weights_need_no_copy_of_their_own() -> None:
    matrix = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    scheme = Scheme(4, granularity="group", group=16)
    assert torch.equal(
        rounded(matrix.T.contiguous().T, scheme).codes, rounded(matrix, scheme).codes
    )


def test_float_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="fp8-e4m3/channel is not a scheme of integers"):
        absmax_parameters(torch.ones(1, 4), Scheme(8, element="e4m3"))
    with pytest.raises(ValueError, match="no scales of type e8m0"):
        absmax_parameters(torch.ones(1, 4), Scheme(8, scale_type="e8m0"))


def test_symmetric_scales_divide_by_the_largest_code() -> None:
    matrix = torch.tensor([[-14.0, 7.0]])
    scale, _ = absmax_parameters(matrix, Scheme(4))
    assert scale.tolist() == [[2.0]]
    scale, _ = absmax_parameters(matrix, Scheme(8))
    assert scale.tolist() == [[np.float32(14 / 127)]]


def test_halves_round_to_even() -> None:
    matrix = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    one, none = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int8)
    assert quantize(matrix, one, none, Scheme(8)).codes.tolist() == [[0, 2, 2, 0, -2, -2]]


def test_values_outside_the_range_saturate() -> None:
    one, none = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int8)
    matrix = torch.tensor([[-1e30, -128.0, 1e30]])
    assert quantize(matrix, one, none, Scheme(8)).codes.tolist() == [[-127, -127, 127]]


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_zero_and_tiny_rows_have_usable_scales(granularity: Granularity) -> None:
    scheme = Scheme(8, granularity=granularity)
    scale, _ = absmax_parameters(torch.zeros(3, 4), scheme)
    assert torch.all(scale == 1)
    tiny = torch.full((3, 4), 1e-40)
    scale, zero = absmax_parameters(tiny, scheme)
    assert torch.all(scale == SMALLEST_SCALE)
    assert not quantize(tiny, scale, zero, scheme).codes.any()


def test_extreme_values_stay_finite() -> None:
    matrix = torch.tensor([[-3e38, 3e38]])
    for scheme in (Scheme(8), Scheme(8, symmetric=False)):
        result = rounded(matrix, scheme)
        assert torch.isfinite(result.dequantize()).all()


def test_half_precision_weights_are_quantized_in_float32() -> None:
    matrix = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = rounded(matrix.to(torch.float32), Scheme(8))
    assert torch.equal(rounded(matrix, Scheme(8)).codes, exact.codes)


def test_many_rows_are_the_same_as_one_by_one() -> None:
    matrix = torch.randn(3000, 200, generator=torch.Generator().manual_seed(2))
    scheme = Scheme(4, symmetric=False)
    whole = rounded(matrix, scheme)
    parts = [rounded(part, scheme) for part in torch.split(matrix, 7)]
    assert torch.equal(whole.codes, torch.cat([p.codes for p in parts]))
    assert torch.equal(whole.scale, torch.cat([p.scale for p in parts]))


@pytest.mark.parametrize("find", [absmax_parameters, mse_parameters])
def test_groups_must_divide_the_columns(find: object) -> None:
    scheme = Scheme(4, granularity="group", group=64)
    with pytest.raises(ValueError, match="100 columns do not divide into groups of 64"):
        find(torch.zeros(2, 100), scheme)  # type: ignore[operator]


def test_unsigned_symmetric_schemes_refuse_negative_values() -> None:
    with pytest.raises(ValueError, match="negative"):
        absmax_parameters(torch.tensor([[-1.0, 1.0]]), Scheme(8, signed=False))


def test_bounds_that_the_type_of_a_scale_does_not_reach() -> None:
    """A scale is rounded up only where an end would lie more than half a step too far."""
    exact = torch.tensor([1 + 1 / 512], dtype=torch.float64)  # bfloat16 has 1 and 1 + 1 / 128
    assert float(stored_scale(exact, Scheme(8, scale_type="bfloat16"))) == 1
    # 127.5 · 1 < 127 · 1.004: more than half a step beyond.
    exact = torch.tensor([1.0039], dtype=torch.float64)
    assert float(stored_scale(exact, Scheme(8, scale_type="bfloat16"))) == 1
    exact = torch.tensor([1.00394], dtype=torch.float64)
    assert float(stored_scale(exact, Scheme(8, scale_type="bfloat16"))) == 1 + 1 / 128


def test_extremes_hold_zero_and_are_as_exact_as_the_values() -> None:
    fine = 1 + 2.0**-40
    matrix = torch.tensor([[0.5, fine], [2.0, 3.0], [-fine, -4.0]], dtype=torch.float64)
    for scheme in (Scheme(8), Scheme(8, granularity="tensor")):
        low, high = extremes(in_groups(matrix, scheme), scheme)
        assert low.dtype == high.dtype == torch.float64
        if scheme.granularity == "tensor":
            assert (low.tolist(), high.tolist()) == ([[-4.0]], [[3.0]])
        else:
            assert low.tolist() == [[0.0], [0.0], [-4.0]]
            assert high.tolist() == [[fine], [3.0], [0.0]]
        low, high = extremes(in_groups(matrix.to(torch.bfloat16), scheme), scheme)
        assert low.dtype == high.dtype == torch.float64
    low, _ = extremes(in_groups(matrix[:2], Scheme(8, granularity="tensor")), scheme)
    assert low.tolist() == [[0.0]]


@pytest.mark.parametrize("signed", [False, True])
def test_zero_points_are_codes(signed: bool) -> None:
    scheme = Scheme(8, False, signed)
    dtype = torch.int8 if signed else torch.uint8
    low = torch.tensor([[-1000.0], [-3.4], [10.0]], dtype=torch.float64)
    found = zero_point_of(low, torch.ones(3, 1), scheme)
    assert found.dtype == dtype
    assert found.tolist() == [[scheme.high], [scheme.low + 3], [scheme.low]]
    _, none = parameters(low.clamp(max=0), -low.clamp(max=0), Scheme(8, signed=True))
    assert none.dtype == torch.int8
    positive = low.abs()
    scale, none = parameters(positive * 0, positive, Scheme(8, signed=False))
    assert none.dtype == torch.uint8
    assert scale.dtype == torch.float32
    one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=dtype)
    assert quantize(torch.ones(1, 2), one, zero, scheme).codes.dtype == dtype


@pytest.mark.parametrize(
    ("units", "narrow", "rounded_to"),
    # 127 or 128 times the scale lies more than half a step beyond as many of the nearest.
    [(1.0035, True, 1), (1.008, True, 2), (1.0039, False, 1), (1.00391, False, 2)],
)
def test_a_scale_grows_where_an_end_lies_half_a_step_beyond(
    units: float, narrow: bool, rounded_to: int
) -> None:
    exact = torch.tensor([units * 2.0**-24], dtype=torch.float64)
    found = stored_scale(exact, Scheme(8, scale_type="float16", narrow=narrow))
    assert found.dtype == torch.float32
    assert float(found) == rounded_to * 2.0**-24
