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


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_more_than_is_worked_on_at_once(bits: int, signed: bool) -> None:
    codes = (torch.arange(2_300_001) * 7 % (1 << bits)).to(torch.uint8)
    codes = codes.view(torch.int8) - (1 << bits - 1) if signed else codes
    stream = pack_bits(codes, bits, biased=signed)
    assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, len(codes), signed), codes)
    # Blocks of 8 codes are whole bytes.
    parts = [pack_bits(part, bits, biased=signed) for part in codes.split(80_000)]
    assert torch.equal(torch.cat(parts), stream)


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 99))
def test_biased_codes_have_their_highest_bit_flipped(bits: int, count: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (count,), generator=source).to(torch.uint8)
    plain = pack_bits(codes ^ (1 << bits - 1), bits)
    biased = pack_bits(codes, bits, biased=True)
    whole = count * bits // 8
    assert torch.equal(biased[:whole], plain[:whole])
    assert torch.equal(unpack_bits(biased, bits, count), unpack_bits(plain, bits, count))


def test_high_bits_of_bytes_are_left_out() -> None:
    codes = torch.arange(240, 256).to(torch.uint8)
    for bits in range(1, 9):
        kept = codes & (1 << bits) - 1
        assert torch.equal(pack_bits(codes, bits), pack_bits(kept, bits))
