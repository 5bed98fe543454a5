"""Forms of tensors: each can be undone to the bit, and the best is near the entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.exporters.archive.coder import compressed, decode, decompressed, encode
from compressor.exporters.archive.contexts import MOST_BYTES, MOST_SYMBOLS
from compressor.exporters.archive.forms import _NAMES, Form, Reader, candidates, entropy
from compressor.models.codec.bit_stream import pack_bits
from tests.compressor.exporters.archive.packed_files import rng

FORMS = list(_NAMES.values())
DATA = st.binary(max_size=70) | st.binary(max_size=9).map(lambda b: b * 40)
EVEN = DATA.map(lambda b: b[: len(b) // 8 * 8])


@given(EVEN, st.sampled_from(FORMS), st.sampled_from([1, 9]), st.booleans())
def test_every_form_can_be_undone(data, form, level, small):
    array = np.frombuffer(data, np.uint8)
    coded = encode(array, form, level, small=small)
    assert sum(coded.lengths) == len(coded.data)
    found = decode(memoryview(coded.data), coded.lengths, Form.named(str(form)), array.size)
    assert found.tobytes() == data


@given(DATA, st.sampled_from([f for f in FORMS if f.bits <= 8]))
def test_narrow_symbols_need_no_whole_number_of_bytes(data, form):
    array = np.frombuffer(data, np.uint8)
    coded = encode(array, form, 1)
    assert decode(memoryview(coded.data), coded.lengths, form, array.size).tobytes() == data


@given(st.binary(max_size=40), st.sampled_from(FORMS), st.lists(st.integers(0, 20), max_size=4))
def test_what_is_no_chunk_is_refused(data, form, lengths):
    lengths = [min(n, len(data)) for n in lengths]
    try:
        found = decode(memoryview(data), lengths, form, 16)
    except ValueError:
        return
    assert found.size == 16


@given(st.binary(max_size=60), st.integers(1, 60))
def test_coded_bytes_come_back_or_are_refused(data, most):
    coded = compressed(data, 3, small=True)
    if len(data) <= most:
        assert decompressed(coded, most) == data
    else:
        with pytest.raises(ValueError, match=r".+"):
            decompressed(coded, most)
    for first in (0, 1, 2, 3):
        try:
            assert len(decompressed(bytes([first]) + data, most)) <= max(most, 1)
        except ValueError:
            continue


def test_gaps_beyond_the_end_are_refused() -> None:
    coded = encode(np.array([0] * 40 + [7] + [0] * 7, np.uint8), Form(8, "gaps"), 1)
    with pytest.raises(ValueError, match=r"beyond the end|bytes"):
        decode(memoryview(coded.data), coded.lengths, Form(8, "gaps"), 24)


def test_names_tell_forms_apart() -> None:
    assert len(_NAMES) == len(set(FORMS))
    with pytest.raises(ValueError, match="there is no form 'zip'"):
        Form.named("zip")


MIXED = [
    *(Form(bits, mixed=True) for bits in (8, 16, 32, 64)),
    *(Form(bits, mixed=True, columns=6, kernel=3) for bits in range(1, 8)),
    Form(8, mixed=True, columns=5, kernel=1),
]


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=24), st.sampled_from(MIXED))
def test_mixed_forms_are_undone(data, form):
    """Of any number of bytes, whether they hold whole symbols or not."""
    stream = form.mixed_stream(np.frombuffer(data, np.uint8))
    assert form.mixed_chunk(stream, len(data)).tobytes() == data


def test_mixed_forms_have_names() -> None:
    assert [Form.named(str(form)) for form in MIXED] == MIXED


@pytest.mark.parametrize(
    ("form", "most"),
    [
        (Form(8, mixed=True), MOST_BYTES),
        (Form(8, mixed=True, columns=64, kernel=1), MOST_SYMBOLS - 64),
        (Form(4, mixed=True, columns=64, kernel=2), (MOST_SYMBOLS - 64) // 2),
        (Form(3, mixed=True, columns=48, kernel=1), (MOST_SYMBOLS // 48 - 1) * 48 * 3 // 8),
    ],
    ids=str,
)
def test_as_many_symbols_are_mixed_as_there_may_be(form: Form, most: int) -> None:
    """A matrix has whole rows, and one more."""
    assert form.fits(most)
    assert not form.fits(most + 1)


def best(data: np.ndarray, width: int = 1, floating: bool = False) -> tuple[int, Form]:
    forms = candidates(data, width, floating=floating)
    sizes = [len(encode(data, form, 9).data) for form in forms]
    return min(sizes), forms[sizes.index(min(sizes))]


@pytest.mark.parametrize(
    "bits", [2, 4, 8, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (3, 5, 6, 7))]
)
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.8, 0.95])
def test_codes_come_within_three_percent_of_their_entropy(bits: int, zeros: float) -> None:
    draw, count = rng(), 400_000
    high = 2**bits - 1
    codes = np.clip(np.round(draw.normal(high / 2, high / 6, count)), 0, high).astype(np.uint8)
    codes[draw.random(count) < zeros] = high // 2
    data = pack_bits(torch.from_numpy(codes), bits).numpy()
    size, form = best(data)
    assert size <= 1.03 * entropy(codes), form


def test_entropy_is_that_of_shannon() -> None:
    assert entropy(np.array([0, 1] * 400, np.uint8)) == pytest.approx(100)
    assert entropy(np.array([0b00011011] * 100, np.uint8), bits=2) == pytest.approx(100)
    assert entropy(np.zeros(100, np.uint8)) == 0


@pytest.mark.parametrize(
    ("dtype", "share"), [(np.float32, 0.86), (np.float16, 0.95), (np.float64, 0.97)]
)
def test_exponents_of_floats_are_regular(dtype: type, share: float) -> None:
    values = (0.02 * rng().standard_normal(50_000)).astype(dtype)
    size, form = best(values.view(np.uint8), values.itemsize, True)
    assert form.bits == 8 * values.itemsize
    assert size < share * values.nbytes


def test_zeros_of_floats_cost_a_bit_at_most() -> None:
    values = rng().standard_normal(50_000).astype(np.float32)
    values[rng().random(50_000) < 0.7] = 0
    size, form = best(values.view(np.uint8), 4, True)
    assert form.sparse
    assert size < np.count_nonzero(values) * 3.7 + values.size / 8


def names(data: np.ndarray, width: int = 1, floating: bool = False) -> list[str]:
    return [str(form) for form in candidates(data, width, floating=floating)]


def test_forms_of_wide_elements() -> None:
    data = np.zeros(64, np.uint8)
    assert names(data, 2) == ["8", "16", "16-mask", "16-gaps"]
    turned = ["32-turned", "32-mask-turned", "32-gaps-turned"]
    assert names(data, 4, True) == ["8", *turned, "32", "32-mask", "32-gaps"]


@pytest.mark.parametrize(
    ("bits", "two"), [(0, [1, 2]), (2, [4, 6]), (3, [3, 6]), (5, [5, 7]), (7, [6, 7])]
)
def test_forms_of_the_two_widths_that_code_best(bits: int, two: list[int]) -> None:
    codes = rng().choice(4, 8000, p=[0.7, 0.2, 0.05, 0.05]).astype(np.uint8) + (1 << bits) // 2
    data = pack_bits(torch.from_numpy(codes), bits).numpy() if bits else np.zeros(50, np.uint8)
    sizes = {width: entropy(data, width) for width in range(1, 8)}
    assert two == sorted(sorted(sizes, key=sizes.__getitem__)[:2])
    expected = ["8", "8-mask", "8-gaps"]
    for width in two:
        plain = ["3"] if width == 3 else []
        mask, gaps = ([f"{width}-{way}", f"{width}-{way}-apart"] for way in ("mask", "gaps"))
        expected += [*plain, f"{width}-apart", *mask, *gaps]
    assert names(data) == expected


def test_the_most_common_symbol_is_left_out() -> None:
    data = np.full(1300, 9, np.uint8)
    data[[0, 2, 258, 514, 1299]] = [1, 2, 3, 4, 5]
    head, mask, values = Form(8, "mask").streams(data)
    assert (head.tolist(), values.tolist()) == ([9], [1, 2, 3, 4, 5])
    assert np.flatnonzero(np.unpackbits(mask)).tolist() == [0, 2, 258, 514, 1299]
    head, gaps, values = Form(8, "gaps").streams(data)
    assert (head.tolist(), values.tolist()) == ([9], [1, 2, 3, 4, 5])
    # 255 stands for as many that are left out, and a gap of 255 needs a zero after it.
    assert gaps.tolist() == [0, 1, 255, 0, 255, 0, 255, 255, 255, 19]
    _, gaps, values = Form(8, "gaps").streams(np.full(7, 9, np.uint8))
    assert (gaps.size, values.size) == (0, 0)


def test_of_wide_symbols_zero_is_left_out() -> None:
    data = np.array([7, 7, 7, 0], np.uint16).view(np.uint8)
    head, _, low, high = Form(16, "mask").streams(data)
    assert (head.tolist(), low.tolist(), high.tolist()) == ([0, 0], [7] * 3, [0] * 3)


def test_a_place_just_beyond_the_end_is_refused() -> None:
    for place, fits in ((23, True), (24, False)):
        reader = Reader(Form(8, "gaps"), 24)
        reader.give(np.zeros(1, np.uint8))
        if fits:
            reader.give(np.array([place], np.uint8))
            continue
        with pytest.raises(ValueError, match="beyond the end"):
            reader.give(np.array([place], np.uint8))


def test_entropy_of_symbols_that_come_once_or_never() -> None:
    assert entropy(np.arange(256).astype(np.uint8)) == pytest.approx(256)
    assert entropy(np.array([3], np.uint8)) == 0
    assert entropy(np.zeros(0, np.uint8)) == 0


def test_bits_of_a_mask_behind_the_last_symbol_are_left_out() -> None:
    reader = Reader(Form(8, "mask"), 5)
    reader.give(np.zeros(1, np.uint8))
    reader.give(np.array([0b01010111], np.uint8))
    assert reader.next_length == 2


def test_the_length_of_gaps_alone_is_not_known() -> None:
    lengths = [Form(8, way).of_any_length(place) for way in ("mask", "gaps") for place in (0, 1, 2)]
    assert lengths == [False, False, False, False, True, False]
