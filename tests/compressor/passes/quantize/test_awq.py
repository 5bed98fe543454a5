"""Scaled input channels, and ranges by the output error."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths import awq as maths
from compressor.passes.quantize.maths.affine import quantize
from compressor.passes.quantize.maths.awq import Rounded, Scaled, _Problem, awq
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.maths.gptq import output_error
from compressor.types.layers import Scheme
from tests.peak_memory import growth

INT4 = Scheme(4, granularity="group", group=32, narrow=False)
SCHEMES = [
    INT4,
    Scheme(4, False, False, "group", 32, scale_type="bfloat16"),
    Scheme(3, narrow=False, scale_type="float16"),
    Scheme(2, False, False, "group", 16),
    Scheme(4, granularity="tensor"),
    Scheme(8, element="e4m3"),
    Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0"),
    Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3"),
    Scheme(3, granularity="group", group=32, narrow=False, signed_scale=True),
]


def problem(rows: int = 24, columns: int = 96, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Two weights, and inputs of which few channels are large, as in language models."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * columns, columns, generator=generator)
    inputs += 0.5 * inputs.roll(1, 1)
    inputs *= torch.exp(torch.randn(columns, generator=generator))
    weights = [torch.randn(n, columns, generator=generator) * 0.05 for n in (rows, rows // 2)]
    return weights, inputs.T @ inputs / len(inputs)


def total_error(weights: list[Tensor], moment: Tensor, found: Scaled) -> float:
    """From the outputs' side: the scaled weights on the divided inputs."""
    divided = moment / found.factors[:, None] / found.factors
    return sum(
        output_error(weight * found.factors, codes, divided)
        for weight, codes in zip(weights, found.weights, strict=True)
    )


def plain_error(weights: list[Tensor], moment: Tensor, scheme: Scheme, search: str) -> float:
    return sum(
        output_error(w, round_to_nearest(w, scheme, search), moment)  # type: ignore[arg-type]
        for w in weights
    )


@cache
def searched(scheme: Scheme) -> Scaled:
    """Search the problem once for all tests, which look at the result only."""
    return awq(*problem(), [scheme] * 2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_errors_are_far_below_those_of_nearest_rounding(scheme: Scheme) -> None:
    weights, moment = problem()
    found = searched(scheme)
    least = min(plain_error(weights, moment, scheme, search) for search in ("min-max", "mse"))
    assert total_error(weights, moment, found) < 0.8 * least
    assert found.factors.shape == (96,)
    assert bool((found.factors > 0).all())
    assert not torch.equal(found.factors, torch.ones(96))


def test_factors_alone_help_and_descent_helps_further() -> None:
    weights, moment = problem()
    schemes = [INT4] * 2
    errors = [
        plain_error(weights, moment, INT4, "min-max"),
        total_error(weights, moment, awq(weights, moment, schemes, "min-max")),
        total_error(weights, moment, awq(weights, moment, schemes, sweeps=0)),
        total_error(weights, moment, awq(weights, moment, schemes, sweeps=1)),
        total_error(weights, moment, awq(weights, moment, schemes, sweeps=3)),
    ]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.9 * errors[1]
    assert errors[3] < 0.99 * errors[2]
    assert errors[4] < errors[3]


def test_large_inputs_get_large_factors() -> None:
    moment, factors = problem()[1], searched(INT4).factors
    power = moment.diagonal()
    loud, quiet = power > power.quantile(0.8), power < power.quantile(0.2)
    assert factors[loud].log().mean() > factors[quiet].log().mean() + 0.3


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.element == "int"], ids=str)
def test_codes_are_the_nearest_to_the_scaled_weights(scheme: Scheme) -> None:
    weights, found = problem()[0], searched(scheme)
    for weight, codes in zip(weights, found.weights, strict=True):
        again = quantize(weight * found.factors, codes.scale, codes.zero_point, scheme)
        assert torch.equal(again.codes, codes.codes)


def test_tied_columns_share_a_factor() -> None:
    weights, moment = problem()
    tied = torch.arange(96) % 24 * 7
    found = awq(weights, moment, [INT4] * 2, tied=tied)
    for owner in tied.unique():
        assert len(found.factors[tied == owner].unique()) == 1
    assert len(found.factors.unique()) > 12
    single = awq(weights, moment, [INT4] * 2, tied=torch.zeros(96, dtype=torch.int64))
    assert total_error(weights, moment, found) < 0.9 * total_error(weights, moment, single)


def test_one_factor_for_all_columns_is_one_and_ranges_still_help() -> None:
    weights, moment = problem()
    found = awq(weights, moment, [INT4] * 2, tied=torch.zeros(96, dtype=torch.int64))
    assert torch.equal(found.factors, torch.ones(96))
    assert total_error(weights, moment, found) < 0.8 * plain_error(weights, moment, INT4, "mse")


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    search=st.sampled_from(["min-max", "mse"]),
)
def test_never_worse_than_nearest_rounding(
    seed: int, scheme: Scheme, dtype: torch.dtype, search: str
) -> None:
    weights, moment = problem(4, 32, seed)
    weights = [weight.to(dtype) for weight in weights]
    weights[0][1] = weights[0][1, 0]
    weights[0][2] = 0
    dead = torch.tensor([3, 30])
    moment[dead], moment[:, dead] = 0, 0
    found = awq(weights, moment, [scheme] * 2, search)  # type: ignore[arg-type]
    exact = [weight.to(torch.float32) for weight in weights]
    plain = plain_error(exact, moment, scheme, "min-max")
    assert total_error(exact, moment, found) <= plain * (1 + 1e-5)
    assert bool(torch.isfinite(found.factors).all())
    assert not found.weights[0].dequantize()[2].any()


def test_a_search_that_went_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, moment = problem()
    bad = moment.diagonal().rsqrt()  # the loudest inputs get the smallest factors
    monkeypatch.setattr(_Problem, "from_grid", lambda *_: bad)
    found = awq(weights, moment, [INT4] * 2, "min-max")
    assert torch.equal(found.factors, torch.ones(96))
    assert torch.equal(found.weights[0].codes, round_to_nearest(weights[0], INT4).codes)


def test_schemes_may_differ() -> None:
    weights, moment = problem()
    found = awq(weights, moment, SCHEMES[:2])
    assert [codes.scheme for codes in found.weights] == SCHEMES[:2]


def test_gradient_and_errors_stay_true() -> None:
    (matrix, _), moment = problem()
    for scheme in SCHEMES:
        factors = torch.exp(torch.randn(96, generator=torch.Generator().manual_seed(1)) / 4)
        start = round_to_nearest(matrix * factors, scheme)
        state = Rounded(matrix, moment, start, factors)
        divided = moment / factors[:, None] / factors
        before = output_error(matrix * factors, start, divided)
        columns, ratios = torch.tensor([2, 40]), torch.tensor([0.8, 1.25])
        change, moved = state.change(columns, ratios, state.gradient(columns))
        state.move(columns, moved[1], ratios[1])
        factors[columns] *= 1.25
        divided = moment / factors[:, None] / factors
        after = output_error(matrix * factors, state.result(), divided)
        assert after - before == pytest.approx(float(change[1]), rel=1e-3, abs=1e-4 * before)
        state.visit_ranges()
        least = output_error(matrix * factors, state.result(), divided)
        assert (least == after) if scheme.granularity == "tensor" else (least < after)


def test_nothing_seen_and_wrong_moments() -> None:
    weights, moment = problem()
    found = awq(weights, torch.zeros_like(moment), [INT4] * 2)
    assert torch.equal(found.factors, torch.ones(96))
    assert torch.equal(found.weights[0].codes, round_to_nearest(weights[0], INT4).codes)
    with pytest.raises(ValueError, match="does not fit"):
        awq(weights, moment[:32, :32], [INT4] * 2)
    with pytest.raises(ValueError, match="not finite"):
        awq(weights, moment * torch.nan, [INT4] * 2)
    with pytest.raises(ValueError, match="96 columns do not divide into groups of 64"):
        awq(weights, moment, [Scheme(4, granularity="group", group=64)] * 2)


def test_the_result_is_the_same_each_time_and_arguments_stay() -> None:
    weights, moment = problem()
    before = [weight.clone() for weight in weights], moment.clone()
    first, second = (awq(weights, moment, [INT4] * 2) for _ in range(2))
    assert torch.equal(first.factors, second.factors)
    assert torch.equal(first.weights[0].codes, second.weights[0].codes)
    assert all(torch.equal(a, b) for a, b in zip(weights, before[0], strict=True))
    assert torch.equal(moment, before[1])


@pytest.mark.parametrize(
    ("scheme", "grid", "start", "end", "tied", "single"),
    # As measured: where the searches end. Rounding in another order may move a choice of nearly
    # equal errors.
    [
        (SCHEMES[0], 0.0922264, 0.0773736, 0.0492715, 0.0738893, 0.124737),
        (SCHEMES[1], 0.0834885, 0.064266, 0.0378211, 0.0761366, 0.131085),
        (SCHEMES[4], 0.337248, 0.289315, 0.176466, 0.206186, 0.289315),
        (SCHEMES[6], 0.375758, 0.304178, 0.128228, 0.151862, 0.416208),
        (SCHEMES[7], 0.115495, 0.0554165, 0.0418318, 0.0625451, 0.0779189),
    ],
    ids=str,
)
def test_the_search_ends_where_it_did(
    scheme: Scheme, grid: float, start: float, end: float, tied: float, single: float
) -> None:
    weights, moment = problem(8, 64)
    schemes, columns = [scheme] * 2, torch.arange(64)

    def error(found: Scaled) -> float:
        return total_error(weights, moment, found)

    assert error(awq(weights, moment, schemes, "min-max")) == pytest.approx(grid, rel=1e-3)
    assert error(awq(weights, moment, schemes, sweeps=0)) == pytest.approx(start, rel=1e-3)
    assert error(awq(weights, moment, schemes)) == pytest.approx(end, rel=1e-3)
    found = awq(weights, moment, schemes, tied=columns % 16 * 7)
    assert error(found) == pytest.approx(tied, rel=1e-3)
    found = awq(weights, moment, schemes, tied=0 * columns)
    assert error(found) == pytest.approx(single, rel=1e-3)


def test_the_least_problem() -> None:
    moment = torch.tensor([[2.0**-20]])  # quiet, but not silent
    weight = torch.tensor([[0.3], [0.5], [-0.7]])
    found = awq([weight.double()], moment.double(), [Scheme(2, granularity="tensor")])
    assert found.factors.tolist() == [1.0]
    assert total_error([weight], moment, found) <= plain_error(
        [weight], moment, Scheme(2, granularity="tensor"), "min-max"
    )
    assert found.weights[0].scale.dtype == torch.float32


def test_tied_columns_share_a_mean_within_bounds() -> None:
    owner = torch.tensor([0, 0, 1, 2])
    least = _Problem([(torch.ones(1, 4), Scheme(4))], torch.eye(4), owner)
    # Means are 2, 10 and -10, and that of all columns is 1.
    factors = least._usable(torch.tensor([1.0, 3.0, 10.0, -10.0]))
    assert factors.log().tolist() == pytest.approx([1, 1, 4, -4])


def test_the_unit_of_the_inputs_does_not_matter() -> None:
    weights, moment = problem(4, 32)
    found, quiet = (awq(weights, m, [INT4] * 2) for m in (moment, moment * 2.0**-30))
    assert torch.allclose(found.factors, quiet.factors, rtol=1e-4)
    assert not torch.equal(quiet.factors, torch.ones(32))


def test_silent_columns_do_not_end_the_search() -> None:
    weights, moment = problem(4, 32)
    silent = torch.tensor([3, 30])
    moment[silent], moment[:, silent] = 0, 0
    found = awq(weights, moment, [INT4] * 2, "min-max")
    plain = plain_error(weights, moment, INT4, "min-max")
    assert total_error(weights, moment, found) < 0.9 * plain


def test_each_weight_needs_a_scheme() -> None:
    weights, moment = problem(4, 32)
    with pytest.raises(ValueError, match="shorter"):
        awq(weights, moment, [INT4])


def test_rows_are_widened_and_judged_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same result; of all rows there is an error, in float32."""
    weights, moment = problem()
    whole = [searched(scheme) for scheme in SCHEMES]
    monkeypatch.setattr(maths, "_AT_ONCE", 5 * 96)
    for scheme, expected in zip(SCHEMES, whole, strict=True):
        found = awq(weights, moment, [scheme] * 2)
        torch.testing.assert_close(found.factors, expected.factors)
        for ours, theirs in zip(found.weights, expected.weights, strict=True):
            assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))


def test_gradients_are_found_for_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, moment = problem()
    tied = torch.arange(96) % 40
    whole = awq(weights, moment, [INT4] * 2, tied=tied)  # fewer columns than are taken together
    for columns in (1, 7):
        monkeypatch.setattr(maths, "_COLUMNS", columns)
        found = awq(weights, moment, [INT4] * 2, tied=tied)
        torch.testing.assert_close(found.factors, whole.factors)
        for ours, theirs in zip(found.weights, whole.weights, strict=True):
            assert torch.equal(ours.codes, theirs.codes)


@pytest.mark.slow
def test_memory_is_that_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the weight in float32; with a gradient beside it, there were twice as many."""
    for name, value in {"_AT_ONCE": 1 << 16, "_INPUT_EXPONENTS": (0.0, 0.5)}.items():
        monkeypatch.setattr(maths, name, value, raising=False)
    monkeypatch.setattr(maths, "_SHARES", (1.0, 0.9))
    (weight, _), moment = problem(8192, 512)
    weight = weight.bfloat16()
    awq([weight[:64]], moment, [INT4], sweeps=0)  # what the libraries take at first
    grown = growth(lambda: awq([weight], moment, [INT4], sweeps=0))
    assert grown < 3 * 4 * weight.numel()
