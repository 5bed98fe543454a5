"""Streams of bits: round trips, and the same bits as compressed-tensors' own packing."""

from __future__ import annotations

from math import gcd
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.models.codec import bit_stream as packing
from compressor.types.layers import E2M1_VALUES

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 131))


def unpack_words(words: torch.Tensor, bits: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Invert ``pack_words``, the way a reader does."""
    rows = words.shape[0]
    missing = -words.shape[1] % (bits // gcd(32, bits))
    if missing:
        words = torch.nn.functional.pad(words, (0, missing))
    padded = words.shape[1] * 32 // bits
    codes = packing.unpack_bits(words.contiguous().view(torch.uint8), bits, rows * padded)
    codes = codes.view(rows, padded)[:, :columns]
    if dtype == torch.int8:
        codes = codes.view(torch.int8) - (1 << (bits - 1))  # wraps around, as signed bytes do
    return codes.contiguous()


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Invert ``pack_nibbles``."""
    count = 2 * packed.numel()
    return packing.unpack_bits(packed, 4, count).view(packed.shape[0], 2 * packed.shape[1])


def signed(rows: int, columns: int, bits: int, seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    return torch.randint(low, high, (rows, columns), dtype=torch.int8, generator=numbers)


def unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


@pytest.mark.parametrize("bits", packing.BITS)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_words_round_trip(bits: int, shape: tuple[int, int], seed: int) -> None:
    codes = signed(*shape, bits, seed)
    words = packing.pack_words(codes, bits)
    assert words.shape == (shape[0], packing.packed_columns(shape[1], bits))
    assert torch.equal(unpack_words(words, bits, shape[1], torch.int8), codes)
    plain = unsigned(codes, bits)
    assert torch.equal(packing.pack_words(plain, bits), words)
    assert torch.equal(unpack_words(words, bits, shape[1], torch.uint8), plain)


@pytest.mark.parametrize("bits", packing.BITS)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_words_are_those_of_compressed_tensors(
    bits: int, shape: tuple[int, int], seed: int
) -> None:
    theirs: Any = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="compressed-tensors"
    )
    codes = signed(*shape, bits, seed)
    words = packing.pack_words(codes, bits)
    assert torch.equal(words, theirs.pack_to_int32(codes, bits))
    assert torch.equal(theirs.unpack_from_int32(words, bits, codes.shape), codes)
    down = packing.pack_words_down(codes, bits)
    assert torch.equal(down, theirs.pack_to_int32(codes, bits, packed_dim=0))
    assert down.is_contiguous()


@pytest.mark.parametrize("bits", packing.BITS)
@pytest.mark.parametrize("columns", [1, 5])
def test_columns_are_packed_as_rows_are(bits: int, columns: int) -> None:
    codes = signed(37, columns, bits, 0)
    down = packing.pack_words_down(codes, bits)
    assert torch.equal(down.T, packing.pack_words(codes.T, bits))
    assert down.stride() == (columns, 1)


@given(rows=st.integers(1, 9), pairs=st.integers(1, 65), seed=st.integers(0, 2**16))
def test_nibbles_are_those_of_compressed_tensors(rows: int, pairs: int, seed: int) -> None:
    theirs: Any = pytest.importorskip(
        "compressed_tensors.compressors.nvfp4.helpers", reason="compressed-tensors"
    )
    codes = unsigned(signed(rows, 2 * pairs, 4, seed), 4)
    packed = packing.pack_nibbles(codes)
    assert torch.equal(unpack_nibbles(packed), codes)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    assert torch.equal(packed, theirs.pack_fp4_to_uint8(table[codes.long()]))


@pytest.mark.parametrize("bits", packing.BITS)
def test_more_than_one_chunk(bits: int) -> None:
    codes = signed(3, 160_000, bits, 5)
    words = packing.pack_words(codes, bits)
    assert torch.equal(unpack_words(words, bits, 160_000, torch.int8), codes)
    for row in range(3):  # a row does not depend on what stands before it
        assert torch.equal(packing.pack_words(codes[row : row + 1], bits)[0], words[row])


def test_a_view_is_packed_as_its_copy_and_left_alone() -> None:
    codes = signed(64, 40, 4, 1)
    before = codes.clone()
    view = codes[8:40, 8:32]
    assert torch.equal(packing.pack_words(view, 4), packing.pack_words(view.clone(), 4))
    assert torch.equal(packing.pack_words(codes.T, 8), packing.pack_words(codes.T.contiguous(), 8))
    packing.pack_words(codes, 8)
    assert torch.equal(codes, before)


def test_bits_by_hand() -> None:
    codes = torch.tensor([[-8, 7, 0, 1]], dtype=torch.int8)
    # Biased by 8: 0, 15, 8, 9, the lowest bits first.
    assert packing.pack_words(codes, 4).tolist() == [[0x98F0]]
    three = torch.tensor([[3, -4, 1]], dtype=torch.int8)  # 7, 0, 5
    assert packing.pack_words(three, 3).tolist() == [[7 | 0 << 3 | 5 << 6]]
    assert packing.pack_nibbles(torch.tensor([[1, 15]], dtype=torch.uint8)).tolist() == [[0xF1]]


def test_an_odd_number_of_nibbles_is_refused() -> None:
    with pytest.raises(ValueError, match="3 columns"):
        packing.pack_nibbles(torch.zeros((2, 3), dtype=torch.uint8))


def test_no_codes_at_all() -> None:
    empty = torch.zeros((0, 8), dtype=torch.int8)
    assert packing.pack_words(empty, 4).shape == (0, 1)
    assert packing.pack_nibbles(empty.view(torch.uint8)).shape == (0, 4)
