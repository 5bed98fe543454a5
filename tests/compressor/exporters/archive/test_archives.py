"""Files go into an archive and come out as they were, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import compressor.exporters.archive.exporter as packing
from compressor.errors import InputError, ModelError
from compressor.exporters.archive import unpacking
from compressor.exporters.archive.coder import CHUNK, encode
from compressor.exporters.archive.forms import candidates
from compressor.exporters.archive.index import read_index
from compressor.files import file_sha256
from tests.compressor.exporters.archive.packed_files import (
    mixed_tensors,
    packed,
    rng,
    small_files,
    stored_bytes,
    unpack,
    write_safetensors,
)


def test_files_come_back_bit_for_bit(archive: Path, tmp_path: Path) -> None:
    found = unpack(archive, tmp_path / "new" / "folder")
    assert [f.name for f in found] == ["model.safetensors", "model.json"]
    for file in found:
        was, now = (folder / file.name for folder in (archive.parent, tmp_path / "new" / "folder"))
        assert now.read_bytes() == was.read_bytes()
        assert (file.bytes, file.sha256) == (was.stat().st_size, file_sha256(was))
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "model.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("count", [CHUNK // 4, CHUNK // 4 + 1, 3 * CHUNK // 4 + 17])
def test_large_tensors_are_divided_into_chunks(count: int, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "w.safetensors", mixed_tensors(count))
    target = packed([path], tmp_path / "w.archive", level=1)
    (file,) = read_index(target)
    wide = next(part for part in file.parts if part.section.name == "fc.weight")
    assert len(wide.chunks) == -(-count * 4 // CHUNK)
    unpack(target, tmp_path / "out")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@given(contents=st.lists(st.binary(max_size=300), max_size=3))
@settings(max_examples=40)
def test_any_files_come_back(contents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    files = []
    for number, content in enumerate(contents):
        files.append(folder / f"{number}.bin")
        files[-1].write_bytes(content)
    unpack(packed(files, folder / "a"), folder / "out")
    assert [(folder / "out" / f.name).read_bytes() for f in files] == contents


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-3],
        lambda data: data + b"more",
        lambda data: data.replace(b'"F32"', b'"???"', 1),
        lambda data: data.replace(b'"shape"', b'"forms"', 1),
        lambda data: b"\xff" * 8 + data[8:],
    ],
)
def test_what_is_not_quite_safetensors_comes_back_too(spoil, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "w.safetensors", mixed_tensors(50))
    path.write_bytes(spoil(path.read_bytes()))
    unpack(packed([path], tmp_path / "a"), tmp_path / "out")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_same_files_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    again = packed(small_files(tmp_path), tmp_path / "model.archive")
    assert again.read_bytes() == archive.read_bytes()


def test_threads_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_safetensors(tmp_path / "w.safetensors", mixed_tensors(CHUNK))
    found = set()
    for count in (1, 3):
        monkeypatch.setattr(packing, "threads", lambda count=count: count)
        found.add(packed([path], tmp_path / f"{count}", level=1).read_bytes())
    assert len(found) == 1


def test_it_is_smaller_than_the_files(archive: Path) -> None:
    files = sum(p.stat().st_size for p in archive.parent.iterdir()) - archive.stat().st_size
    assert archive.stat().st_size < 0.7 * files
    sizes = stored_bytes(archive)
    assert set(sizes) == set(mixed_tensors())
    assert sizes["empty"] == 0
    assert sum(sizes.values()) < archive.stat().st_size


def test_what_is_regular_takes_little(tmp_path: Path) -> None:
    """Of tensors that are large enough to be coded alone."""
    path = write_safetensors(tmp_path / "w.safetensors", mixed_tensors(20_000))
    sizes = stored_bytes(packed([path], tmp_path / "w.archive"))
    assert sizes["zeros"] < 12
    assert sizes["fc.sparse"] < 0.35 * sizes["fc.weight"]


def test_incompressible_files_grow_little(tmp_path: Path) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(rng().bytes(100_000))
    assert packed([path], tmp_path / "a").stat().st_size < 100_400


@pytest.mark.parametrize("content", ["codes", "sparse codes", "zeros at the beginning"])
def test_large_tensors_take_as_little_as_if_all_ways_were_tried(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way is chosen by parts of a tensor, and looked for again where another part differs."""
    draw = rng()
    codes = np.clip(draw.normal(8, 2, 2 * CHUNK), 0, 15).astype(np.uint8)
    if content == "sparse codes":
        codes[draw.random(codes.size) < 0.7] = 8
    data = codes[::2] | codes[1::2] << 4
    if content.startswith("zeros"):
        data[: CHUNK // 4] = 0
    path = write_safetensors(tmp_path / "w.safetensors", {"w": ("U8", data)})
    monkeypatch.setattr(packing, "_SMALL", 0)
    found = stored_bytes(packed([path], tmp_path / "a"))["w"]
    likely = [form for form in candidates(data, 1, floating=False) if form.bits in (4, 8)]
    assert found <= 1.01 * min(encode(data, form, 9).nbytes for form in likely)
    unpack(tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_single_tensors_are_taken_alone(archive: Path, tmp_path: Path) -> None:
    found = unpack(archive, tmp_path, ["codes", "fc.weight"])
    assert [file.name for file in found] == ["model.safetensors"]
    wanted = mixed_tensors()
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {"codes", "fc.weight"}
        assert file.metadata()["note"] == "é"
        for name in file.keys():  # noqa: SIM118
            assert np.array_equal(file.get_tensor(name), wanted[name][1])


def test_single_tensors_need_nothing_else_of_the_archive(archive: Path, tmp_path: Path) -> None:
    (file, _) = read_index(archive)
    other = next(p for p in file.parts if "wide" in {t.name for t in p.section.tensors})
    data = bytearray(archive.read_bytes())
    data[other.chunks[0].start] ^= 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(data)
    assert unpack(damaged, tmp_path / "one", ["codes"])
    with pytest.raises(ModelError, match=r"tensor 'wide' of archive .* another checksum"):
        unpack(damaged, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_tiny_neighbours_are_coded_together(tmp_path: Path) -> None:
    """Each is still found and taken out alone, and damage names one of them."""
    draw = np.random.default_rng(4)
    tensors = {f"scale{n:02}": ("F32", draw.random(16, np.float32)) for n in range(40)}
    tensors |= {"codes": ("I8", draw.integers(-9, 9, 6000).astype(np.int8))}
    content = write_safetensors(tmp_path / "model.safetensors", tensors)
    path = tmp_path / "model.archive"
    packing.pack([content], path, 3, lambda _: None)
    (file,) = read_index(path)
    assert [len(part.section.tensors) for part in file.parts] == [40, 1]
    assert sum(stored_bytes(path).values()) == pytest.approx(sum(p.stored for p in file.parts), 0.1)
    unpack(path, tmp_path / "out", ["scale07", "codes", "scale38"])
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as found:
        assert set(found.keys()) == {"scale07", "codes", "scale38"}
        for name in found.keys():  # noqa: SIM118
            assert np.array_equal(found.get_tensor(name), tensors[name][1])
    damaged = bytearray(path.read_bytes())
    damaged[file.parts[0].chunks[0].start] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"tensor 'scale0[01]'.* of archive"):
        unpack(path, tmp_path / "again")


def test_a_full_disk_leaves_nothing(archive: Path, tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="is full"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_room_is_left_alone(archive: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(unpacking, "disk_usage", lambda _: SimpleNamespace(free=999))
    with pytest.raises(InputError, match=r"bytes, and '.*' has room for 999; free some space"):
        unpack(archive, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_index_is_small(tmp_path: Path) -> None:
    tensors = {
        f"layers.{i}.weight": ("F32", rng().standard_normal(8).astype(np.float32))
        for i in range(300)
    }
    path = write_safetensors(tmp_path / "w.safetensors", tensors)
    target = packed([path], tmp_path / "a")
    stored = sum(stored_bytes(target).values())
    assert target.stat().st_size - stored < 300 * 25
    json.dumps(stored_bytes(target))
