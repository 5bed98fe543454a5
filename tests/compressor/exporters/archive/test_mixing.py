"""Bits whose contexts are mixed: they come back, on any machine, and take few bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import ModelError
from compressor.exporters.archive.coder import (
    CHUNK,
    SUM,
    checksum,
    coded_text,
    decode,
    decoded_text,
    encode,
)
from compressor.exporters.archive.contexts import (
    MOST_BYTES,
    MOST_SYMBOLS,
    coded_bytes,
    coded_symbols,
    read_bytes,
    read_symbols,
)
from compressor.exporters.archive.exporter import pack
from compressor.exporters.archive.forms import Form, entropy
from compressor.exporters.archive.index import SCHEMA, read_index
from compressor.exporters.archive.mixing import _SQUASH, STRETCH, BitReader, BitWriter
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.files import json_text
from compressor.models.codec.bit_stream import pack_bits
from compressor.types.tensors import Array
from tests.compressor.exporters.archive.packed_files import rng, write_safetensors
from tests.compressor.exporters.archive.test_bombs import archive as written


def sparse(rows: int, columns: int, *, seed: int = 0) -> Array:
    """Return codes of 3 bits, of which rows and columns have different shares of zeros."""
    draw = np.random.default_rng(seed)
    share = draw.random((rows, 1)) ** 3 * draw.random((1, columns)) ** 3
    codes = np.clip(draw.normal(3.5, 1, (rows, columns)).round(), 0, 7).astype(np.uint8)
    return np.where(draw.random((rows, columns)) < share, codes, np.uint8(3)).astype(np.uint8)


def test_tables_are_logits_and_their_inverse() -> None:
    for place in range(0, 65536, 997):
        share = (place + 0.5) / 65536
        assert STRETCH[place] == pytest.approx(math.log(share / (1 - share)), abs=1e-12)
    for place in range(0, len(_SQUASH), 97):
        assert _SQUASH[place] == pytest.approx(1 / (1 + math.exp(12 - place / 256)), abs=1e-11)


@given(st.lists(st.tuples(st.floats(1e-5, 1 - 1e-5), st.integers(0, 1)), max_size=300))
def test_bits_come_back(bits: list[tuple[float, int]]) -> None:
    writer = BitWriter()
    for share, bit in bits:
        assert writer.code(share, bit) == bit
    data = writer.finished()
    reader = BitReader(data)
    assert [reader.code(share) for share, _ in bits] == [bit for _, bit in bits]
    ideal = sum(-math.log2(share if bit else 1 - share) for share, bit in bits) / 8
    assert len(data) <= ideal * 1.001 + 2


@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([1, 3]),
    st.binary(max_size=90),
)
def test_symbols_come_back(bits: int, groups: int, kernel: int, data: bytes) -> None:
    symbols = np.frombuffer(data, np.uint8) % (1 << bits)
    columns = groups * kernel
    coded = coded_symbols(symbols, bits, columns, kernel)
    assert np.array_equal(read_symbols(coded, symbols.size, bits, columns, kernel), symbols)


@given(st.binary(max_size=80), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_bytes_come_back(data: bytes, width: int) -> None:
    assert read_bytes(coded_bytes(data, width), len(data), width) == data


@given(st.binary(max_size=60), st.integers(0, 30))
def test_any_bytes_are_some_symbols(data: bytes, count: int) -> None:
    assert read_symbols(data, count, 3, 6, 3).size == count
    assert len(read_bytes(data, count, 4)) == count


def test_the_same_bytes_on_any_machine() -> None:
    """They were written down once: others would be unreadable elsewhere."""
    codes = sparse(40, 30)
    assert checksum(coded_symbols(codes.ravel(), 3, 30, 1)) == GOLDEN[0]
    text = b'{"format":"compressor","schema":1,"inputs":[{"name":"image"}]}' * 2
    assert checksum(coded_bytes(text, 1)) == GOLDEN[1]
    floats = np.repeat(np.arange(9, dtype=np.float32) / 8, 5).tobytes()
    assert checksum(coded_bytes(floats, 4)) == GOLDEN[2]


GOLDEN = ("70bd2460", "a18d7c9a", "03ca6aa6")


def test_rows_and_columns_say_more_than_the_entropy() -> None:
    codes = sparse(120, 100)
    coded = coded_symbols(codes.ravel(), 3, 100, 1)
    assert len(coded) < 0.9 * entropy(codes.ravel())


def test_what_is_known_from_the_start_is_short() -> None:
    text = b'"opType":"Conv","attribute":[{"name":"auto_pad","s":"Tk9UU0VU","type":"STRING"}'
    assert len(coded_bytes(text, 1)) < len(text) / 6


def test_texts_come_back_in_any_coder() -> None:
    text = b'{"name":"fc1.weight","shape":[500,800]}'
    for mixed in (True, False):
        coded = coded_text(text, 9, mixed=mixed)
        assert decoded_text(coded, len(text)) == text
    assert len(coded_text(text, 9, mixed=True)) < len(coded_text(text, 9, mixed=False))
    assert coded_text(text * 2000, 9, mixed=True) == coded_text(text * 2000, 9, mixed=False)
    with pytest.raises(ValueError, match="a mixed text has"):
        decoded_text(b"\2abc", MOST_BYTES + 1)


def test_chunks_are_no_longer_than_any_that_is_written() -> None:
    form = Form(3, mixed=True, columns=10, kernel=1)
    assert form.fits(MOST_SYMBOLS * 3 // 8 - 100)
    with pytest.raises(ValueError, match="a mixed chunk has"):
        decode(memoryview(b""), [0], form, MOST_SYMBOLS)
    with pytest.raises(ValueError, match="a mixed chunk has"):
        decode(memoryview(b""), [0], Form(32, mixed=True), MOST_BYTES + 4)
    with pytest.raises(ValueError, match="too many streams"):
        decode(memoryview(b""), [0, 0], form, 30)
    coded = encode(np.zeros(30, np.uint8), form, 9)
    assert not decode(memoryview(coded.data), coded.lengths, form, 30).any()


@pytest.mark.parametrize(
    "name",
    [
        "3-mixed",
        "3-mixed-0-1",
        "3-mixed-10-3",
        "9-mixed-2-1",
        "3-mixed-2",
        "32-mixed-2-1",
        "3-mixed--1",
        "3-mixed-2-",
        "3-mixed-a-1",
    ],
)
def test_names_of_no_form(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no form"):
        Form.named(name)


def files(folder: Path, codes: Array, bits: int = 3) -> list[Path]:
    """Write a network of one layer as the safetensors exporter does."""
    packed = pack_bits(torch.from_numpy(codes.ravel()), bits).numpy()
    bias = np.where(rng().random(60) < 0.7, 0, 0.375).astype(np.float32)
    tensors = {"fc.bias": ("F32", bias), "fc.weight": ("U8", packed)}
    entry = {"dtype": "uint4", "shape": list(codes.shape)}
    entry |= {"packed": 2} if bits == 4 else {"form": "bits", "bits": bits}
    document = {"format": "compressor", "tensors": {"fc.weight": entry}}
    description = folder / "model.json"
    description.write_text(json_text(document))
    return [write_safetensors(folder / "model.safetensors", tensors), description]


@pytest.mark.parametrize("bits", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_sparse_network_is_mixed_with_all_beside_it(tmp_path: Path, bits: int) -> None:
    given = files(tmp_path, sparse(120, 100), bits)
    path = tmp_path / "model.archive"
    pack(given, path, 9, lambda _: None, contexts=True)
    forms = {p.section.name: str(p.form) for f in read_index(path) for p in f.parts}
    expected = {"fc.weight": f"{bits}-mixed-100-1", "fc.bias": "32-mixed", "model.json": "8-mixed"}
    assert forms == expected
    out = tmp_path / "out"
    ArchiveFormat().unpack(path, out)
    assert all((out / one.name).read_bytes() == one.read_bytes() for one in given)
    alone = tmp_path / "alone"
    ArchiveFormat().unpack(path, alone, ("fc.bias",))
    data = bytearray(path.read_bytes())
    (chunk,) = (c for f in read_index(path) for p in f.parts for c in p.chunks if p.form.columns)
    data[chunk.start + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor 'fc\.weight'"):
        ArchiveFormat().unpack(path, tmp_path / "damaged")


def test_an_archive_that_would_take_minutes_is_refused(tmp_path: Path) -> None:
    size = MOST_SYMBOLS // 8
    file = {"name": "a", "bytes": size, "sha256": "", "header": ""}
    parts = [["1-mixed-8-1", CHUNK, [[1]], "0" * 2 * SUM, ""]]
    documents = [{**file, "name": name, "parts": parts} for name in ("a", "b")]
    path = described(tmp_path / "one.archive", documents[:1])
    assert read_index(path)[0].parts[0].form.mixed
    path = described(tmp_path / "two.archive", documents)
    with pytest.raises(ModelError, match="codes and 0 bytes are mixed"):
        read_index(path)


def described(path: Path, entries: list[dict[str, object]]) -> Path:
    """Write an archive with an index that somebody made, and a byte for each file."""
    text = json.dumps({"schema": SCHEMA, "files": entries}).encode()
    return written(path, text, bytes(len(entries)))


def test_contexts_have_to_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.archive"
    pack(files(tmp_path, sparse(120, 100), 4), path, 9, lambda _: None)
    assert not any(part.form.mixed for file in read_index(path) for part in file.parts)


def test_a_dense_network_is_not(tmp_path: Path) -> None:
    codes = rng().integers(0, 8, (120, 100)).astype(np.uint8)
    path = tmp_path / "model.archive"
    pack(files(tmp_path, codes), path, 9, lambda _: None, contexts=True)
    assert not any(part.form.mixed for file in read_index(path) for part in file.parts)
