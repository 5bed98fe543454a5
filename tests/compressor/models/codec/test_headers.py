"""The header of a safetensors file, whole and damaged; the library itself is the oracle."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from compressor.errors import ModelError
from compressor.models.codec.headers import (
    DTYPES,
    LONGEST_HEADER,
    STORED_AS,
    ShardHeader,
    read_header,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    NAMES.filter(lambda n: n != "__metadata__"),
    st.tuples(SHAPES, st.sampled_from(sorted(DTYPES))),
    max_size=5,
)
ONE_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def made(wanted: dict[str, tuple[tuple[int, ...], str]]) -> bytes:
    tensors = {
        name: torch.zeros(int(np.prod(shape)) * DTYPES[dtype].itemsize, dtype=torch.uint8)
        .view(DTYPES[dtype])
        .reshape(shape)
        for name, (shape, dtype) in wanted.items()
        if dtype != "C64" or shape
    }
    return save(tensors, {"format": "pt"})


def library(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Read a header with the safetensors library; ``None`` if it refuses the file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError):
        return None


def described(header: ShardHeader) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (t.dtype, t.shape) for name, t in header.tensors.items()}


@ONE_FILE
@given(wanted=TENSORS)
def test_files_of_the_library_parse_to_the_same(
    tmp_path: Path, wanted: dict[str, tuple[tuple[int, ...], str]]
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(made(wanted))
    header = read_header(path)
    assert described(header) == library(path)
    assert header.nbytes == path.stat().st_size
    assert dict(header.metadata) == {"format": "pt"}
    places = [(t.offset, t.offset + t.nbytes) for t in header.tensors.values()]
    assert all(start <= stop <= header.nbytes for start, stop in places)
    assert [a for _, a in places[:-1]] == [b for b, _ in places[1:]]


@settings(ONE_FILE, max_examples=200)
@given(
    wanted=TENSORS,
    where=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    kind=st.sampled_from(["replace", "insert", "delete", "cut", "append"]),
)
def test_damage_is_refused_or_harmless(
    tmp_path: Path,
    wanted: dict[str, tuple[tuple[int, ...], str]],
    where: int,
    byte: int,
    kind: str,
) -> None:
    content = bytearray(made(wanted))
    at = where % len(content)
    length = 8 + int.from_bytes(content[:8], "little")
    assume(at < length or kind in ("cut", "append"))
    if kind == "replace":
        content[at] = byte
    elif kind == "insert":
        content.insert(at, byte)
    elif kind == "delete":
        del content[at]
    elif kind == "cut":
        del content[at:]
    else:
        content.append(byte)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except ModelError:
        return
    # What we take the library takes, and understands alike.
    assert described(header) == library(path)


@settings(ONE_FILE, max_examples=150)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    ),
    place=st.sampled_from(["whole", "tensor", "dtype", "shape", "data_offsets", "__metadata__"]),
)
def test_any_json_in_any_place_is_refused_or_understood(
    tmp_path: Path, value: Any, place: str
) -> None:
    header: Any = {"w": entry()}
    if place == "whole":
        header = value
    elif place in ("tensor", "__metadata__"):
        header["w" if place == "tensor" else place] = value
    else:
        header["w"][place] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(header, bytes(8)))
    try:
        found = read_header(path)
    except ModelError:
        return
    assert described(found) == library(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (struct.pack("<Q", 2 << 30) + b"{}", "its header would be 2,147,483,648 bytes long"),
        (struct.pack("<Q", LONGEST_HEADER + 1), "100,000,000 are allowed"),
        (struct.pack("<Q", 1 << 63), "its header would be"),
        (struct.pack("<Q", 50) + b"{}", "its header has 50 bytes, the whole file 10"),
        (file_of(b'{"w": {}, "w": {}}'), "it names 'w' twice"),
        (file_of(b'{"w": {"dtype": "F32", "dtype": "F32"}}'), "it names 'dtype' twice"),
        (file_of(b'{"w": NaN}'), "NaN is not JSON"),
        (file_of(b'{"w": '), "Expecting value"),
        (file_of(b'{"\xff": 1}'), "invalid start byte"),
        (file_of(b'{"\\ud800": 1}'), "surrogates not allowed"),
        (file_of(b"[" * 100_000), "recursion"),
        (file_of(b"[1]"), "its header is not a JSON object"),
        (file_of(b' {"w": 1}'), "its header is not a JSON object"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__ is not a mapping"),
        (file_of({"__metadata__": []}), "__metadata__ is not a mapping"),
        (file_of({"w": [1]}), "'w' is not described by dtype, shape and data_offsets"),
        (file_of({"w": {"dtype": "F32"}}), "'w' is not described by"),
        (file_of({"w": entry("F33")}, bytes(8)), "'w' has the unknown dtype 'F33'; cast it to"),
        (file_of({"w": entry(shape=[-2])}, bytes(8)), "'w' has the shape [-2]"),
        (file_of({"w": entry(shape=[2.0])}, bytes(8)), "'w' has the shape [2.0]"),
        (file_of({"w": entry(shape=[True, 2])}, bytes(8)), "'w' has the shape [True, 2]"),
        (file_of({"w": entry(shape=2)}, bytes(8)), "'w' has the shape 2"),
        (file_of({"w": entry(shape=[1] * 65, offsets=[0, 4])}, bytes(4)), "'w' has the shape [1,"),
        (file_of({"w": entry(shape=[1 << 62] * 8)}, bytes(8)), "'w' has 8 bytes"),
        (file_of({"w": entry(offsets=[8, 0])}, bytes(8)), "'w' has the offsets [8, 0]"),
        (file_of({"w": entry(offsets=[0])}, bytes(8)), "'w' has the offsets [0]"),
        (file_of({"w": entry(offsets=[-8, 0])}, bytes(8)), "'w' has the offsets [-8, 0]"),
        (file_of({"w": entry(shape=[3])}, bytes(8)), "'w' has 8 bytes, F32[3] takes 12"),
        (
            file_of({"v": entry(), "w": entry(offsets=[4, 12])}, bytes(12)),
            "'w' overlaps what lies before it: it starts at byte 4 of the data, not at 8",
        ),
        (
            file_of({"v": entry(), "w": entry(offsets=[9, 17])}, bytes(17)),
            "'w' leaves a hole: it starts at byte 9 of the data, not at 8",
        ),
        (file_of({"v": entry(), "w": entry()}, bytes(8)), "overlaps what lies before it"),
        (file_of({"w": entry()}, bytes(7)), "describes 8 bytes of data, it has 7"),
        (file_of({"w": entry()}, bytes(9)), "describes 8 bytes of data, it has 9"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
)
def test_messages(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_long_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 2 << 30))
        stream.truncate(4 << 30)  # sparse: the header would fit
    with pytest.raises(ModelError, match=r"its header would be 2,147,483,648 bytes long"):
        read_header(path)


def test_pairs_of_small_floats_count_as_elements(tmp_path: Path) -> None:
    packed = torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_file({"w": packed}, tmp_path / "m.safetensors")
    header = read_header(tmp_path / "m.safetensors").tensors["w"]
    assert (header.dtype, header.shape, header.nbytes) == ("F4", (3, 4), 6)


def test_every_name_of_a_dtype_goes_both_ways() -> None:
    assert all(STORED_AS[dtype] == name for name, dtype in DTYPES.items())
