"""Codes as blocks of GGUF: what the library decodes is what the codes mean, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.exporters.gguf.blocks import format_of, pack, row_bytes
from compressor.passes.quantize.maths.affine import absmax_parameters
from compressor.types.layers import QuantizedTensor, Scheme

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
ROWS, COLUMNS = 3, 512
CASES: list[tuple[int, bool, int | None, str | None]] = [
    (8, True, None, "Q8_0"),
    (8, True, 64, "Q8_0"),
    (8, False, 32, None),
    (6, True, 32, "Q8_0"),
    (6, True, 256, "Q6_K"),
    (6, True, None, "Q6_K"),
    (6, False, 256, None),
    (5, True, 32, "Q5_0"),
    (5, True, 256, "Q5_0"),
    (5, False, 32, None),
    (5, False, 256, "Q5_K"),
    (5, False, None, "Q5_K"),
    (4, True, 32, "Q4_0"),
    (4, True, 128, "Q4_0"),
    (4, True, None, "Q4_0"),
    (4, True, 16, None),
    (4, False, 32, "Q4_1"),
    (4, False, 256, "Q4_K"),
    (4, False, None, "Q4_K"),
    (3, True, 32, "Q4_0"),
    (3, True, 256, "Q3_K"),
    (3, False, 64, "Q4_1"),
    (2, True, 128, "Q4_0"),
    (2, True, None, "Q2_K"),
    (2, False, 32, "Q4_1"),
    (2, False, 512, "Q2_K"),
]


def scheme_of(bits: int, symmetric: bool, group: int | None) -> Scheme:
    """Return what ``quantize-weights`` makes of these numbers for GGUF."""
    exact = symmetric or (group or COLUMNS) % 256 == 0
    return Scheme(
        bits,
        symmetric,
        signed=symmetric,
        granularity="group" if group else "channel",
        group=group,
        scale_type="float16" if exact else "float16m6",
        narrow=False,
        signed_scale=symmetric and bits < 8,
    )


def decoded(codes: QuantizedTensor, kind: Any) -> np.ndarray:
    blocks = pack(codes, kind)
    assert blocks.shape == (ROWS, row_bytes(kind, COLUMNS))
    values: np.ndarray = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return values


@pytest.mark.parametrize(("bits", "symmetric", "group", "kind"), CASES)
def test_codes_are_kept_bit_for_bit(bits, symmetric, group, kind) -> None:
    scheme = scheme_of(bits, symmetric, group)
    assert format_of(scheme, COLUMNS) == kind
    if kind is None:
        return
    torch.manual_seed(bits)
    matrix = torch.randn(ROWS, COLUMNS) + 0.3
    matrix[:, ::32] *= 4
    scale, zero = absmax_parameters(matrix, scheme)
    assert symmetric or bool((zero > 0).any())
    chosen = torch.randint(scheme.low, scheme.high + 1, matrix.shape).to(zero.dtype)
    codes = QuantizedTensor(chosen, scale, zero, scheme)
    assert np.array_equal(decoded(codes, kind), codes.dequantize().numpy())


def test_other_grids_are_in_no_block() -> None:
    def grid(element: str, scale_type: str, group: int) -> Scheme:
        return Scheme(4, True, True, "group", group, element, scale_type)  # type: ignore[arg-type]

    assert format_of(grid("e2m1", "e8m0", 32), COLUMNS) == "MXFP4"
    for other in (("e2m1", "e4m3", 32), ("e2m1", "e8m0", 64), ("e4m3", "e8m0", 32)):
        assert format_of(grid(*other), COLUMNS) is None
    by_channel = scheme_of(4, True, None)
    assert format_of(by_channel, 0) is None
    assert format_of(replace(by_channel, granularity="rows"), COLUMNS) is None
    assert str(row_bytes("Q4_0", 64)) == "36"


def test_mxfp4_is_kept_bit_for_bit() -> None:
    scheme = Scheme(4, True, True, "group", 32, "e2m1", "e8m0")
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, COLUMNS)).to(torch.uint8)
    scale = 2.0 ** torch.randint(-100, 100, (ROWS, COLUMNS // 32)).to(torch.float32)
    stored = QuantizedTensor(codes, scale, torch.zeros_like(scale), scheme)
    assert format_of(scheme, COLUMNS) == "MXFP4"
    assert np.array_equal(decoded(stored, "MXFP4"), stored.dequantize().numpy())


@given(st.floats(1e-9, 1e6), st.floats(1e-9, 1e6), st.sampled_from([2, 3, 4]))
def test_zero_point_times_scale_is_a_number_of_float16(low, high, bits) -> None:
    scheme = scheme_of(bits, False, 32)
    matrix = torch.tensor([[-low, high] * 16])
    scale, zero = absmax_parameters(matrix, scheme)
    product = zero.to(torch.float32) * scale
    limit = 65504.0
    assert bool(scale.isfinite().all())
    assert float(scale.min()) > 0
    if float(product.max()) <= limit:
        assert torch.equal(product.to(torch.float16).to(torch.float32), product)
    # A step is at most 1/64 wider than it has to be, above the least numbers of float16.
    needed = (low + high) / scheme.high
    if 2.0**-14 < needed < limit / 2:
        assert needed * (1 - 1e-6) <= float(scale) <= needed * (1 + 1 / 64)


def test_other_scales_are_refused() -> None:
    scheme = scheme_of(4, True, 32)
    codes = torch.zeros(1, 32, dtype=torch.int8)
    zero = torch.zeros(1, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="a scale is not a float16 number"):
        pack(QuantizedTensor(codes, torch.tensor([[0.1]]), zero, scheme), "Q4_0")
    asymmetric = scheme_of(4, False, 32)
    stored = QuantizedTensor(
        codes.to(torch.uint8),
        torch.tensor([[0.1]]).to(torch.float16).to(torch.float32),
        torch.tensor([[7]], dtype=torch.uint8),
        asymmetric,
    )
    with pytest.raises(ValueError, match="zero point times scale is not a float16 number"):
        pack(stored, "Q4_1")
