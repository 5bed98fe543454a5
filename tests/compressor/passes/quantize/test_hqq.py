"""Half-quadratic quantization."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.floating import round_to_nearest
from compressor.passes.quantize.maths.hqq import _solved, hqq
from compressor.types.layers import QuantizedTensor, Scheme

GROUPED = Scheme(4, False, False, "group", 32, scale_type="bfloat16")
SCHEMES = [
    Scheme(8, narrow=False),
    Scheme(4, granularity="group", group=32, narrow=False),
    GROUPED,
    Scheme(3, False, False, "group", 16),
    Scheme(2, granularity="group", group=32, narrow=False),
    Scheme(2, False, False, "group", 32, scale_type="float16"),
    Scheme(4, granularity="tensor"),
    Scheme(3, granularity="group", group=32, narrow=False, signed_scale=True),
]


def heavy_tailed(rows: int = 12, columns: int = 128, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return normal * torch.exp(0.5 * torch.randn(rows, columns, generator=generator))


def errors(matrix: Tensor, found: QuantizedTensor, norm: float) -> Tensor:
    """Sums of a group in the norm, float64."""
    off = (found.dequantize().double() - matrix.double()).abs().pow(norm)
    if found.scheme.granularity == "tensor":
        return off.sum()
    return off.reshape(len(matrix), found.scale.shape[1], -1).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scheme=st.sampled_from(SCHEMES),
    norm=st.sampled_from([0.5, 0.7, 1.0]),
    exponent=st.integers(-20, 20),
)
def test_never_worse_than_nearest_rounding_in_its_norm_nor_squared(
    seed: int, scheme: Scheme, norm: float, exponent: int
) -> None:
    matrix = heavy_tailed(3, 96, seed) * 2.0**exponent
    found, nearest = hqq(matrix, scheme, norm), round_to_nearest(matrix, scheme)
    for power in (norm, 2.0):
        # float32 rounds errors of a thousandth of a step, which the norm raises
        assert torch.all(errors(matrix, found, power) <= errors(matrix, nearest, power) * 1.001)


@pytest.mark.parametrize(
    ("scheme", "share"),
    # As measured, with a margin
    [(SCHEMES[4], 0.9), (SCHEMES[5], 0.95), (GROUPED, 0.97)],
    ids=str,
)
def test_errors_fall_at_few_bits(scheme: Scheme, share: float) -> None:
    matrix = heavy_tailed(64)
    found, nearest = hqq(matrix, scheme), round_to_nearest(matrix, scheme)
    assert errors(matrix, found, 0.7).sum() < share * errors(matrix, nearest, 0.7).sum()
    assert errors(matrix, found, 2.0).sum() < share * errors(matrix, nearest, 2.0).sum()


def test_the_zero_point_moves_where_errors_have_a_sign() -> None:
    scheme = Scheme(4, False, False)
    levels = torch.tensor([[[-3.0, 0.0, 2.0, 5.0]]])
    zero = torch.full((1, 1), 6, dtype=torch.uint8)
    one = torch.ones(1, 1)
    for left, expected in ((0.9, 5), (-0.8, 7), (0.2, 6), (-40.0, 15)):
        _, found = _solved(levels, torch.full_like(levels, left), one, zero, scheme)
        assert found.tolist() == [[expected]]
    # Nothing but the scale is off: twice as large values for the same codes.
    scale, found = _solved(levels, levels - levels.mean(), one, zero, scheme)
    assert found.tolist() == [[6]]
    assert float(scale) == pytest.approx(2 - 4 / 38)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_form_is_the_scheme_s(scheme: Scheme) -> None:
    matrix = heavy_tailed()
    matrix[3] = 0
    matrix[4] = 0.25
    found = hqq(matrix, scheme)
    assert found.codes.dtype == found.zero_point.dtype
    assert int(found.codes.min()) >= scheme.low
    assert int(found.codes.max()) <= scheme.high
    assert not found.dequantize()[3].any()
    again = quantize(found.dequantize(), found.scale, found.zero_point, scheme)
    assert torch.equal(again.codes, found.codes)
    if scheme.scale_type == "bfloat16":
        assert torch.equal(found.scale.to(torch.bfloat16).to(torch.float32), found.scale)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.granularity != "tensor"], ids=str)
def test_rows_in_pieces_are_the_same(scheme: Scheme) -> None:
    matrix = heavy_tailed(29).to(torch.bfloat16)
    whole = hqq(matrix, scheme)
    parts = [hqq(part, scheme) for part in matrix.split(4)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))
    assert torch.equal(whole.zero_point, torch.cat([part.zero_point for part in parts]))


def test_the_result_does_not_depend_on_the_unit() -> None:
    matrix = heavy_tailed()
    scheme = Scheme(3, granularity="group", group=32)
    first, second = hqq(matrix, scheme), hqq(matrix * 1024, scheme)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale * 1024, second.scale)


def test_edges() -> None:
    assert hqq(torch.zeros(0, 32), GROUPED).codes.shape == (0, 32)
    for value in (1e-42, 3e38):
        assert torch.isfinite(hqq(torch.full((2, 32), value), GROUPED).dequantize()).all()
    with pytest.raises(ValueError, match="not a scheme of integers"):
        hqq(torch.ones(1, 32), Scheme(8, element="e4m3"))
    with pytest.raises(ValueError, match="40 columns do not divide into groups of 32"):
        hqq(torch.ones(1, 40), GROUPED)


def test_range_of_all_values_is_kept_where_it_is_best() -> None:
    matrix = torch.arange(-8.0, 8.0)[None]
    scheme = Scheme(4, narrow=False)
    scale, _ = absmax_parameters(matrix, scheme)
    found = hqq(matrix, scheme)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.dequantize(), matrix)


@pytest.mark.parametrize("scheme", [SCHEMES[1], GROUPED], ids=str)
def test_more_than_is_worked_on_at_once(scheme: Scheme) -> None:
    """The pieces are of 2 to the 17th elements: 1024 rows of these."""
    matrix = heavy_tailed(1300)
    whole = hqq(matrix, scheme)
    parts = [hqq(part, scheme) for part in matrix.split(500)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))
    assert torch.equal(whole.zero_point, torch.cat([part.zero_point for part in parts]))


@pytest.mark.parametrize(
    ("scheme", "in_norm", "squared", "scales", "zeros"),
    # As measured: where the search ends.
    [
        (SCHEMES[0], 63.61557, 0.3599874, 0.5695558, 0),
        (SCHEMES[1], 320.9781, 38.46374, 24.75608, 0),
        (SCHEMES[2], 286.6348, 24.68895, 19.75293, 357),
        (SCHEMES[3], 400.5782, 64.95324, 65.80492, 345),
        (SCHEMES[4], 764.1315, 526.6275, 89.15320, 0),
        (SCHEMES[5], 729.7798, 374.8809, 75.64160, 71),
        (SCHEMES[6], 521.9227, 189.3848, 0.8911029, 0),
    ],
    ids=str,
)
def test_the_search_ends_where_it_did(
    scheme: Scheme, in_norm: float, squared: float, scales: float, zeros: int
) -> None:
    matrix = heavy_tailed()
    found = hqq(matrix, scheme)
    assert float(errors(matrix, found, 0.7).sum()) == pytest.approx(in_norm, rel=1e-5)
    assert float(errors(matrix, found, 2.0).sum()) == pytest.approx(squared, rel=1e-5)
    assert float(found.scale.sum()) == pytest.approx(scales, rel=1e-5)
    assert int(found.zero_point.sum(dtype=torch.int64)) == zeros


@pytest.mark.parametrize(
    ("levels", "left", "factor"),
    [
        ([-3.0, 0.0, 2.0, 5.0], [0.9] * 4, 1 - 0.8 / 50),  # a step of it is the zero point's
        ([1.0, 0.0, 0.0, 0.0], [0.5, 0.0, -0.25, -0.25], 1.5),
        ([0.0] * 4, [0.1, -0.1, 0.1, -0.1], 1.0),
        ([2.0, 0.0, 0.0, 0.0], [-3.0, 1.0, 1.0, 1.0], 1.0),  # it would be negative
        ([2.0, 0.0, 0.0, 0.0], [-2.0, 1.0, 1.0, 0.0], 1.0),  # or nothing
    ],
)
def test_the_scale_of_least_squares(levels: list[float], left: list[float], factor: float) -> None:
    scheme = Scheme(4, False, False)
    two = torch.full((1, 2), 2.0)
    zero = torch.full((1, 2), 6, dtype=torch.uint8)
    other = ([1.0, 2.0, 3.0, 4.0], [0.25, 0.5, -0.25, -0.5])
    scale, found = _solved(
        torch.tensor([[levels, other[0]]]), torch.tensor([[left, other[1]]]), two, zero, scheme
    )
    assert scale.tolist() == [pytest.approx([2 * factor, 2 * (1 - 1.5 / 30)])]
    assert found.tolist() == [[5 if left[1] == 0.9 else 6, 6]]


def test_a_zero_point_is_a_code() -> None:
    levels, one = torch.tensor([[[-3.0, 0.0, 2.0, 5.0]]]), torch.ones(1, 1)
    zero = torch.full((1, 1), 6, dtype=torch.uint8)
    for left, expected in ((40.0, 0), (-40.0, 15)):
        scale, found = _solved(
            levels, torch.full_like(levels, left), one, zero, Scheme(4, False, False)
        )
        assert found.tolist() == [[expected]]
        moved = levels - (expected - 6)
        gain = (moved * (left + expected - 6)).sum() / moved.square().sum()
        assert float(scale) == pytest.approx(float(1 + gain) if gain > -1 else 1.0)


@pytest.mark.parametrize("scheme", [SCHEMES[1], SCHEMES[3]], ids=str)
def test_halves_are_searched_in_float32(scheme: Scheme) -> None:
    half = heavy_tailed().to(torch.bfloat16)
    found, whole = hqq(half, scheme), hqq(half.to(torch.float32), scheme)
    assert torch.equal(found.codes, whole.codes)
    assert torch.equal(found.scale, whole.scale)
    assert torch.equal(found.zero_point, whole.zero_point)


def test_sums_of_long_rows_are_exact() -> None:
    """Squares of 8 bits, 4096 times, need more than the 24 bits of a float32."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(-128, 128, (128, 1, 4096), generator=generator)
    left = 32 * levels + torch.randint(-31, 32, levels.shape, generator=generator)  # 64ths of steps
    one, none = torch.ones(128, 1), torch.zeros(128, 1, dtype=torch.int8)
    scale, _ = _solved(levels.float(), left.float() / 64, one, none, Scheme(8))
    gain = (levels * left).sum(-1).double() / 64 / levels.square().sum(-1)
    assert torch.equal(scale, (1 + gain).to(torch.float32))
