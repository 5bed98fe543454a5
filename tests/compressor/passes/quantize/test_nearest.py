"""One entry for rounding to nearest, whatever the scheme."""

from dataclasses import replace

import pytest
import torch

from compressor.passes.quantize.maths.floating import nvfp4_tensor_scale, round_to_nearest
from compressor.types.layers import QuantizedTensor, Scheme

INT4 = Scheme(4, granularity="group", group=32, scale_type="bfloat16", narrow=False)
NVFP4 = Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3")
SCHEMES = [
    Scheme(8, narrow=False),
    INT4,
    replace(INT4, bits=2, symmetric=False, signed=False),
    Scheme(8, element="e4m3", scale_type="float16"),
    Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0"),
    NVFP4,
]


def matrix_of(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(0)) * 0.02


def squared_error(matrix: torch.Tensor, found: QuantizedTensor) -> float:
    return float((found.dequantize() - matrix).square().sum())


@pytest.mark.parametrize(
    ("scheme", "noise"),
    # For normal weights, by the step: Δ²/12 of ±2.5 to ±3.5 deviations in 2^bits steps; for
    # floats, a value's size times the mantissa's half step over the square root of 3.
    list(zip(SCHEMES, [1e-4, 0.01, 0.2, 1e-3, 0.02, 0.012], strict=True)),
    ids=str,
)
def test_every_scheme_is_close_and_closer_after_a_search(scheme: Scheme, noise: float) -> None:
    matrix = matrix_of()
    plain, searched = (round_to_nearest(matrix, scheme, search) for search in ("min-max", "mse"))
    assert squared_error(matrix, plain) < noise * matrix.square().sum()
    bound = 1.0 if scheme == SCHEMES[0] else 0.99  # at 8 bits the full range is the best
    assert squared_error(matrix, searched) <= bound * squared_error(matrix, plain)
    assert searched.scheme is scheme


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("search", ["min-max", "mse"])
def test_rows_in_blocks_are_the_same(scheme: Scheme, search: str) -> None:
    matrix = matrix_of(23).to(torch.bfloat16)
    whole = None if scheme is not NVFP4 else nvfp4_tensor_scale(matrix.abs().max())
    at_once = round_to_nearest(matrix, scheme, search)  # type: ignore[arg-type]
    parts = [
        round_to_nearest(part, scheme, search, whole)  # type: ignore[arg-type]
        for part in matrix.split(4)
    ]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    assert torch.equal(at_once.codes.view(torch.uint8), codes)
    assert torch.equal(at_once.scale, torch.cat([part.scale for part in parts]))
    assert torch.equal(at_once.zero_point, torch.cat([part.zero_point for part in parts]))


def test_the_argument_is_left_as_it_was() -> None:
    matrix = matrix_of()
    before = matrix.clone()
    for scheme in SCHEMES:
        round_to_nearest(matrix, scheme, "mse")
    assert torch.equal(matrix, before)


def test_a_matrix_without_rows() -> None:
    for scheme in SCHEMES:
        assert round_to_nearest(torch.zeros(0, 128), scheme, "mse").codes.shape == (0, 128)
