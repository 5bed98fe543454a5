"""Scales under which weights that were codes before are the same codes."""

from typing import Any

import pytest
import torch

from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.grids import kept_grids
from compressor.types.layers import Scheme


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_codes_that_fit_are_kept(granularity: Any) -> None:
    """Rows whose greatest code is less than 127 would miss their grid by the full range."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-90, 91, (24, 40), generator=generator).float()
    steps = torch.rand(24 if granularity == "channel" else 1, 1, generator=generator) + 0.01
    matrix = codes * steps
    scheme = Scheme(8, granularity=granularity)
    scale, zero = absmax_parameters(matrix, scheme)
    again = quantize(matrix, kept_grids(matrix, scale, scheme), zero, scheme)
    assert torch.equal(again.codes.float(), codes)
    assert not torch.equal(quantize(matrix, scale, zero, scheme).codes.float(), codes)


def test_other_rows_keep_their_scale() -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(2000, 9, generator=generator)
    matrix[:10, 2:] = 0  # two values lie on many grids
    matrix[10:20] = torch.arange(9) * 200.0 + 1  # codes that need more bits
    matrix[20:30] = 0
    scheme = Scheme(8)
    scale, _ = absmax_parameters(matrix, scheme)
    assert torch.equal(kept_grids(matrix, scale, scheme), scale)


def kept(*values: float, bits: int = 8) -> float:
    """Return the scale of a single row."""
    scale = torch.full((1, 1), 123.0)
    return float(kept_grids(torch.tensor([values]), scale, Scheme(bits)))


def test_of_several_steps_the_least_is_taken() -> None:
    # Multiples of 0.6 up to 12: codes of 20, 40, 60, 80, 100 or 120 are the greatest.
    values = [0.6 * (i + 1) * (-1) ** i for i in range(20)]
    assert kept(*values) == pytest.approx(0.1)
    assert kept(*values, bits=7) == pytest.approx(0.2)
    assert kept(*values, bits=6) == pytest.approx(0.6)
    assert kept(*values, bits=5) == 123.0
    assert kept(3.0, -3.0, 0.0, 3.0, 3.0, -3.0, bits=2) == 3.0


def test_small_values_count_as_well() -> None:
    """Sixteen multiples of ten would do with a greatest code of 120; one of three does not."""
    tens = [10.0 * i for i in (10, -9, 8, 7, -6, 5, 4, 3)] * 2
    assert kept(*tens) == pytest.approx(100 / 120)
    assert kept(*tens, 3.0) == pytest.approx(1.0)
    assert kept(*tens, 3.004) == 123.0
    assert kept(*tens, 3.0004) == pytest.approx(1.0)


def test_four_values_may_be_a_coincidence() -> None:
    assert kept(10.0, 9.0, 0.0, -7.0, 3.0) == 123.0
    assert kept(10.0, 9.0, 0.0, -7.0, 3.0, 1.0) == pytest.approx(10 / 120)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(8, symmetric=False),
        Scheme(8, scale_type="bfloat16"),
        Scheme(8, granularity="group", group=6),
        Scheme(8, element="e4m3"),
    ],
    ids=str,
)
def test_other_schemes_keep_their_scales(scheme: Scheme) -> None:
    matrix = torch.tensor([[10.0, 9.0, 0.0, -7.0, 3.0, 1.0]])
    scale = torch.full((1, 1), 123.0)
    assert kept_grids(matrix, scale, scheme) is scale
    assert kept_grids(matrix, scale, Scheme(8)) is not scale


def test_halves_lie_on_grids_of_float32() -> None:
    matrix = torch.tensor([[10.0, 9.0, 0.0, -7.0, 3.0, 1.0]])
    scale = torch.full((1, 1), 123.0)
    halves = [kept_grids(matrix.to(t), scale, Scheme(8)) for t in (torch.bfloat16, torch.float32)]
    assert torch.equal(*halves)


def test_weights_without_values() -> None:
    scale = torch.ones(0, 1)
    assert kept_grids(torch.zeros(0, 4), scale, Scheme(8)) is scale
