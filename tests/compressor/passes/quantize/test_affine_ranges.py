"""The search of ranges: narrower ones by least squared error."""

import pytest
import torch
from torch import Tensor

from compressor.passes.quantize.maths.affine import (
    absmax_parameters,
    extremes,
    in_groups,
    mse_parameters,
    parameters,
    quantize,
)
from compressor.types.layers import Scheme, sqnr_db


def test_search_of_the_range_gains_much_on_gaussian_values_at_few_bits() -> None:
    matrix = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    for bits, gain in ((2, 4.0), (3, 2.0), (4, 0.5)):
        scheme = Scheme(bits)
        full, searched = (
            sqnr_db(matrix, quantize(matrix, *find(matrix, scheme), scheme).dequantize())
            for find in (absmax_parameters, mse_parameters)
        )
        assert full is not None
        assert searched is not None
        assert searched > full + gain


def test_importance_is_what_an_error_in_a_column_counts() -> None:
    matrix = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 4
    scheme = Scheme(3, granularity="group", group=32, narrow=False)

    def error(parameters: tuple[Tensor, Tensor]) -> float:
        found = quantize(matrix, *parameters, scheme).dequantize() - matrix
        return float((found.square() * importance).sum())

    plain = mse_parameters(matrix, scheme)
    assert error(mse_parameters(matrix, scheme, importance=importance)) < 0.95 * error(plain)
    same = mse_parameters(matrix, scheme, importance=torch.full((256,), 0.5))
    assert torch.equal(same[0], plain[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(3, granularity="group", group=8, narrow=False),
        Scheme(3, False, False, "group", 8, scale_type="float16"),
        Scheme(2, granularity="channel"),
        Scheme(4, granularity="tensor"),
        Scheme(3, False, False, "tensor"),
    ],
    ids=str,
)
def test_the_best_of_forty_narrower_ranges(scheme: Scheme, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(3, 32, generator=generator).exp() - 0.7
    importance = torch.rand(32, generator=generator) ** 2 if weighted else torch.ones(32)
    low, high = extremes(in_groups(matrix, scheme), scheme)
    shares = [1 - 0.8 * step / 40 for step in range(41)]
    tried = [parameters(low * share, high * share, scheme) for share in shares]
    errors = []
    for scale, zero in tried:
        off = quantize(matrix, scale, zero, scheme).dequantize() - matrix
        squares = (off.square() * importance).to(torch.float64)
        errors.append(squares.reshape(*scale.shape, -1).sum(2))
    best = torch.stack(errors).argmin(0)
    found = mse_parameters(matrix, scheme, importance=importance if weighted else None)
    for place, values in enumerate(found):
        choices = torch.stack([each[place] for each in tried])
        assert torch.allclose(values.double(), choices.gather(0, best[None])[0].double())
    assert int(best.max()) > 0


def test_what_is_shrunk_in_other_steps() -> None:
    matrix = torch.tensor([[1.0] * 30 + [0.49, 0.51]])
    scale, _ = mse_parameters(matrix, Scheme(2, signed=False), steps=1)
    assert float(scale) == pytest.approx(1 / 3)  # a fifth is the only other
    scale, _ = mse_parameters(matrix, Scheme(2, signed=False), steps=4)
    assert float(scale) == pytest.approx(1 / 3)


def test_one_scale_for_more_rows_than_are_worked_on_at_once() -> None:
    matrix = torch.randn(3000, 200, generator=torch.Generator().manual_seed(2))
    scheme = Scheme(4, False, False, "tensor")
    scale, zero = mse_parameters(matrix, scheme, steps=1)
    assert scale.shape == zero.shape == (1, 1)
    whole = quantize(matrix, scale, zero, scheme)
    assert torch.equal(whole.codes[2900:], quantize(matrix[2900:], scale, zero, scheme).codes)


def test_a_fifth_of_the_range_is_the_narrowest() -> None:
    matrix = torch.tensor([[0.18] * 300 + [1.0]])
    scale, _ = mse_parameters(matrix, Scheme(2))  # codes are -1, 0 and 1
    assert float(scale) == pytest.approx(0.2)
