"""Damaged archives and those of others are refused, and what is lost is named."""

from __future__ import annotations

import re
from pathlib import Path

import brotli
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compressor.exporters.archive.exporter as packing
from compressor.errors import CompressorError, ModelError, SpecError
from compressor.exporters.archive.index import PackedFile, index_bytes, read_index
from compressor.exporters.archive.unpacking import ArchiveFormat
from tests.compressor.exporters.archive.packed_files import (
    packed,
    rng,
    unpack,
    write_safetensors,
)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_damage_names_the_first_tensor_that_is_lost(
    share: float, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are not: they were decoded before the damage, or in a stream of their own."""
    if large:
        monkeypatch.setattr(packing, "_SMALL", 0)
    draw = np.random.default_rng(4)
    codes = {f"w{n}": ("I8", draw.normal(0, 20, 3000).astype(np.int8)) for n in range(10)}
    content = write_safetensors(tmp_path / "model.safetensors", codes)
    path = packed([content], tmp_path / "model.archive")
    (part,) = read_index(path)[0].parts
    damaged = bytearray(path.read_bytes())
    damaged[part.chunks[0].start + int(share * part.stored)] ^= 16
    path.write_bytes(damaged)
    with pytest.raises(ModelError) as caught:
        unpack(path, tmp_path / "again")
    named = re.search(r"tensor 'w(\d)'", str(caught.value))
    assert named is not None
    quarter = 2.5  # of ten tensors: Zstandard has four streams in a block, each read from its end
    assert int(named[1]) - 10 * share == pytest.approx(-0.5, abs=quarter if large else 0.6)


def test_all_damaged_tensors_are_listed(tmp_path: Path) -> None:
    values = rng().standard_normal((3, 10_000)).astype(np.float32)
    tensors = {f"w{n}": ("F32", value) for n, value in enumerate(values)}
    content = write_safetensors(tmp_path / "w.safetensors", tensors)
    path = packed([content], tmp_path / "w.archive", level=1)
    assert ArchiveFormat().damaged_tensors(path) == ()
    chunks = {part.section.name: part.chunks[-1] for part in read_index(path)[0].parts}
    assert sorted(chunks) == ["w0", "w1", "w2"]
    data = bytearray(path.read_bytes())
    for name in ("w0", "w2"):
        data[chunks[name].start] ^= 1
    path.write_bytes(data)
    assert sorted(ArchiveFormat().damaged_tensors(path)) == ["w0", "w2"]
    path.write_bytes(data[:-1])  # where they lie is not known any more
    assert ArchiveFormat().damaged_tensors(path) == ()


@pytest.mark.parametrize(("wide", "first"), [(False, "w[23]"), (True, "w5")])
def test_damage_in_what_zstandard_coded(
    wide: bool, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of it lie side by side in a block; a plane that is stored as it was is exact."""
    monkeypatch.setattr(brotli, "compress", lambda plain, **_: plain + b"longer")
    draw = np.random.default_rng(4)
    values = draw.normal(0, 9, (10, 1000)).astype(np.float32 if wide else np.int8)
    tensors = {f"w{n}": ("F32" if wide else "I8", values[n]) for n in range(10)}
    content = write_safetensors(tmp_path / "model.safetensors", tensors)
    path = packed([content], tmp_path / "model.archive")
    (part,) = read_index(path)[0].parts
    damaged = bytearray(path.read_bytes())
    place = part.chunks[0].lengths[0] * 11 // 20 if wide else part.stored // 2
    damaged[part.chunks[0].start + place] ^= 16
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=rf"tensor '{first}'"):
        unpack(path, tmp_path / "again")


def test_unknown_tensors_are_refused(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"tensor 'fc.weigth': is not in .*; did you mean 'fc.weight'"
    ):
        unpack(archive, tmp_path / "out", ["fc.weigth"])
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_left_alone(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("mine")
    (tmp_path / "other").write_text("mine too")
    with pytest.raises(SpecError, match="holds files already; name a new one, or give --force"):
        unpack(archive, tmp_path)
    assert (tmp_path / "model.json").read_text() == "mine"
    unpack(archive, tmp_path, force=True)
    assert (tmp_path / "model.json").read_text() != "mine"
    assert (tmp_path / "other").read_text() == "mine too"
    with pytest.raises(SpecError, match="is a file; name another one"):
        unpack(archive, tmp_path / "other")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20, 60, 70, -1, -9, -57, -58, -300])
def test_cut_archives_are_refused(length: int, archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.archive"
    cut.write_bytes(archive.read_bytes()[:length])
    with pytest.raises(ModelError, match="copy it again"):
        unpack(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_flipped_byte_is_noticed(archive: Path, tmp_path: Path) -> None:
    """Any byte at all: the message names the tensor, or speaks of the archive as a whole."""
    data = archive.read_bytes()
    names = {}
    for file in read_index(archive):
        for part in file.parts:
            for chunk in part.chunks:
                places = range(chunk.start, chunk.start + chunk.stored)
                names |= dict.fromkeys(places, part.section.tensors)
    damaged = tmp_path / "damaged.archive"
    for place in [*range(0, len(data) - 700, 61), *range(len(data) - 700, len(data))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        damaged.write_bytes(flipped)
        with pytest.raises(ModelError) as caught:
            unpack(damaged, tmp_path / "out")
        named = [tensor.title for tensor in names.get(place, ())]
        assert any(name in str(caught.value) for name in named or ["archive"])
        assert not (tmp_path / "out").exists()


@given(data=st.data())
@settings(max_examples=150)
def test_an_index_that_makes_no_sense_is_refused(tmp_path_factory, archive, data):
    """Its checksum is right, but somebody edited it."""
    folder = tmp_path_factory.mktemp("edited")
    entries = [file.as_json() for file in read_index(archive)]
    start = min(c.start for f in read_index(archive) for p in f.parts for c in p.chunks)
    end = sum(part.stored for file in read_index(archive) for part in file.parts) + start
    edit(entries, data)

    class Edited(PackedFile):
        def as_json(self):
            return entries.pop(0)

    files = [Edited("", 0, "", "", ()) for _ in entries]
    target = folder / "edited.archive"
    target.write_bytes(archive.read_bytes()[:end] + index_bytes(files))
    try:
        unpack(target, folder / "out")
    except CompressorError:
        assert not (folder / "out").exists()
    else:
        for file in archive.parent.iterdir():
            if (folder / "out" / file.name).exists():
                assert (folder / "out" / file.name).read_bytes() == file.read_bytes()


def edit(value, data) -> None:
    """Replace one thing somewhere in a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.integers(0, 4)):
            value = inner
            continue
        junk = st.sampled_from([None, -1, 0, 3, 1 << 70, "", "8-mask", "../x", [], {}, [[1]], 0.5])
        value[key] = data.draw(junk)
        return


def test_names_cannot_leave_the_folder(archive: Path, tmp_path: Path) -> None:
    one = read_index(archive)[1]
    evil = PackedFile("../evil", one.nbytes, one.sha256, one.head, one.parts)
    target = tmp_path / "evil.archive"
    target.write_bytes(archive.read_bytes()[:8] + index_bytes([evil]))
    with pytest.raises(ModelError, match=r"'\.\./evil' is not a file name"):
        unpack(target, tmp_path / "in" / "out")
    assert not (tmp_path / "in" / "evil").exists()


def test_other_schemas_are_named(archive: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("compressor.exporters.archive.index.SCHEMA", 4)
    monkeypatch.setattr("compressor.exporters.archive.index._READ", (4,))
    with pytest.raises(ModelError, match="has schema 3, this version reads 4"):
        unpack(archive, tmp_path / "out")


def test_archives_of_the_schema_before_are_read(archive: Path, tmp_path: Path, monkeypatch) -> None:
    files = read_index(archive)
    last = max(c.start + c.stored for f in files for p in f.parts for c in p.chunks)
    target = tmp_path / "older.archive"
    with monkeypatch.context() as older:
        older.setattr("compressor.exporters.archive.index.SCHEMA", 2)
        target.write_bytes(archive.read_bytes()[:last] + index_bytes(files))
    assert read_index(target) == files
    unpack(target, tmp_path / "out")


def test_a_file_that_is_not_what_was_put_in_is_noticed(archive: Path, tmp_path: Path) -> None:
    files = [PackedFile(f.name, f.nbytes, "0" * 64, f.head, f.parts) for f in read_index(archive)]
    last = max(c.start + c.stored for f in files for p in f.parts for c in p.chunks)
    target = tmp_path / "wrong.archive"
    target.write_bytes(archive.read_bytes()[:last] + index_bytes(files))
    with pytest.raises(ModelError, match=r"file 'model.safetensors' .* its SHA-256 differs"):
        unpack(target, tmp_path / "out")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.onnx"
    other.write_bytes(b"something else" * 20)
    assert not ArchiveFormat().holds(other)
    assert not ArchiveFormat().holds(tmp_path)
    with pytest.raises(ModelError, match="does not begin like an archive"):
        unpack(other, tmp_path / "out")
    with pytest.raises(SpecError, match="does not exist or is a folder"):
        unpack(tmp_path / "nothing", tmp_path / "out")
