"""Error-compensating rounding."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.descent import row_errors
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.maths.gptq import (
    gptq,
    gptq_weights,
    inverse_factor,
    output_error,
)
from compressor.types.layers import QuantizedTensor, Scheme

SCHEMES = [
    Scheme(8),
    Scheme(4),
    Scheme(3, symmetric=False),
    Scheme(4, signed=False, symmetric=False, granularity="tensor"),
    Scheme(4, granularity="group", group=16),
    Scheme(2, symmetric=False, granularity="group", group=8),
]

WEIGHT_ONLY = [
    Scheme(8, narrow=False, scale_type="bfloat16"),
    Scheme(4, granularity="group", group=32, narrow=False, scale_type="float16"),
    Scheme(4, False, False, "group", 16),
    Scheme(3, granularity="group", group=32, narrow=False),
    Scheme(2, False, False, "group", 32),
    Scheme(4, granularity="tensor"),
    Scheme(8, element="e4m3"),
    Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0"),
    Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3"),
]


def correlated(rows: int, columns: int, samples: int = 500, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(samples, columns, generator=generator) @ mix
    inputs *= torch.rand(columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def both(matrix: Tensor, moment: Tensor, scheme: Scheme) -> tuple[QuantizedTensor, QuantizedTensor]:
    scale, zero = absmax_parameters(matrix, scheme)
    return gptq(matrix, moment, scale, zero, scheme), quantize(matrix, scale, zero, scheme)


def plain(matrix: Tensor, moment: Tensor, scheme: Scheme, damping: float = 0.01) -> Tensor:
    """Column by column with the inverse written out, in float64: equation 2 of the paper."""
    weight, moment = matrix.double().clone(), moment.double()
    scale, zero = absmax_parameters(matrix, scheme)
    order = torch.argsort(moment.diagonal(), descending=True, stable=True)
    weight, moment = weight[:, order], moment[order][:, order]
    moment = moment + damping * moment.diagonal().mean() * torch.eye(len(moment)).double()
    codes = torch.zeros_like(weight)
    width = matrix.shape[1] // scale.shape[1]
    for i, column in enumerate(order.tolist()):
        inverse = torch.linalg.inv(moment[i:, i:])
        step, offset = scale[:, column // width].double(), zero[:, column // width].double()
        code = torch.clamp(torch.round(weight[:, i] / step) + offset, scheme.low, scheme.high)
        error = (weight[:, i] - (code - offset) * step) / inverse[0, 0]
        weight[:, i:] -= error[:, None] * inverse[0]
        codes[:, column] = code
    return codes


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_output_error_falls_on_correlated_inputs(scheme: Scheme) -> None:
    matrix, moment = correlated(24, 160)
    compensated, nearest = both(matrix, moment, scheme)
    assert output_error(matrix, compensated, moment) < 0.6 * output_error(matrix, nearest, moment)
    assert int(compensated.codes.min()) >= scheme.low
    assert int(compensated.codes.max()) <= scheme.high


@pytest.mark.parametrize("scheme", [Scheme(4), Scheme(4, False, True, "group", 16)], ids=str)
def test_codes_are_those_of_the_paper_s_formula(scheme: Scheme) -> None:
    matrix, moment = correlated(8, 96)
    compensated, _ = both(matrix, moment, scheme)
    same = compensated.codes == plain(matrix, moment, scheme)
    assert same.float().mean() > 0.99  # float32 tips a few halves the other way


@pytest.mark.parametrize("rows", [2, 700, 4200])
@pytest.mark.parametrize("columns", [128, 129, 272])
def test_codes_are_those_of_the_paper_s_formula_at_every_size_of_block(
    rows: int, columns: int
) -> None:
    """All columns to come are updated after each 128, and small blocks depend on the rows."""
    scheme = Scheme(4)
    matrix, moment = correlated(2, columns, 2 * columns)
    stacked = matrix.repeat(rows // 2, 1)  # rows do not depend on each other
    compensated, _ = both(stacked, moment, scheme)
    same = compensated.codes == plain(matrix, moment, scheme).repeat(rows // 2, 1)
    assert same.float().mean() > 0.98  # float32 tips a few halves the other way


def test_output_error_is_that_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, matrix = torch.randn(50, 16, generator=generator), torch.randn(4, 16)
    result = quantize(matrix, *absmax_parameters(matrix, Scheme(4)), Scheme(4))
    change = inputs @ (matrix - result.dequantize()).T
    expected = float(change.square().sum())
    assert output_error(matrix, result, inputs.T @ inputs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_uncorrelated_inputs_give_nearest_rounding(scheme: Scheme) -> None:
    matrix, _ = correlated(8, 96)
    for moment in (torch.eye(96), torch.diag(torch.rand(96) + 0.1)):
        compensated, nearest = both(matrix, moment, scheme)
        assert torch.equal(compensated.codes, nearest.codes)


def test_scales_stay_with_their_groups() -> None:
    matrix, moment = correlated(8, 64)
    matrix[:, 16:32] *= 100
    weakly = torch.diag(moment.diagonal()) + 1e-3 * moment
    scheme = Scheme(4, granularity="group", group=16)
    scale, zero = absmax_parameters(matrix, scheme)
    result = gptq(matrix, weakly, scale, zero, scheme)
    assert torch.equal(result.scale, scale)
    assert torch.equal(result.zero_point, zero)
    error = (result.dequantize() - matrix).abs().reshape(8, 4, 16).amax(-1)
    assert torch.all(error < 2 * scale)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    columns=st.integers(1, 80),
    samples=st.integers(1, 100),
    scheme=st.sampled_from([s for s in SCHEMES if s.group is None]),
)
def test_never_worse_than_nearest_rounding(
    seed: int, columns: int, samples: int, scheme: Scheme
) -> None:
    matrix, moment = correlated(4, columns, samples, seed)
    compensated, nearest = both(matrix, moment, scheme)
    assert output_error(matrix, compensated, moment) <= output_error(matrix, nearest, moment)


def test_columns_without_input_are_rounded_to_nearest_and_pass_nothing_on() -> None:
    matrix, moment = correlated(8, 64)
    dead = torch.tensor([0, 13, 63])
    moment[dead], moment[:, dead] = 0, 0
    compensated, nearest = both(matrix, moment, Scheme(4))
    assert torch.equal(compensated.codes[:, dead], nearest.codes[:, dead])
    matrix[:, dead] = 0.3
    again, _ = both(matrix, moment, Scheme(4))
    alive = torch.ones(64, dtype=torch.bool)
    alive[dead] = False
    unchanged = compensated.scale == again.scale
    same = (compensated.codes == again.codes)[:, alive].all(1)
    assert torch.all(same[unchanged[:, 0]])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_that_are_zero_stay_zero(scheme: Scheme) -> None:
    matrix, moment = correlated(8, 160)
    zero = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    matrix[zero] = 0
    compensated, nearest = both(matrix, moment, scheme)
    assert not compensated.dequantize()[zero].any()
    assert output_error(matrix, compensated, moment) < 0.9 * output_error(matrix, nearest, moment)


def test_a_layer_that_saw_nothing_is_rounded_to_nearest() -> None:
    matrix, _ = correlated(4, 32)
    compensated, nearest = both(matrix, torch.zeros(32, 32), Scheme(4))
    assert torch.equal(compensated.codes, nearest.codes)


def test_a_singular_moment_is_damped_until_it_factors() -> None:
    matrix, _ = correlated(4, 48)
    direction = torch.ones(48, 1)
    moment = 1e8 * direction @ direction.T - 1e-2 * torch.eye(48)  # rounding left it indefinite
    scale, zero = absmax_parameters(matrix, Scheme(4))
    result = gptq(matrix, moment, scale, zero, Scheme(4), damping=1e-12)
    nearest = quantize(matrix, scale, zero, Scheme(4))
    assert output_error(matrix, result, moment) <= output_error(matrix, nearest, moment)


def indefinite(least: float) -> Tensor:
    """Return a matrix of mean diagonal one with a negative eigenvalue: that of rounding."""
    generator = torch.Generator().manual_seed(5)
    turned, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))
    values = torch.full((32,), 1.0 + (1.0 + least) / 31, dtype=torch.float64)
    values[7] = -least
    return (turned * values) @ turned.T


@pytest.mark.parametrize("columns", [512, 513, 1100])
def test_the_inverse_is_computed_in_blocks(columns: int) -> None:
    values = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(0))
    moment = values.T @ values
    factor = inverse_factor(moment, damping=0.01)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    damped = moment.double()
    damped.diagonal().add_(0.01 * moment.diagonal().mean())
    product = factor.double() @ damped @ factor.double().T
    torch.testing.assert_close(product, torch.eye(columns).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("least", "retry"), [(0.005, 1.0), (0.05, 10.0), (0.5, 100.0)])
def test_damping_grows_until_the_moment_factors(least: float, retry: float) -> None:
    moment = indefinite(least)
    factor = inverse_factor(moment.float(), damping=0.01)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    damped = moment + retry * 0.01 * torch.eye(32, dtype=torch.float64)
    expected = torch.linalg.inv(damped).float()
    torch.testing.assert_close(factor.T @ factor, expected, rtol=1e-3, atol=1e-3)


def test_a_moment_that_no_damping_helps_leaves_nearest_rounding() -> None:
    moment = indefinite(1.5).float()
    assert inverse_factor(moment, damping=0.01) is None
    matrix, _ = correlated(4, 32)
    compensated, nearest = both(matrix, moment, Scheme(4))
    assert torch.equal(compensated.codes, nearest.codes)


def test_what_float32_cannot_factor_is_factored_in_float64() -> None:
    moment = torch.ones(48, 48)  # one direction; beside it, the damping is lost in float32
    factor = inverse_factor(moment, damping=1e-9)
    assert factor is not None
    weak = torch.randn(48, generator=torch.Generator().manual_seed(0)).double()
    weak -= weak.mean()  # where there is no input, only damping is inverted
    product = factor.double() @ weak
    assert float(product @ product) == pytest.approx(float(weak @ weak) / 1e-9, rel=1e-2)


def test_unusable_moments_are_refused() -> None:
    matrix, moment = correlated(4, 32)
    with pytest.raises(ValueError, match="does not fit 32 columns"):
        both(matrix, moment[:16, :16], Scheme(4))
    moment[3, 4] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        both(matrix, moment, Scheme(4))


def test_arguments_are_left_as_they_were() -> None:
    matrix, moment = correlated(8, 64)
    before = matrix.clone(), moment.clone()
    both(matrix, moment, Scheme(4))
    assert torch.equal(matrix, before[0])
    assert torch.equal(moment, before[1])


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
def test_scales_found_on_the_way_beat_those_given(scheme: Scheme) -> None:
    matrix, moment = correlated(24, 160)
    nearest = round_to_nearest(matrix, scheme)
    errors = [
        output_error(matrix, found, moment)
        for found in (
            nearest,
            gptq_weights(matrix, moment, scheme, "min-max", sweeps=0),
            gptq_weights(matrix, moment, scheme, "mse", sweeps=0),
            gptq_weights(matrix, moment, scheme, "mse", sweeps=2),
        )
    ]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 1.1 * errors[1]
    assert errors[3] < 0.99 * errors[2]
    if scheme.element == "int" and scheme.scale_type == "float32":
        given = gptq(matrix, moment, *absmax_parameters(matrix, scheme), scheme)
        assert errors[1] == pytest.approx(output_error(matrix, given, moment))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 4),
    samples=st.integers(0, 100),
    scheme=st.sampled_from(WEIGHT_ONLY),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    exponent=st.integers(-12, 8),
)
def test_weights_are_never_worse_than_nearest_rounding(
    seed: int, groups: int, samples: int, scheme: Scheme, dtype: torch.dtype, exponent: int
) -> None:
    matrix, moment = correlated(4, 32 * groups, max(samples, 1), seed)
    moment = moment if samples else torch.zeros_like(moment)
    matrix = (matrix * 2.0**exponent).to(dtype)
    matrix[1] = matrix[1, 0]
    matrix[2] = 0
    found, nearest = gptq_weights(matrix, moment, scheme), round_to_nearest(matrix, scheme)
    assert output_error(matrix, found, moment) <= output_error(matrix, nearest, moment)
    assert not found.dequantize()[2].any()
    assert found.codes.dtype == nearest.codes.dtype
    assert found.scale.shape == nearest.scale.shape
    if scheme.scale_type == "float16":
        assert torch.equal(found.scale.to(torch.float16).to(torch.float32), found.scale)


def test_no_row_is_worse_than_nearest_rounding_even_when_damping_hides_the_inputs() -> None:
    matrix, moment = correlated(64, 96)
    for scheme in (WEIGHT_ONLY[1], WEIGHT_ONLY[2], WEIGHT_ONLY[6]):
        found = gptq_weights(matrix, moment, scheme, damping=1e4)
        nearest = round_to_nearest(matrix, scheme)
        errors = [row_errors(matrix, codes, moment) for codes in (found, nearest)]
        assert torch.all(errors[0] <= errors[1])
        assert float(errors[0].sum()) < float(errors[1].sum())


def test_what_is_not_said_is_least_squared_error_and_one_sweep() -> None:
    matrix, moment = correlated(8, 64)
    scheme = WEIGHT_ONLY[1]
    found, said = gptq_weights(matrix, moment, scheme), gptq_weights(matrix, moment, scheme, "mse")
    assert torch.equal(found.codes, said.codes)
    once = gptq_weights(matrix, moment, scheme, "mse", 0.01, 1)
    assert torch.equal(found.codes, once.codes)
    assert torch.equal(found.scale, once.scale)
    twice = gptq_weights(matrix, moment, scheme, "mse", 0.01, 2)
    assert not torch.equal(found.codes, twice.codes)


def test_halves_are_rounded_as_the_floats_they_are_and_moments_may_be_double() -> None:
    matrix, moment = correlated(8, 64)
    half = matrix.to(torch.bfloat16)
    for scheme in (WEIGHT_ONLY[1], WEIGHT_ONLY[3]):
        found = gptq_weights(half, moment.double(), scheme)
        whole = gptq_weights(half.float(), moment, scheme)
        assert torch.equal(found.codes, whole.codes)
        assert torch.equal(found.scale, whole.scale)


@pytest.mark.parametrize("damping", [0.01, 1e6])
def test_one_range_for_all_is_the_best_that_was_found(damping: float) -> None:
    scheme = Scheme(3, granularity="tensor", narrow=False)
    for seed in range(8):
        matrix, moment = correlated(6, 48, seed=seed)
        least = output_error(matrix, gptq_weights(matrix, moment, scheme, "mse", damping), moment)
        start = gptq_weights(matrix, moment, scheme, "mse", damping, 0)
        assert least <= output_error(matrix, start, moment) * 1.0001
        assert least <= output_error(matrix, round_to_nearest(matrix, scheme), moment)


def test_any_multiple_of_the_moment_gives_the_same_weights() -> None:
    matrix, moment = correlated(8, 64)
    for scheme in (WEIGHT_ONLY[1], WEIGHT_ONLY[2]):
        first = gptq_weights(matrix, moment, scheme)
        second = gptq_weights(matrix, moment * 2.0**-20, scheme)
        assert torch.equal(first.codes, second.codes)
        assert torch.equal(first.scale, second.scale)


def test_stacked_weights_are_as_good_as_single_ones() -> None:
    matrix, moment = correlated(24, 96)
    scheme = WEIGHT_ONLY[3]
    whole = gptq_weights(matrix, moment, scheme)
    parts = torch.cat([gptq_weights(p, moment, scheme).codes for p in matrix.split([10, 6, 8])])
    assert (whole.codes == parts).double().mean() > 0.99


def test_weights_without_rows() -> None:
    moment = torch.eye(32)
    assert gptq_weights(torch.zeros(0, 32), moment, WEIGHT_ONLY[1]).codes.shape == (0, 32)


def test_unusable_moments_are_refused_for_weights_too() -> None:
    with pytest.raises(ValueError, match="does not fit 32 columns"):
        gptq_weights(torch.ones(2, 32), torch.eye(31), WEIGHT_ONLY[0])
    with pytest.raises(ValueError, match="not finite"):
        gptq_weights(torch.ones(2, 32), torch.eye(32) * torch.inf, WEIGHT_ONLY[0])
    with pytest.raises(ValueError, match="40 columns do not divide into groups of 32"):
        gptq_weights(torch.ones(2, 40), torch.eye(40), WEIGHT_ONLY[1])


@pytest.mark.benchmark
def test_time() -> None:
    for rows, columns in ((64, 576), (1024, 1024)):
        matrix, moment = correlated(rows, columns, 2 * columns)
        scale, zero = absmax_parameters(matrix, Scheme(4))
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            gptq(matrix, moment, scale, zero, Scheme(4))
            times.append(time.perf_counter() - begun)
        print(f"gptq {rows}x{columns}: {1e3 * min(times):.1f} ms")


def test_silent_inputs_change_nothing_for_the_others() -> None:
    """Their power is not in the mean, by which damping is measured."""
    matrix, moment = correlated(16, 64)
    scheme = WEIGHT_ONLY[3]
    wide, whole = torch.zeros(16, 256), torch.zeros(256, 256)
    wide[:, :64], whole[:64, :64] = matrix, moment
    wide[:, 64:] = torch.randn(16, 192, generator=torch.Generator().manual_seed(1))
    found = gptq_weights(matrix, moment, scheme, damping=0.5)
    among = gptq_weights(wide, whole, scheme, damping=0.5)
    same = among.codes[:, :64] == found.codes
    assert same.float().mean() > 0.99  # float32 tips a few halves the other way
    assert torch.allclose(among.scale[:, :2], found.scale)
