"""Weight files in all the forms that training scripts leave, and files that are none."""

import json
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import InputError, ModelError, SpecError
from compressor.models.checkpoint.weight_files import (
    read_weights,
    state_dict_of,
    weight_file_paths,
    weights_digest,
)

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([0.5, -1])}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in STATE.items()}


def assert_state(found: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(STATE)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(STATE, id="plain"),
        pytest.param(OrderedDict(STATE), id="ordered"),
        pytest.param({n: torch.nn.Parameter(t) for n, t in STATE.items()}, id="parameters"),
        pytest.param({"state_dict": STATE, "epoch": 3, "best": 0.5}, id="state_dict"),
        pytest.param({"model_state_dict": STATE, "optimizer": {"lr": 1}}, id="model_state_dict"),
        pytest.param({"model": STATE, "args": ["--lr", "1"]}, id="model"),
        pytest.param({"net": {"state_dict": STATE}}, id="nested"),
        pytest.param(prefixed("module."), id="data parallel"),
        pytest.param(prefixed("_orig_mod."), id="compiled"),
        pytest.param(prefixed("module._orig_mod."), id="compiled inside"),
        pytest.param(prefixed("_orig_mod.module."), id="compiled outside"),
        pytest.param({"n_averaged": torch.tensor(3), **prefixed("module.")}, id="averaged"),
        pytest.param({"model": {"state_dict": prefixed("module.")}}, id="all together"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".th"])
def test_wrappings(tmp_path: Path, content: Any, suffix: str):
    path = tmp_path / f"weights{suffix}"
    torch.save(content, path)
    assert_state(read_weights(path))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".th", ".bin", ".ckpt", ".safetensors"])
@pytest.mark.parametrize("legacy", [False, True])
def test_suffixes_and_headers(tmp_path: Path, suffix: str, legacy: bool):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=not legacy)
        assert zipfile.is_zipfile(path) is not legacy
    found = read_weights(path)
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in STATE.items()}
    headers = read_weights(path, headers_only=True)
    assert {n: (t.shape, t.device.type) for n, t in headers.items()} == {
        n: (t.shape, "meta") for n, t in STATE.items()
    }


def test_a_prefix_that_only_some_names_have_is_part_of_the_name():
    mixed = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    assert set(state_dict_of(mixed, "checkpoint")) == {"module.a", "b"}


def test_types_are_kept(tmp_path: Path):
    state = {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(3)}
    torch.save(state, tmp_path / "w.pt")
    for headers_only in (False, True):
        found = read_weights(tmp_path / "w.pt", headers_only=headers_only)
        assert [t.dtype for t in found.values()] == [torch.float16, torch.int64]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({}, "dict"),
        ({"state_dict": {}}, "state_dict"),
        ({"epoch": 3, "lr": 0.1}, "epoch, lr"),
        ([STATE], "list"),
        (torch.ones(3), "Tensor"),
        ({**STATE, "version": 3}, "a.bias, a.weight, version"),
        ({3: torch.ones(1)}, "3"),
    ],
)
def test_files_without_a_state_dict(tmp_path: Path, content: Any, shown: str):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="has no state_dict") as caught:
        read_weights(tmp_path / "w.pt")
    assert shown == "state_dict" or f"(found {shown})" in str(caught.value)


def written(**files: Callable[[Path], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for name, make in files.items():
            make(folder / name.replace("__", "."))
        return folder

    return write


def shard(*names: str) -> Callable[[Path], object]:
    return lambda path: save_file({n: STATE[n] for n in names}, path)


def index(**weights: Any) -> Callable[[Path], object]:
    mapping = {name.replace("__", "."): file for name, file in weights.items()}
    return lambda path: path.write_text(json.dumps({"weight_map": mapping}))


INDEX = "model__safetensors__index__json"


def test_a_folder_of_shards(tmp_path: Path):
    written(one__safetensors=shard("a.weight"), two__safetensors=shard("a.bias"))(tmp_path)
    assert_state(read_weights(tmp_path))
    assert [p.name for p in weight_file_paths(tmp_path)] == ["one.safetensors", "two.safetensors"]


def test_an_index_says_which_shards_count(tmp_path: Path):
    write = written(
        one__safetensors=shard("a.weight", "a.bias"),
        old__safetensors=shard("a.weight"),
        **{INDEX: index(a__weight="one.safetensors", a__bias="one.safetensors")},
    )
    assert set(read_weights(write(tmp_path))) == set(STATE)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            written(**{INDEX: index(a="gone.safetensors")}),
            "names a missing shard 'gone.safetensors'; fetch it",
        ),
        (
            written(**{INDEX: index(a="../secret.safetensors")}),
            "names a shard outside its folder, '../secret.safetensors'; keep shards beside",
        ),
        (written(**{INDEX: index(a="/etc/hostname")}), "names a shard outside its folder"),
        (written(**{INDEX: index(a=3)}), "names a missing shard '3'"),
        (written(**{INDEX: lambda p: p.write_text("{}")}), "is not a safetensors index"),
        (written(**{INDEX: lambda p: p.write_text("{")}), "is not a safetensors index"),
        (
            written(**{INDEX: lambda p: p.write_text('{"weight_map": [1]}')}),
            "is not a safetensors index; write it again",
        ),
        (
            written(one__safetensors=shard("a.bias"), two__safetensors=shard("a.bias")),
            "has tensor 'a.bias' in two files, 'one.safetensors' and 'two.safetensors'; remove one",
        ),
        (written(readme=Path.touch), "holds no .safetensors file; name the weight file itself"),
    ],
)
def test_folders_that_do_not_add_up(tmp_path: Path, write: Callable[[Path], Path], message: str):
    (tmp_path / "secret.safetensors").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises((ModelError, SpecError)) as caught:
        read_weights(write(tmp_path / "folder"))
    assert message in str(caught.value)
    assert str(tmp_path / "folder") in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_cut_of_a_file_is_taken_for_whole(tmp_path: Path, legacy: bool):
    torch.save(STATE, tmp_path / "whole.pt", _use_new_zipfile_serialization=not legacy)
    content = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(0, len(content), 23):
        path.write_bytes(content[:length])
        with pytest.raises(InputError) as caught:
            read_weights(path)
        assert str(path) in str(caught.value)


def test_no_cut_of_a_safetensors_file_is_taken_for_whole(tmp_path: Path):
    save_file(STATE, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="cannot be read"):
            read_weights(path, headers_only=True)


def test_files_of_another_kind(tmp_path: Path):
    path = tmp_path / "w.pt"
    for content in (
        b"hello",
        b"GIF89a" + bytes(50),
        b"\x89PNG\r\n",
        bytes(64),
        random.Random(1).randbytes(64),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            read_weights(path)
        assert "would run code" not in str(caught.value), content


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_told_from_a_damaged_file(tmp_path: Path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "script.pt")
    with pytest.raises(ModelError, match=r"is a TorchScript archive.*torch\.jit\.load"):
        read_weights(tmp_path / "script.pt")


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_damaged_bytes_give_a_message_or_tensors(tmp_path: Path, form: str):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=form == "zip")
    content = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 20))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            found = read_weights(path)
        except InputError:
            refused += 1
        else:
            assert all(isinstance(t, torch.Tensor) for t in found.values())
    assert refused > 50


def test_the_digest_is_that_of_the_content(tmp_path: Path):
    save_file(STATE, tmp_path / "a.safetensors")
    save_file(STATE, tmp_path / "b.safetensors")
    before = weights_digest(tmp_path / "a.safetensors")
    assert weights_digest(tmp_path / "b.safetensors") == before
    save_file({**STATE, "a.bias": STATE["a.bias"] + 1}, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path / "b.safetensors") != before
