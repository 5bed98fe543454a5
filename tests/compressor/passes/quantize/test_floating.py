"""Floats of 8 and 4 bits, against the casts of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths.affine import mse_parameters, stored_scale
from compressor.passes.quantize.maths.floating import (
    candidate_scales,
    e2m1_codes,
    float_mse_parameters,
    float_parameters,
    float_scale,
    nearest_values,
    nvfp4_tensor_scale,
    quantize_floats,
    round_to_nearest,
    shortened,
)
from compressor.types.layers import QuantizedTensor, Scheme

FP8 = Scheme(8, element="e4m3")
FP8_HALF = Scheme(8, element="e4m3", scale_type="bfloat16")
FP8_TENSOR = Scheme(8, element="e4m3", granularity="tensor")
MXFP4 = Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0")
NVFP4 = Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3")
SCHEMES = [FP8, FP8_HALF, FP8_TENSOR, MXFP4, NVFP4]


def quantized(matrix: Tensor, scheme: Scheme, searched: bool = False) -> QuantizedTensor:
    whole = None
    if scheme.scale_type == "e4m3":
        whole = nvfp4_tensor_scale(matrix.abs().max())
    find = float_mse_parameters if searched else float_parameters
    return quantize_floats(matrix, find(matrix, scheme, whole), scheme, whole)


def gaussian(rows: int = 8, columns: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def awkward() -> Tensor:
    """Every eighth of a step, so all ties; both zeros, tiny and huge values, and random ones."""
    grid = torch.arange(-8 * 64, 8 * 64 + 1) / 64
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30])
    return torch.cat([grid, special, 4 * gaussian().flatten()])


def test_e2m1_rounds_as_the_cast_does() -> None:
    values = awkward()
    expected = values.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(e2m1_codes(values).numpy(), expected.view(np.uint8))
    found = nearest_values(values, MXFP4).numpy()
    assert np.array_equal(found, expected.astype(np.float32))
    assert np.array_equal(np.signbit(found), np.signbit(expected.astype(np.float32)))


def test_e4m3_rounds_as_the_cast_does_and_saturates() -> None:
    values = torch.cat([awkward(), 100 * awkward(), 0.001 * awkward(), torch.tensor([464.0, 465])])
    expected = values.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(nearest_values(values, FP8).numpy(), expected.astype(np.float32))
    one = torch.ones(1, 1)
    codes = quantize_floats(values[None], one, FP8).codes.view(torch.uint8)
    assert np.array_equal(codes[0].numpy(), expected.view(np.uint8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_whole_matrices_are_casts_of_scaled_ones(scheme: Scheme) -> None:
    matrix = gaussian()
    found = quantized(matrix, scheme)
    scale = found.scale if found.tensor_scale is None else found.scale * found.tensor_scale
    steps = scale.repeat_interleave(matrix.shape[1] // scale.shape[1], 1)
    kind = ml_dtypes.float4_e2m1fn if scheme.element == "e2m1" else ml_dtypes.float8_e4m3fn
    scaled = (matrix / steps).clamp(-scheme.largest, scheme.largest).numpy().astype(kind)
    assert np.array_equal(found.codes.view(torch.uint8).numpy(), scaled.view(np.uint8))
    expected = torch.from_numpy(scaled.astype(np.float32)) * steps
    assert torch.equal(found.dequantize(), expected)


def test_fp8_scales_put_the_greatest_magnitude_at_448() -> None:
    matrix = torch.tensor([[1.0, -896.0], [0.0, 0.0], [448.0, 1.0]])
    assert float_parameters(matrix, FP8).tolist() == [[2.0], [1.0], [1.0]]
    assert float_parameters(matrix, FP8_TENSOR).tolist() == [[2.0]]
    third = float_parameters(torch.tensor([[448 / 3, 0.0]]), FP8_HALF)
    assert third.tolist() == [[float(torch.tensor(1 / 3, dtype=torch.bfloat16))]]


@pytest.mark.parametrize(
    ("largest", "exponent"), [(4.0, 0), (7.99, 0), (8.0, 1), (6.0, 0), (3.99, -1), (1e-45, -126)]
)
def test_mxfp4_scales_follow_the_specification(largest: float, exponent: int) -> None:
    matrix = torch.zeros(1, 32)
    matrix[0, 7] = -largest
    assert float_parameters(matrix, MXFP4).tolist() == [[2.0**exponent]]


def test_nvfp4_scales_are_e4m3_times_the_tensor_s() -> None:
    matrix = gaussian(4, 64)
    matrix[2, :16] *= 1e-6
    matrix[3, :16] = 0
    whole = nvfp4_tensor_scale(matrix.abs().max())
    exact = float(matrix.abs().max()) / (448 * 6)
    assert exact <= float(whole) < 2 * exact
    assert float(whole.log2()) % 1 == 0
    scale = float_parameters(matrix, NVFP4)
    assert torch.equal(scale, scale.to(torch.float8_e4m3fn).to(torch.float32))
    assert 224 <= float(scale.max()) <= 448
    assert float(scale[2, 0]) == 2.0**-9  # the least there is, not 0
    assert float(scale[3, 0]) == 1
    assert torch.equal(float_parameters(matrix, NVFP4, whole), scale)
    assert float(nvfp4_tensor_scale(0.0)) == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_is_never_worse_and_gains_somewhere(scheme: Scheme) -> None:
    matrix = gaussian(16, 256)
    groups = 1 if scheme.granularity == "tensor" else 16 * scheme.groups(256)

    def errors(found: QuantizedTensor) -> Tensor:
        squares = (found.dequantize() - matrix).to(torch.float64).square()
        return squares.reshape(groups, -1).sum(1)

    plain, searched = (errors(quantized(matrix, scheme, flag)) for flag in (False, True))
    assert torch.all(searched <= plain)
    assert float(searched.sum()) < 0.97 * float(plain.sum())


def test_search_attends_to_the_columns_that_count() -> None:
    matrix = gaussian(16, 32)
    importance = torch.zeros(32)
    importance[:4] = 1
    plain = float_mse_parameters(matrix, MXFP4)
    aware = float_mse_parameters(matrix, MXFP4, importance=importance)
    first, second = (
        (quantize_floats(matrix, scale, MXFP4).dequantize() - matrix)[:, :4].square().sum()
        for scale in (plain, aware)
    )
    assert second < 0.9 * first


@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-30, 30),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_error_idempotence_and_zero(
    seed: int, exponent: int, scheme: Scheme, dtype: torch.dtype
) -> None:
    matrix = (gaussian(3, 64, seed) * 2.0**exponent).to(dtype)
    matrix[1, 5] = 0
    found = quantized(matrix, scheme)
    back = found.dequantize()
    assert float(back[1, 5]) == 0
    again = quantize_floats(back, found.scale, scheme, found.tensor_scale)
    assert torch.equal(again.codes.view(torch.uint8), found.codes.view(torch.uint8))
    # Inside the range: half of a step, which is at most 1/4 of a value's size for e2m1's one bit
    # of mantissa and 1/16 for e4m3's three, or half the least positive value.
    scale = found.scale if found.tensor_scale is None else found.scale * found.tensor_scale
    steps = scale.repeat_interleave(64 // scale.shape[1], 1)
    share, least = (1 / 4, 0.5) if scheme.element == "e2m1" else (1 / 16, 2.0**-9)
    exact = matrix.to(torch.float32)
    inside = exact.abs() <= steps * scheme.largest
    bound = torch.maximum(exact.abs() * share, steps * least / 2) * (1 + 1e-5)
    assert torch.all(((back - exact).abs() <= bound)[inside])


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("scheme", [FP8, FP8_HALF, MXFP4, NVFP4], ids=str)
def test_rows_in_pieces_are_the_same(scheme: Scheme, searched: bool) -> None:
    matrix = gaussian(37, 64).to(torch.bfloat16)
    whole = nvfp4_tensor_scale(matrix.abs().max()) if scheme.scale_type == "e4m3" else None
    find = float_mse_parameters if searched else float_parameters

    def codes(part: Tensor) -> QuantizedTensor:
        return quantize_floats(part, find(part, scheme, whole), scheme, whole)

    parts = [codes(part) for part in torch.split(matrix, 5)]
    at_once = codes(matrix)
    joined = torch.cat([p.codes.view(torch.uint8) for p in parts])
    assert torch.equal(at_once.codes.view(torch.uint8), joined)
    assert torch.equal(at_once.scale, torch.cat([p.scale for p in parts]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_candidates_are_values_of_the_scale_s_type(scheme: Scheme) -> None:
    for scale in candidate_scales(torch.tensor([[1.0], [0.25], [2.0**-9]]), scheme):
        assert bool((scale > 0).all())
        if scheme.scale_type == "e4m3":
            assert torch.equal(scale, scale.to(torch.float8_e4m3fn).to(torch.float32))
        elif scheme.scale_type == "e8m0":
            assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        elif scheme.scale_type == "bfloat16":
            assert torch.equal(scale, scale.to(torch.bfloat16).to(torch.float32))


def test_empty_and_extreme_matrices() -> None:
    for scheme in SCHEMES:
        for rows in (0, 1):
            found = quantized_or_zero(torch.zeros(rows, 64), scheme)
            assert found.codes.shape == (rows, 64)
        for value in (1e-44, 3e38):
            found = quantized_or_zero(torch.full((2, 64), value), scheme)
            assert torch.isfinite(found.dequantize()).all()


def quantized_or_zero(matrix: Tensor, scheme: Scheme) -> QuantizedTensor:
    largest = matrix.abs().max() if matrix.numel() else 0.0
    whole = nvfp4_tensor_scale(largest) if scheme.scale_type == "e4m3" else None
    if scheme.granularity == "tensor" and not matrix.numel():
        return quantize_floats(matrix, torch.ones(1, 1), scheme, whole)
    for find in (float_mse_parameters, float_parameters):
        scale = find(matrix, scheme, whole)
    return quantize_floats(matrix, scale, scheme, whole)


def test_wrong_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="not a scheme of floats"):
        float_parameters(torch.ones(1, 4), Scheme(4))
    with pytest.raises(ValueError, match="48 columns do not divide into groups of 32"):
        float_parameters(torch.ones(1, 48), MXFP4)
    with pytest.raises(ValueError, match="need the tensor's scale"):
        quantize_floats(torch.ones(1, 16), torch.ones(1, 1), NVFP4)


def test_the_neighbours_of_a_scale_in_its_type() -> None:
    scale = torch.tensor([[4.0], [2.0**-126], [2.0**127]])
    assert torch.cat(candidate_scales(scale, MXFP4), 1).tolist() == [
        [2.0, 8.0],
        [2.0**-126, 2.0**-125],
        [2.0**126, 2.0**127],
    ]
    scale = torch.tensor([[1.0], [2.0**-9], [448.0]])
    places = torch.tensor([[0x38], [1], [0x7E]]) + torch.tensor([s for s in range(-8, 9) if s])
    codes = places.clamp(1, 0x7E).to(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    found = torch.cat(candidate_scales(scale, NVFP4), 1)
    assert np.array_equal(found.numpy(), codes.astype(np.float32))
    found = torch.cat(candidate_scales(torch.ones(1, 1), FP8), 1)[0]
    assert found.log2().mul(16).tolist() == pytest.approx([s for s in range(-4, 17) if s], abs=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_best_of_the_neighbours_is_found(scheme: Scheme, weighted: bool) -> None:
    matrix = gaussian(5, 64, 3)
    importance = torch.rand(64, generator=torch.Generator().manual_seed(4)) if weighted else None
    whole = nvfp4_tensor_scale(matrix.abs().max()) if scheme is NVFP4 else None
    first = float_parameters(matrix, scheme, whole)
    tried = [first, *candidate_scales(first, scheme)]
    errors = []
    for scale in tried:
        off = quantize_floats(matrix, scale, scheme, whole).dequantize() - matrix
        squares = off.square() * (1.0 if importance is None else importance)
        count = scale.numel()
        errors.append(squares.to(torch.float64).reshape(count, -1).sum(1).reshape(scale.shape))
    best = torch.stack(errors).argmin(0)
    expected = torch.stack(tried).gather(0, best[None])[0]
    for given_whole in (whole, None):
        found = float_mse_parameters(matrix, scheme, given_whole, importance)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("largest", "power"),
    [(2688.0, 0), (2688.1, 1), (2687.9, 0), (1344.0, -1), (1e-30, -111), (1e-45, -126)],
)
def test_the_tensor_s_scale_is_the_next_power_of_two(largest: float, power: int) -> None:
    found = nvfp4_tensor_scale(largest)
    assert found.shape == ()
    assert found.dtype == torch.float32
    if largest > 1e-40:
        assert float(found) == 2.0**power
    assert float(nvfp4_tensor_scale(torch.tensor([0.0]))) == 1


def test_scales_are_rounded_to_the_nearest_of_their_type() -> None:
    exact = torch.tensor([0.0, 1.06, 1.07, 2.0**-12, 1e9, 0.7, 0.72], dtype=torch.float64)
    assert float_scale(exact, NVFP4).tolist() == [1, 1, 1.125, 2.0**-9, 448, 0.6875, 0.75]
    assert float_scale(exact, MXFP4).tolist() == [1, 1, 1, 2.0**-12, 2.0**30, 0.5, 1]
    assert float_scale(exact, MXFP4).dtype == torch.float32
    assert torch.equal(float_scale(exact[:5], FP8_HALF), stored_scale(exact[:5], FP8_HALF))


def test_more_rows_than_are_worked_on_at_once() -> None:
    matrix = gaussian(9000, 64)
    for scheme in (FP8, MXFP4):
        parts = [round_to_nearest(part, scheme, "mse") for part in matrix.split(2000)]
        whole = round_to_nearest(matrix, scheme, "mse")
        assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        assert torch.equal(whole.codes.view(torch.uint8), codes)
        assert whole.zero_point.dtype == torch.int8
        assert not whole.zero_point.any()


def test_a_tensor_s_scale_that_is_given_is_taken() -> None:
    matrix = gaussian(3, 64)
    whole = 4 * nvfp4_tensor_scale(matrix.abs().max())
    largest = matrix.reshape(3, 4, 16).abs().amax(2).double()
    expected = float_scale(largest / 6 / whole.double(), NVFP4)
    assert torch.equal(float_parameters(matrix, NVFP4, whole), expected)
    tried = torch.stack([expected, *candidate_scales(expected, NVFP4)])
    found = float_mse_parameters(matrix, NVFP4, whole)
    assert bool((tried == found).any(0).all())
    assert torch.equal(round_to_nearest(matrix, NVFP4, tensor_scale=whole).scale, expected)


def test_rows_of_zeros_have_the_scale_one() -> None:
    matrix = gaussian(3, 64)
    matrix[1] = 0
    for scheme in (FP8, MXFP4, NVFP4):
        found = round_to_nearest(matrix, scheme)
        assert set(found.scale[1].tolist()) == {1.0}
        assert found.zero_point.dtype == torch.int8
        assert found.zero_point.shape == found.scale.shape
    assert e2m1_codes(matrix).dtype == torch.uint8


def test_one_scale_for_more_rows_than_are_worked_on_at_once() -> None:
    matrix = gaussian(9000, 64)
    scale = float_mse_parameters(matrix, FP8_TENSOR)
    assert scale.shape == (1, 1)
    whole = quantize_floats(matrix, scale, FP8_TENSOR).codes.view(torch.uint8)
    part = quantize_floats(matrix[8900:], scale, FP8_TENSOR).codes.view(torch.uint8)
    assert torch.equal(whole[8900:], part)


def test_integers_count_by_importance_too() -> None:
    matrix, scheme = gaussian(4, 32), Scheme(3)
    importance = torch.zeros(32)
    importance[:4] = 1
    found = round_to_nearest(matrix, scheme, "mse", importance=importance)
    scale, _ = mse_parameters(matrix, scheme, importance=importance)
    assert torch.equal(found.scale, scale)
    assert not torch.equal(found.scale, round_to_nearest(matrix, scheme, "mse").scale)


@pytest.mark.parametrize("scheme", [FP8, MXFP4, NVFP4], ids=str)
def test_rounding_counts_by_importance(scheme: Scheme) -> None:
    matrix = gaussian(4, 64, 8)
    importance = torch.zeros(64)
    importance[::8] = 1
    whole = 2 * nvfp4_tensor_scale(matrix.abs().max()) if scheme is NVFP4 else None
    found = round_to_nearest(matrix, scheme, "mse", whole, importance)
    assert torch.equal(found.scale, float_mse_parameters(matrix, scheme, whole, importance))
    plain = round_to_nearest(matrix, scheme, "mse", whole)
    assert torch.equal(plain.scale, float_mse_parameters(matrix, scheme, whole))
    assert not torch.equal(found.scale, plain.scale)


def test_the_tensor_s_scale_is_found_in_double_precision() -> None:
    assert float(nvfp4_tensor_scale(np.nextafter(2688.0, np.inf))) == 2
    assert float_parameters(torch.zeros(0, 64), NVFP4).shape == (0, 4)


def test_fine_factors_are_rounded_once() -> None:
    scale = torch.rand(500, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    factors = [2.0 ** (step / 16) for step in range(-4, 17) if step]
    for found, factor in zip(candidate_scales(scale, FP8), factors, strict=True):
        off = (found.double() - scale.double() * factor).abs()
        above = torch.nextafter(found, torch.full_like(found, torch.inf)).double()
        assert bool((off <= (above - found.double()) / 2).all())


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=8),
    bits=st.integers(3, 24),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_shortened_floats_keep_their_first_bits(values, bits, dtype):
    given_values = torch.tensor(values, dtype=torch.float32).to(dtype)
    short = shortened(given_values, bits)
    assert short.dtype == dtype
    finite = torch.isfinite(given_values)
    assert torch.equal(torch.isnan(short), torch.isnan(given_values))
    wide, found = given_values[finite].double(), short[finite].double()
    normal = wide.abs() >= torch.finfo(dtype).smallest_normal
    assert bool(((found - wide).abs() <= wide.abs() * 2.0**-bits)[normal].all())
    again = shortened(short, bits)
    assert torch.equal(torch.nan_to_num(again), torch.nan_to_num(short))
    mantissa, _ = torch.frexp(found)
    whole = mantissa * 2.0**bits
    largest = wide.abs() > torch.finfo(dtype).max * (1 - 2.0**-bits)  # would not be finite
    assert bool((whole == whole.round())[~largest].all())
