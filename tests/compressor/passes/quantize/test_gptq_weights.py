"""Error-compensating rounding that finds its scales: ``gptq_weights``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.passes.quantize.maths import cholesky
from compressor.passes.quantize.maths import gptq as maths
from compressor.passes.quantize.maths.affine import absmax_parameters
from compressor.passes.quantize.maths.descent import row_errors
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.maths.gptq import (
    gptq,
    gptq_weights,
    join_rows,
    output_error,
    split_rows,
)
from compressor.types.layers import Scheme
from tests.compressor.passes.quantize.test_gptq import correlated

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
    Scheme(2, granularity="group", group=32, narrow=False, signed_scale=True),
]


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


@pytest.mark.parametrize("damping", [0.01, 0.1, 1e6])
def test_one_range_for_all_is_the_best_that_was_found(damping: float) -> None:
    scheme = Scheme(3, granularity="tensor", narrow=False)
    for seed in range(8):
        matrix, moment = correlated(6, 48, seed=seed)
        least = output_error(matrix, gptq_weights(matrix, moment, scheme, "mse", damping), moment)
        start = gptq_weights(matrix, moment, scheme, "mse", damping, 0)
        assert least <= output_error(matrix, start, moment) * 1.0001
        assert least <= output_error(matrix, round_to_nearest(matrix, scheme), moment)


def test_one_range_for_all_is_the_full_one_where_no_other_is_better() -> None:
    """Damping hides that only the greatest weights are ever read."""
    matrix, _ = correlated(6, 48)
    matrix[:, 0] = 4.0
    moment = torch.diag(torch.tensor([1.0] + [1e-4] * 47))
    scheme = Scheme(3, granularity="tensor", narrow=False)
    found = gptq_weights(matrix, moment, scheme, "mse", damping=1e6)
    assert torch.equal(found.scale, round_to_nearest(matrix, scheme).scale)


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


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 6, 13])
def test_large_weights_are_rounded_a_few_rows_at_a_time(
    scheme: Scheme, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, moment = correlated(13, 64)
    whole = gptq_weights(matrix, moment, scheme)
    monkeypatch.setattr(maths, "_AT_ONCE", rows * 64)
    parts = gptq_weights(matrix, moment, scheme)
    # Products of fewer rows may be summed in another order.
    assert (parts.codes.view(torch.uint8) == whole.codes.view(torch.uint8)).float().mean() > 0.98
    torch.testing.assert_close(parts.scale, whole.scale, rtol=0.1, atol=0)
    assert parts.tensor_scale is None or torch.equal(parts.tensor_scale, whole.tensor_scale)
    first, second = (output_error(matrix, q, moment) for q in (parts, whole))
    assert first == pytest.approx(second, rel=0.02)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
def test_damping_far_above_the_inputs_leaves_the_nearest_codes(scheme: Scheme) -> None:
    """All columns weigh the same then, and none compensates another."""
    matrix, moment = correlated(8, 64)
    found = gptq_weights(matrix, moment, scheme, "min-max", damping=1e6)
    nearest = round_to_nearest(matrix, scheme)
    assert torch.equal(found.codes.view(torch.uint8), nearest.codes.view(torch.uint8))


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
def test_pieces_of_rows_start_from_the_scales_of_the_whole_weight(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, moment = correlated(13, 64)
    matrix[:5] *= 0.01  # the first piece alone would have another scale of the tensor
    monkeypatch.setattr(maths, "_AT_ONCE", 5 * 64)
    nearest = round_to_nearest(matrix, scheme)
    unseen = gptq_weights(matrix, torch.zeros(64, 64), scheme)
    assert torch.equal(unseen.codes.view(torch.uint8), nearest.codes.view(torch.uint8))
    for found in (unseen, gptq_weights(matrix, moment, scheme, "min-max", sweeps=0)):
        assert torch.equal(found.scale, nearest.scale)
        assert torch.equal(found.zero_point, nearest.zero_point)
        assert found.tensor_scale == nearest.tensor_scale


@pytest.mark.parametrize("rows", [[6], [2, 4], [1, 3, 2]], ids=str)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY[1:3] + WEIGHT_ONLY[-2:], ids=str)
def test_rows_that_are_cut_and_joined_are_what_they_were(scheme: Scheme, rows: list[int]) -> None:
    whole = round_to_nearest(correlated(6, 64)[0], scheme)
    parts = split_rows(whole, rows)
    cut = whole.dequantize().split(rows)
    for part, expected in zip(parts, cut, strict=True):
        assert torch.equal(part.dequantize(), expected)
        if len(rows) > 1:
            for tensor in (part.codes, part.scale, part.zero_point):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, "no view of the whole"
    joined = join_rows(parts)
    assert torch.equal(joined.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(joined.dequantize(), whole.dequantize())


def test_what_errors_cost_is_computed_some_columns_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranges are found by it, so that scales show it."""
    matrix, moment = correlated(8, 64)
    whole = gptq_weights(matrix, moment, WEIGHT_ONLY[1], sweeps=0)
    monkeypatch.setattr(cholesky, "_AT_ONCE", 20)
    parts = gptq_weights(matrix, moment, WEIGHT_ONLY[1], sweeps=0)
    assert torch.equal(parts.scale, whole.scale)
    assert (parts.codes == whole.codes).float().mean() > 0.99
    plain = gptq_weights(matrix, moment, WEIGHT_ONLY[1], "min-max", sweeps=0)
    assert not torch.equal(plain.scale, whole.scale)


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


@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
def test_weights_given_together_are_those_below_each_other(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are widened some at a time, across the edges between weights."""
    matrix, moment = correlated(24, 160)
    half = matrix.bfloat16()
    whole = gptq_weights(half.float(), moment, scheme)
    if scheme.granularity != "tensor":
        monkeypatch.setattr(maths, "_AT_ONCE", 7 * 160)
    done: list[None] = []
    found = gptq_weights(
        half.split([10, 0, 6, 8]), moment, scheme, between=lambda: done.append(None)
    )
    assert len(done) == (1 if scheme.granularity == "tensor" else 4), "of 7 rows each"
    assert torch.equal(found.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    torch.testing.assert_close(found.scale, whole.scale)
    assert torch.equal(found.zero_point, whole.zero_point)
