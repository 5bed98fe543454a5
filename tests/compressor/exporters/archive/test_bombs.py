"""Small files that say they are large: they are refused before memory is taken."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compressor.errors import ModelError
from compressor.exporters.archive.coder import CHUNK, SUM, checksum, compressed
from compressor.exporters.archive.index import MAGIC, SCHEMA, read_index
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.files import check_json_size, strict_json
from compressor.models.codec.headers import Described, layout, read_header
from compressor.models.codec.reading import read_description

_MORE = 200_000_000  # bytes that decoding may take beyond ten times the size


@contextmanager
def bounded(path: Path) -> Iterator[None]:
    """Refuse a file for what it is, with memory within the bound."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * path.stat().st_size + _MORE


def archive(path: Path, text: bytes, chunks: bytes = b"") -> Path:
    """Write an archive with an index of any text."""
    stored = compressed(text, 3)
    numbers = b"".join(len(part).to_bytes(8, "little") for part in (stored, text))
    digest = hashlib.sha256(numbers + stored).digest()
    path.write_bytes(MAGIC + chunks + stored + numbers + digest + MAGIC[::-1])
    return path


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'{"a":0}'])
def test_an_index_of_empty_lists(tmp_path: Path, item: bytes) -> None:
    items = b",".join([item] * (12_000_000 // len(item)))
    path = archive(tmp_path / "m.archive", b'{"schema":2,"files":[' + items + b"]}")
    assert path.stat().st_size < 50_000
    with bounded(path):
        read_index(path)


def test_a_chunk_of_gigabytes(tmp_path: Path) -> None:
    size = 3 << 30
    stream = compressed(bytes(1 << 20), 3)
    part = ["plain", size, [[len(stream)]], checksum(stream), ""]
    assert len(part[3]) == 2 * SUM
    file = {"name": "a", "bytes": size, "sha256": "", "header": "", "parts": [part]}
    text = json.dumps({"schema": SCHEMA, "files": [file]}).encode()
    path = archive(tmp_path / "m.archive", text, stream)
    with bounded(path):
        ArchiveFormat().unpack(path, tmp_path / "out")
    with pytest.raises(ModelError, match="'a' is not described"):
        read_index(path)


def test_files_that_would_fill_the_disk(tmp_path: Path) -> None:
    chunks = 300
    part = ["8", CHUNK, [[1]] * chunks, "0" * (2 * SUM * chunks), ""]
    size = CHUNK * chunks
    file = {"name": "a", "bytes": size, "sha256": "", "header": "", "parts": [part]}
    text = json.dumps({"schema": SCHEMA, "files": [file]}).encode()
    path = archive(tmp_path / "m.archive", text, bytes(chunks))
    with pytest.raises(ModelError, match=f"would become {size:,} bytes, from"):
        ArchiveFormat().unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("item", [b"[]", b'""', b"[[],[]]"])
def test_a_header_of_empty_lists(tmp_path: Path, item: bytes) -> None:
    text = b'{"a":[' + b",".join([item] * (12_000_000 // len(item))) + b"]}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with bounded(path):
        read_header(path)


def test_a_description_of_empty_lists(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(b'{"format":[' + b"[]," * 10_000_000 + b"[]]}")
    with bounded(path):
        read_description(path)


def test_a_header_of_many_tensors_is_no_bomb() -> None:
    names = [
        f"model.layers.{i // 100}.mlp.experts.{i % 100}.down_proj.weight" for i in range(30_000)
    ]
    header = layout([Described(name, "U8", (16, 4), 8, 64) for name in names], {}).header
    check_json_size(header[8:])
    assert len(strict_json(header[8:], "header", "cannot be read")) == len(names) + 1
