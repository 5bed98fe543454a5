"""Error-compensating rounding."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.gptq import (
    FactoredMoment,
    gptq,
    output_error,
)
from compressor.types.layers import QuantizedTensor, Scheme
from tests.compressor.passes.quantize.test_cholesky import indefinite

SCHEMES = [
    Scheme(8),
    Scheme(4),
    Scheme(3, symmetric=False),
    Scheme(4, signed=False, symmetric=False, granularity="tensor"),
    Scheme(4, granularity="group", group=16),
    Scheme(2, symmetric=False, granularity="group", group=8),
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


def test_columns_of_equal_power_are_rounded_in_their_order() -> None:
    matrix, moment = correlated(8, 96)
    deviations = moment.diagonal().sqrt()
    moment = (moment / deviations / deviations[:, None]).fill_diagonal_(1.0)
    compensated, _ = both(matrix, moment, Scheme(4))
    same = compensated.codes == plain(matrix, moment, Scheme(4))
    assert same.float().mean() > 0.99  # float32 tips a few halves the other way


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


def test_a_moment_that_no_damping_helps_leaves_nearest_rounding() -> None:
    moment = indefinite(1.5).float()
    matrix, _ = correlated(4, 32)
    compensated, nearest = both(matrix, moment, Scheme(4))
    assert torch.equal(compensated.codes, nearest.codes)


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


def test_a_moment_with_its_factor_gives_the_same_codes():
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 96, generator=random)
    weight = torch.randn(24, 96, generator=random)
    scheme = Scheme(4)
    scale, zero = absmax_parameters(weight, scheme)
    moment = inputs.T @ inputs
    once = gptq(weight, moment, scale, zero, scheme, damping=0.05)
    shared = gptq(weight, FactoredMoment.of(moment, 0.05), scale, zero, scheme)
    assert torch.equal(once.codes, shared.codes)
    usual = gptq(weight, moment, scale, zero, scheme)
    shared = gptq(weight, FactoredMoment.of(moment), scale, zero, scheme)
    assert torch.equal(usual.codes, shared.codes)
    assert not torch.equal(once.codes, usual.codes), "damping shows"
    with pytest.raises(ValueError, match="does not fit 95 columns"):
        gptq(weight[:, 1:], FactoredMoment.of(moment), scale, zero, scheme)
    with pytest.raises(ValueError, match="not finite"):
        FactoredMoment.of(moment * float("inf"))
