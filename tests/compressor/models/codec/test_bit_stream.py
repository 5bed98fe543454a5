"""Codes of a few bits as bytes, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.models.codec.bit_stream import pack_bits, stream_bytes, unpack_bits


@given(st.integers(1, 8), st.booleans(), st.integers(0, 100), st.integers(0, 2**32))
def test_codes_come_back(bits: int, signed: bool, count: int, seed: int) -> None:
    low = -(1 << bits - 1) if signed else 0
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, low + (1 << bits), (count,), generator=source)
    codes = codes.to(torch.int8 if signed else torch.uint8)
    stream = pack_bits(codes, bits)
    assert (stream.dtype, tuple(stream.shape)) == (torch.uint8, (stream_bytes(count, bits),))
    again = unpack_bits(stream, bits, count, signed)
    assert again.dtype == codes.dtype
    assert torch.equal(again, codes)
    # As docs/safetensors-format.md has it: one long binary number, the first code lowest.
    number = sum((int(code) & (1 << bits) - 1) << index * bits for index, code in enumerate(codes))
    assert bytes(stream.numpy()) == number.to_bytes(stream_bytes(count, bits), "little")


@pytest.mark.parametrize("bits", [3, 4])
def test_more_than_is_worked_on_at_once(bits: int) -> None:
    codes = (torch.arange(3_000_001) * 7 % (1 << bits)).to(torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, len(codes)), codes)
