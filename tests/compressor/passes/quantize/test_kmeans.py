"""k-means on a line: against the best division there is, its zeros and its determinism."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from compressor.passes.quantize.maths.kmeans import _Sorted, clustered, codebook, nearest
from compressor.types.layers import Scheme

FLOATS = st.floats(-8, 8, width=32, allow_subnormal=False)


def scheme(bits: int, rows: int | None = None, stored: str = "float32") -> Scheme:
    return Scheme(
        bits,
        signed=False,
        granularity="tensor" if rows is None else "rows",
        group=rows,
        element="codebook",
        scale_type=stored,  # type: ignore[arg-type]  # one of the three
    )


def error(values: torch.Tensor, numbers: torch.Tensor) -> float:
    distances = (values.double()[:, None] - numbers.double()).square()
    return float(distances.min(1).values.sum())


def best_error(values: torch.Tensor, size: int) -> float:
    """Try all divisions of the sorted values into so many intervals."""
    ordered = values.double().sort().values
    least = float("inf")
    for cuts in itertools.combinations(range(1, len(ordered)), min(size, len(ordered)) - 1):
        parts = torch.tensor_split(ordered, list(cuts))
        total = sum(float((part - part.mean()).square().sum()) for part in parts)
        least = min(least, total)
    return least


@given(npst.arrays("float32", st.integers(1, 9), elements=FLOATS), st.integers(1, 4))
def test_it_is_nearly_as_good_as_the_best_division(values, size):
    tensor = torch.from_numpy(values)
    found = codebook(tensor, size)
    assert found.numel() <= size
    assert bool((found.diff() > 0).all())
    least = best_error(tensor, size)
    assert error(tensor, found) <= 1.5 * least + 1e-6 * float(tensor.abs().max()) ** 2


@pytest.mark.parametrize("size", [2, 16, 256])
def test_no_centroid_can_be_moved_for_the_better(size: int) -> None:
    """Each is the mean of what is nearest to it, and evenly spaced numbers leave more error."""
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(size))
    found = codebook(values, size)
    assert found.numel() == size
    codes = nearest(values, found).long()
    means = torch.zeros(size).index_add(0, codes, values) / torch.bincount(codes)
    assert torch.allclose(means, found, atol=2e-3)
    even = torch.linspace(float(values.min()), float(values.max()), size)
    assert error(values, found) < 0.8 * error(values, even)


def test_far_values_do_not_take_the_centroids_from_the_others() -> None:
    values = torch.cat(
        [torch.randn(20_000, generator=torch.Generator().manual_seed(0)), torch.tensor([1e4])]
    )
    found = codebook(values, 16)
    assert error(values, found) < 0.02 * 20_000


def test_important_values_get_the_finer_numbers() -> None:
    values = torch.linspace(-1, 1, 2001)
    weight = torch.where(values > 0, 100.0, 1.0)
    found = codebook(values, 16, weight)
    assert int((found > 0).sum()) > 10
    assert torch.equal(codebook(values, 16, torch.zeros_like(values)), codebook(values, 16))


@given(npst.arrays("float32", st.integers(1, 60), elements=FLOATS), st.integers(1, 5))
def test_each_value_gets_the_nearest_number(values, size):
    tensor = torch.from_numpy(values)
    numbers = codebook(tensor, size)
    chosen = numbers[nearest(tensor, numbers).long()]
    distances = (tensor.double()[:, None] - numbers.double()).abs()
    assert torch.equal((tensor.double() - chosen.double()).abs(), distances.min(1).values)


def test_neighbouring_floats_are_told_apart() -> None:
    first = torch.tensor(0.1)
    second = torch.nextafter(first, torch.tensor(1.0))
    pair = torch.stack([first, second])
    assert nearest(pair, pair).tolist() == [0, 1]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [None, 3, 4])
def test_zeros_remain_zero(bits: int, rows: int | None) -> None:
    matrix = torch.randn(8, 50, generator=torch.Generator().manual_seed(bits))
    matrix[torch.rand(8, 50, generator=torch.Generator().manual_seed(9)) < 0.7] = 0
    found = clustered(matrix, scheme(bits, rows))
    values = found.dequantize()
    assert bool((values[matrix == 0] == 0).all())
    assert found.codebook is not None
    assert found.codebook.shape == (1 if rows is None else -(-8 // rows), 1 << bits)


def test_a_few_zeros_claim_no_number() -> None:
    matrix = torch.cat([torch.zeros(1), torch.full((500,), 1.0), torch.full((500,), -1.0)])[None]
    values = clustered(matrix, scheme(1)).dequantize().unique()
    assert torch.allclose(values, torch.tensor([-1.0, 1.0]), atol=0.01)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 6), st.integers(1, 4))
def test_rows_depend_on_their_group_alone(rows, columns, step, bits):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    whole = clustered(matrix, scheme(bits, step)).dequantize()
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        assert torch.equal(whole[start : start + step], clustered(part, scheme(bits)).dequantize())


def test_few_different_values_are_kept_exactly() -> None:
    matrix = torch.tensor([[0.5, -2.0, 0.5, 3.0], [3.0, 3.0, -2.0, 0.5]])
    assert torch.equal(clustered(matrix, scheme(2)).dequantize(), matrix)
    assert torch.equal(clustered(torch.zeros(2, 3), scheme(1)).dequantize(), torch.zeros(2, 3))


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_numbers_have_the_type_that_they_are_stored_in(stored: str) -> None:
    matrix = torch.randn(4, 99, generator=torch.Generator().manual_seed(1))
    book = clustered(matrix, scheme(4, None, stored)).codebook
    assert book is not None
    assert torch.equal(book.to(getattr(torch, stored)).float(), book)


def test_the_order_of_values_does_not_matter() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    mixed = values[torch.randperm(10_000, generator=torch.Generator().manual_seed(4))]
    assert torch.equal(codebook(values, 16), codebook(mixed, 16))


@pytest.mark.parametrize(
    ("size", "weighted", "zero", "numbers"),
    # As measured, where a third of the values is zero.
    [
        (4, False, False, [-1.24324, -0.06519, 0.67431, 1.63327]),
        (4, False, True, [-1.19758, 0, 0.71248, 1.65353]),
        (4, True, False, [-1.27576, -0.07116, 0.6785, 1.65288]),
        (4, True, True, [-1.23111, 0, 0.71385, 1.66319]),
        (7, False, True, [-1.97529, -1.15203, -0.5353, 0, 0.53267, 1.15841, 2.00733]),
        (7, True, False, [-1.98732, -1.16822, -0.53066, 0.00447, 0.55571, 1.18952, 2.05411]),
    ],
)
def test_centroids_end_where_they_did(
    size: int, weighted: bool, zero: bool, numbers: list[float]
) -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    weights = torch.rand(4000, generator=torch.Generator().manual_seed(6)) if weighted else None
    values[::3] = 0
    found = codebook(values, size, weights, zero=zero)
    assert found.tolist() == pytest.approx(numbers, abs=1e-5)
    assert found.dtype == torch.float32


def test_the_form_of_what_is_clustered() -> None:
    matrix = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    importance = torch.rand(6, 40, generator=torch.Generator().manual_seed(3)) ** 3
    found = clustered(matrix, scheme(2, 3), importance)
    assert found.codes.dtype == torch.uint8
    assert (found.scale.tolist(), found.zero_point.tolist()) == ([[1.0]], [[0]])
    assert found.zero_point.dtype == torch.uint8
    assert found.codebook is not None
    for group, part in enumerate((slice(0, 3), slice(3, 6))):
        book = codebook(matrix[part], 4, importance[part])
        assert torch.equal(found.codebook[group], book)
        assert torch.equal(found.codes[part], nearest(matrix[part], book))
    assert found.codebook.dtype == torch.float32


def test_one_zero_in_a_hundred_is_meant() -> None:
    for count, kept in ((100, True), (101, False)):
        matrix = torch.linspace(1, 2, count)[None]
        matrix[0, 7] = 0
        assert (0.0 in clustered(matrix, scheme(1)).dequantize().tolist()[0]) == kept


def test_zero_takes_a_number_of_the_codebook() -> None:
    values = torch.tensor([1.0, 1, 0, -2], dtype=torch.float64)
    assert codebook(values, 3, zero=True).tolist() == [-2, 0, 1]
    assert codebook(values, 1, zero=True).tolist() == [0]
    assert codebook(values, 3, zero=True).dtype == torch.float32
    assert codebook(values, 2, torch.ones(4, dtype=torch.float16)).tolist() == pytest.approx(
        [-2, 2 / 3]
    )


def test_of_two_that_are_as_near_it_is_the_lower() -> None:
    places = nearest(torch.tensor([0.5, 0.50001, -3, 9], dtype=torch.float64), torch.arange(3.0))
    assert places.tolist() == [0, 1, 0, 2]
    assert places.dtype == torch.uint8


def test_far_from_zero_and_of_little_weight() -> None:
    values = (1000 + torch.arange(8) / 1024).repeat(500)
    pairs = [1000 + (4 * k + 1) / 2048 for k in range(4)]
    assert codebook(values, 4).tolist() == pytest.approx(pairs, abs=1e-4)
    weights = torch.rand(4000, generator=torch.Generator().manual_seed(1))
    scattered = torch.randn(4000, generator=torch.Generator().manual_seed(2))
    light = codebook(scattered, 8, weights / 1024)
    assert torch.equal(light, codebook(scattered, 8, weights))


def test_values_and_importance_may_be_halves() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    weights = torch.rand(4000, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    assert torch.equal(codebook(values, 8), codebook(values.float(), 8))
    assert torch.equal(codebook(values, 8, weights), codebook(values, 8, weights.double()))


@pytest.mark.parametrize("values", [torch.arange(10.0), 2.0 ** -torch.arange(100.0)])
@pytest.mark.parametrize("places", [(0, 1), (0, 9), (4, 5), (-2, -1)])
def test_values_that_count_nothing_take_no_number_from_others(
    values: torch.Tensor, places: tuple[int, int]
) -> None:
    importance = torch.zeros(len(values))
    importance[list(places)] = torch.tensor([1.0, 2.0])
    found = codebook(values, 4, importance)
    assert set(values[list(places)].tolist()) <= set(found.tolist())
    assert bool(torch.isfinite(found).all())
    assert float(found.min()) >= float(values.min())
    assert float(found.max()) <= float(values.max())


def test_neither_unit_nor_origin_matters() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5)) ** 3
    values = (values * 1024).round() / 1024  # so that 64 more are exact
    found = codebook(values, 8)
    for exponent in (-30, 30):
        assert torch.equal(codebook(values * 2.0**exponent, 8), found * 2.0**exponent)
    assert torch.allclose(codebook(values + 64, 8) - 64, found, rtol=0, atol=1e-5)


def test_centroids_that_stay_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, means = [], _Sorted.means

    def counted(*arguments: Any) -> torch.Tensor:
        rounds.append(means(*arguments))
        return rounds[-1]

    monkeypatch.setattr(_Sorted, "means", counted)
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    codebook(values, 8, zero=True)
    assert 10 < len(rounds) < 100  # measured: 44, of at most 300
    for far in (-1e7, 1e7):  # beside which nothing moves that counts
        rounds.clear()
        codebook(torch.cat([values, torch.tensor([far])]), 8, zero=True)
        assert len(rounds) == 2, "that of the start, and one"


def test_of_no_values_there_are_no_numbers() -> None:
    assert codebook(torch.zeros(0), 4).tolist() == []
    assert codebook(torch.zeros(3), 4, zero=True).tolist() == [0]
