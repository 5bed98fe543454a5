"""Coordinate descent on the output error."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from compressor.passes.quantize.maths import descent as maths
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.descent import (
    better_rows,
    descend,
    row_errors,
    worse_rows,
)
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.types.layers import QuantizedTensor, Scheme

SCHEMES = [
    Scheme(8, narrow=False),
    Scheme(4, granularity="group", group=32, narrow=False, scale_type="bfloat16"),
    Scheme(3, False, False, "group", 16),
    Scheme(2, granularity="group", group=48, narrow=False),
    Scheme(4, granularity="group", group=192),
    Scheme(4, granularity="tensor"),
    Scheme(8, element="e4m3", scale_type="float16"),
    Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0"),
    Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3"),
    Scheme(2, granularity="group", group=48, narrow=False, signed_scale=True),
]


def problem(rows: int = 12, columns: int = 192, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(3 * columns, columns, generator=generator) @ mix
    inputs *= torch.rand(columns, generator=generator) + 0.1
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def same(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    return torch.equal(
        first.codes.view(torch.uint8), second.codes.view(torch.uint8)
    ) and torch.equal(first.scale, second.scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_sweep_lowers_the_error_of_every_row(scheme: Scheme) -> None:
    matrix, moment = problem()
    start = round_to_nearest(matrix, scheme)
    errors = [row_errors(matrix, start, moment)]
    for sweeps in (1, 2, 3):
        found = descend(matrix, moment, start, sweeps)
        errors.append(row_errors(matrix, found, moment))
        assert torch.all(errors[-1] <= errors[-2] * 1.0001)
    assert errors[1].sum() < 0.7 * errors[0].sum()
    if scheme.element == "int":
        assert int(found.codes.min()) >= scheme.low
        assert int(found.codes.max()) <= scheme.high
    assert found.scale.dtype == torch.float32
    assert bool((found.scale > 0).all()) is not scheme.signed_scale


@pytest.mark.parametrize("scheme", SCHEMES[:6], ids=str)
def test_codes_end_at_the_ends_of_their_range(scheme: Scheme) -> None:
    """Scales are so small that most codes would lie beyond."""
    matrix, moment = problem()
    scale, zero = absmax_parameters(matrix, scheme)
    start = quantize(matrix, 0.1 * scale, zero, scheme)
    found = descend(matrix, moment, start, 2)
    assert (int(found.codes.min()), int(found.codes.max())) == (scheme.low, scheme.high)
    assert torch.all(row_errors(matrix, found, moment) < row_errors(matrix, start, moment))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_alone_lower_it_and_leave_codes(scheme: Scheme) -> None:
    matrix, moment = problem()
    start = round_to_nearest(matrix, scheme)
    found = descend(matrix, moment, start, codes=False)
    assert torch.equal(found.codes.view(torch.uint8), start.codes.view(torch.uint8))
    assert torch.all(
        row_errors(matrix, found, moment) <= row_errors(matrix, start, moment) * 1.0001
    )
    better = row_errors(matrix, descend(matrix, moment, start), moment).sum()
    assert better < 0.9 * row_errors(matrix, found, moment).sum(), "codes lower it further"
    changed = not torch.equal(found.scale, start.scale)
    assert changed != (scheme.granularity == "tensor" or scheme.scale_type == "e8m0")


@pytest.mark.parametrize(
    ("scheme", "columns"),  # one block of groups, and two
    [
        (SCHEMES[0], 192),
        (SCHEMES[1], 96),
        (SCHEMES[2], 96),
        pytest.param(SCHEMES[0], 96, marks=pytest.mark.slow),
        pytest.param(SCHEMES[1], 192, marks=pytest.mark.slow),
        pytest.param(SCHEMES[2], 192, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_single_code_can_be_improved_in_the_end(scheme: Scheme, columns: int) -> None:
    matrix, moment = problem(3, columns)
    found = descend(matrix, moment, round_to_nearest(matrix, scheme), 60)
    found = replace(found, codes=descend(matrix, moment, found, 60).codes)
    least = row_errors(matrix, found, moment)
    for column, step in product(range(columns), (-1, 1)):
        codes = found.codes.clone().to(torch.int16)
        codes[:, column] = (codes[:, column] + step).clamp(scheme.low, scheme.high)
        other = row_errors(matrix, replace(found, codes=codes.to(found.codes.dtype)), moment)
        assert torch.all(other >= least * 0.9999)


@pytest.mark.parametrize("factor", [1.42, 0.72, -1.0])
@pytest.mark.parametrize("scheme", SCHEMES[6:9], ids=str)
def test_scales_that_cannot_be_stored_are_not_taken(scheme: Scheme, factor: float) -> None:
    matrix, moment = problem()
    start = round_to_nearest(matrix, scheme)
    found = descend(factor * matrix, moment, start, codes=False)
    before = row_errors(factor * matrix, start, moment)
    assert torch.all(row_errors(factor * matrix, found, moment) <= before * 1.0001)
    assert bool((found.scale > 0).all())  # though the best may be negative


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_multiple_of_the_moment_gives_the_same_weights(scheme: Scheme) -> None:
    """Powers of two change no digit; the scales of the start suit other weights."""
    matrix, moment = problem()
    start = round_to_nearest(matrix, scheme)
    for factor, codes in product((1.0, 1.42), (True, False)):
        first = descend(factor * matrix, moment, start, 2, codes)
        assert same(first, descend(factor * matrix, moment * 2.0**-24, start, 2, codes))


@pytest.mark.parametrize("scheme", SCHEMES[1:4] + SCHEMES[-3:], ids=str)
@pytest.mark.parametrize("block", [1, 96, 1024])
def test_blocks_see_each_others_changes_whatever_their_size(
    scheme: Scheme, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, moment = problem()
    start = round_to_nearest(matrix, scheme)
    usual = descend(matrix, moment, start)
    monkeypatch.setattr(maths, "_BLOCK", block)
    found = descend(matrix, moment, start)
    assert (found.values() == usual.values()).double().mean() > 0.99
    torch.testing.assert_close(found.scale, usual.scale, rtol=0.02, atol=0)


def test_scales_end_where_least_squares_puts_them() -> None:
    matrix, moment = problem(4, 64)
    scheme = Scheme(3, granularity="group", group=16, narrow=False)
    start = round_to_nearest(matrix, scheme)
    found = descend(matrix, moment, start, 500, codes=False)
    for row in range(4):
        spread = torch.zeros(4, 64, dtype=torch.float64)
        for group in range(4):
            own = slice(16 * group, 16 * (group + 1))
            spread[group, own] = start.codes[row, own].double()
        left = spread @ moment.double() @ spread.T
        right = spread @ moment.double() @ matrix[row].double()
        assert torch.allclose(found.scale[row].double(), torch.linalg.solve(left, right), rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_columns_without_input_keep_their_codes(scheme: Scheme) -> None:
    matrix, moment = problem()
    dead = torch.tensor([0, 17, 191])
    moment[dead], moment[:, dead] = 0, 0
    start = round_to_nearest(matrix, scheme)
    found = descend(matrix, moment, start)
    assert torch.equal(found.values()[:, dead], start.values()[:, dead])
    nothing = descend(matrix, torch.zeros(192, 192), start)
    assert torch.equal(nothing.dequantize(), start.dequantize())


def test_rows_do_not_depend_on_each_other() -> None:
    matrix, moment = problem(40)
    scheme = SCHEMES[1]
    whole = descend(matrix, moment, round_to_nearest(matrix, scheme), 2)
    parts = [
        descend(part, moment, round_to_nearest(part, scheme), 2).codes for part in matrix.split(11)
    ]
    # Products of other shapes are summed in another order, which may tip a code.
    assert (whole.codes == torch.cat(parts)).double().mean() > 0.999


@pytest.mark.parametrize("rows", [1100, 4200])
def test_many_rows_are_visited_in_narrower_steps(rows: int) -> None:
    """Codes are visited 32 at a time for up to 1024 rows, and 8 for more than 4096."""
    matrix, moment = problem(2)
    scheme = SCHEMES[1]
    few = descend(matrix, moment, round_to_nearest(matrix, scheme), 2)
    stacked = matrix.repeat(rows // 2, 1)
    many = descend(stacked, moment, round_to_nearest(stacked, scheme), 2)
    assert (many.codes == few.codes.repeat(rows // 2, 1)).double().mean() > 0.99
    assert torch.allclose(many.scale, few.scale.repeat(rows // 2, 1), rtol=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_that_are_zero_stay_zero(scheme: Scheme) -> None:
    matrix, moment = problem()
    zero = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    matrix[zero] = 0
    found = descend(matrix, moment, round_to_nearest(matrix, scheme), 2)
    values = found.dequantize()
    assert not values[zero].any()
    assert float((values[~zero] != 0).float().mean()) > 0.3  # two bits make zeros of many


def test_a_row_of_zeros_keeps_its_scale() -> None:
    matrix, moment = problem(4)
    matrix[1] = 0
    start = round_to_nearest(matrix, SCHEMES[1])
    found = descend(matrix, moment, start, codes=False)
    assert torch.equal(found.scale[1], start.scale[1])


def test_halves_are_refined_as_the_floats_they_are() -> None:
    matrix, moment = problem()
    half = matrix.to(torch.bfloat16)
    start = round_to_nearest(half, SCHEMES[1])
    assert same(descend(half, moment, start), descend(half.float(), moment, start))
    assert same(descend(half, moment, start), descend(half, moment, start, 1))


def test_arguments_are_left_as_they_were() -> None:
    for scheme in SCHEMES:
        matrix, moment = problem()
        start = round_to_nearest(matrix, scheme)
        before = matrix.clone(), moment.clone(), start.codes.clone(), start.scale.clone()
        descend(matrix, moment, start)
        assert torch.equal(matrix, before[0])
        assert torch.equal(moment, before[1])
        assert same(start, replace(start, codes=before[2], scale=before[3]))


def test_better_rows_takes_each_row_where_it_is_better() -> None:
    for scheme in (SCHEMES[1], SCHEMES[2], SCHEMES[6]):
        matrix, moment = problem(6)
        good, bad = (round_to_nearest(m, scheme) for m in (matrix, 1.1 * matrix + 0.5))
        mixed = better_rows(matrix, moment, bad, good)
        assert same(mixed, good)
        assert torch.equal(mixed.zero_point, good.zero_point)
        assert same(better_rows(matrix, moment, good, bad), good)


def test_worse_rows_are_those_of_the_greater_error() -> None:
    for scheme in (SCHEMES[0], SCHEMES[2], SCHEMES[6]):
        matrix, moment = problem(40)
        first, second = (round_to_nearest(m, scheme) for m in (matrix, matrix.roll(1, 1) * 0.9))
        tilted = replace(first, scale=first.scale * torch.linspace(0.9, 1.1, 40)[:, None])
        for one, other in ((first, tilted), (tilted, first), (second, tilted), (first, first)):
            errors = [row_errors(matrix.double(), x, moment.double()) for x in (one, other)]
            assert torch.equal(worse_rows(matrix, one, other, moment), errors[0] > errors[1])


def test_a_scale_that_all_rows_share_is_left_to_them() -> None:
    scheme = SCHEMES[5]
    matrix, moment = problem()
    once = descend(matrix, moment, round_to_nearest(matrix, scheme))
    twice = descend(matrix, moment, round_to_nearest(matrix, scheme), 2)
    assert same(twice, descend(matrix, moment, once))


def test_errors_are_summed_in_float64_whatever_the_types() -> None:
    matrix, moment = problem()
    start = round_to_nearest(matrix, SCHEMES[1])
    errors = row_errors(matrix.double(), start, moment.double())
    assert errors.dtype == torch.float64
    assert torch.equal(errors, row_errors(matrix, start, moment))
    assert same(descend(matrix.double(), moment, start), descend(matrix, moment, start))
