"""Rows of an nvfp4 weight, quantized a few at a time, are those of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compressor.passes.quantize.maths.floating import RangeSearch, round_to_nearest
from compressor.passes.quantize.weights.weights import Nvfp4Rows
from compressor.types.layers import Scheme

SCHEME = Scheme(4, granularity="group", group=16, element="e2m1", scale_type="e4m3")


@pytest.mark.parametrize("search", ["min-max", "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_whole(search: RangeSearch, dtype: torch.dtype):
    torch.manual_seed(0)
    matrix = torch.randn(37, 64).to(dtype)
    matrix[33] *= 50  # the largest value is not where one starts
    calls = []

    def read() -> Iterator[torch.Tensor]:
        calls.append(1)
        yield from matrix.split(5)

    compute = Nvfp4Rows(SCHEME, search, read)
    parts = [compute(matrix[start : start + 8]) for start in range(0, 37, 8)]
    whole = round_to_nearest(matrix, SCHEME, search)
    assert whole.tensor_scale is not None
    assert len(calls) == 1
    for part in parts:
        assert part.tensor_scale is not None
        assert torch.equal(part.tensor_scale, whole.tensor_scale)
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.scale for part in parts]), whole.scale)
