"""Folders of shards: what belongs to a checkpoint, and folders that do not add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.errors import ModelError, SpecError
from compressor.lab.starter import starter_text
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.checkpoint.folder import companions, read_checkpoint
from tests.compressor.models.checkpoint.llama_files import (
    COMPANIONS,
    CONFIG,
    INDEX,
    llama_tensors,
    write_folder,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_a_sharded_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    found = read_checkpoint(folder)
    assert found.folder == folder
    assert found.config == CONFIG
    assert [s.path.name for s in found.shards] == [FIRST, SECOND]
    assert found.tensors.keys() == llama_tensors().keys()


def test_companions_are_small_files_and_no_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    found = companions(folder)
    assert list(found) == sorted([*COMPANIONS, "config.json"])
    assert found["config.json"] == folder / "config.json"


def test_companions_include_what_follows_the_network(tmp_path: Path) -> None:
    """Folders that modules.json names, beside the network and inside the directory."""
    folder = write_folder(tmp_path / "m")
    places = ["", "1_Pooling", "2_Dense", "3_Normalize", "../elsewhere", "..", "."]
    (folder / "modules.json").write_text(json.dumps([{"path": place} for place in places]))
    for place in ("1_Pooling", "2_Dense", "original", "../elsewhere"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "config.json").write_text("{}")
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"0")
    behind = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    assert list(companions(folder)) == sorted([*COMPANIONS, "config.json", "modules.json", *behind])


def test_one_file_of_a_folder_stands_for_it(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path / "model.safetensors").folder is None
    (tmp_path / "config.json").write_text("{}")
    assert read_checkpoint(tmp_path / "model.safetensors").folder == tmp_path
    save_file({"v": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert read_checkpoint(tmp_path).tensors.keys() == {"w"}
    assert read_checkpoint(tmp_path / "consolidated.safetensors").folder is None


def test_a_shard_alone_is_no_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert read_checkpoint(folder / FIRST).folder is None


def change_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        changed = change(index)
        (folder / INDEX).write_text(json.dumps(index if changed is None else changed))

    return apply


def change_config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = {**CONFIG, **changes}
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def change_tensors(
    change: Callable[[dict[str, torch.Tensor]], Any], shard: str = FIRST
) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / shard)
        change(tensors)
        (folder / shard).unlink()
        save_file(tensors, folder / shard)

    return apply


def cut(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-10])


def pointer(folder: Path) -> None:
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def dropped(name: str, prefix: str = "") -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {key.removeprefix(prefix): t for key, t in llama_tensors().items() if key != name}
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        write_folder(folder, tensors)

    return apply


def apply_all(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN = [
    (lambda f: (f / SECOND).unlink(), f"names a missing shard '{SECOND}'; fetch it"),
    (cut, "cannot be read (its header describes"),
    (pointer, "is a Git LFS pointer"),
    (change_index(lambda i: i["weight_map"].update(x="../x")), "outside its folder, '../x'"),
    (change_index(lambda i: i["weight_map"].update(x="/x")), "outside its folder, '/x'"),
    (change_index(lambda i: i["weight_map"].update(x=FIRST)), f"places 'x' in '{FIRST}', which"),
    (
        change_index(lambda i: i["weight_map"].update({Q: SECOND})),
        f"places '{Q}' in '{SECOND}', it",
    ),
    (change_index(lambda i: i["weight_map"].pop(Q) and None), f"does not list '{Q}', which"),
    (change_index(lambda _: []), "is not a safetensors index"),
    (change_index(lambda _: {"weight_map": None}), "is not a safetensors index"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'), "'a' twice"),
    (lambda f: (f / INDEX).write_bytes(b"\xff"), "is not a safetensors index"),
    (
        change_tensors(lambda t: t.update({Q: torch.zeros(64, 64)}), SECOND),
        f"has tensor '{Q}' in two files, '{FIRST}' and '{SECOND}'",
    ),
    (change_tensors(lambda t: t.pop(Q)), f"places '{Q}' in '{FIRST}', which does not hold it"),
    (lambda f: (f / "config.json").write_text("[1]"), "is not a JSON object"),
    (lambda f: (f / "config.json").write_text('{"a": 1'), "cannot be read (as JSON:"),
    (lambda f: (f / "config.json").write_bytes(b"\xff"), "cannot be read (as JSON:"),
    (
        change_config(hidden_size=32),
        "with shape [50, 32], the checkpoint has [50, 64]",
    ),
    (change_config(vocab_size=51), "'lm_head.weight' with shape [51, 64]"),
    (change_config(intermediate_size=95), "with shape [64, 95], the checkpoint has [64, 96]"),
    (change_config(num_key_value_heads=4), "k_proj.weight' with shape [64, 64]"),
    (change_config(head_dim=8), "with shape [16, 64], the checkpoint has [32, 64]"),
    (change_config(num_hidden_layers=3), "asks for 3 layers, in the checkpoint layer 2 is missing"),
    (change_config(num_hidden_layers=1), "asks for 1 layers, in the checkpoint there are 2"),
    (dropped("lm_head.weight"), "says that lm_head has a weight of its own"),
    (dropped("lm_head.weight", "model."), "says that lm_head has a weight of its own"),
    (
        dropped("model.layers.1.mlp.up_proj.weight"),
        "layer 1 differs from layer 0 in 'layers.1.mlp.up_proj.weight'",
    ),
    (
        change_tensors(lambda t: t.update({f"{Q[:-7]}.weight_packed": torch.zeros(1)}), SECOND),
        "does not list",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_folders_that_do_not_add_up(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = write_folder(tmp_path / "m")
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        change_config(tie_word_embeddings=True),
        change_config(model_type="unheard-of", hidden_size=1, num_hidden_layers=9),
        change_config(model_type=["llama"]),
        change_config(hidden_size="64", num_hidden_layers=None, vocab_size=2.5),
        lambda f: (f / "config.json").write_text('{"time_step_limit": [0, Infinity]}'),
        apply_all(dropped("lm_head.weight"), change_config(tie_word_embeddings=True)),
    ],
)
def test_configurations_that_say_nothing_wrong(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = write_folder(tmp_path / "m")
    change(folder)
    assert open_checkpoint(folder).tensors()


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "w.bin").write_bytes(b"")
    (tmp_path / "w.onnx").write_bytes(b"")
    for path, message in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path / "empty", "holds no .safetensors file"),
        (tmp_path / "w.bin", "is not a .safetensors file; .* model.factory"),
        (tmp_path / "w.onnx", "is not a .safetensors file; .* model.onnx"),
    ):
        with pytest.raises(SpecError, match=message):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["OwnForCausalLM"]}, "OwnForCausalLM"),
        ({"architectures": []}, "AutoModel"),
    ],
)
def test_a_pickled_model_is_to_be_saved_again(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"")
    words = f"holds pytorch_model.bin, not safetensors; .*transformers.{name}.from_pretrained"
    for path in (tmp_path, pickled):
        with pytest.raises(SpecError, match=words):
            open_checkpoint(path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"layers.0.q_proj.lora_A.weight": torch.zeros(8, 16)}, weights)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "own/base"}')
    for path in (tmp_path, weights):
        with pytest.raises(SpecError, match=r"is an adapter of 'own/base'.*merge_and_unload"):
            open_checkpoint(path)
    with pytest.raises(SpecError, match="is an adapter of 'own/base'"):
        starter_text(tmp_path, ".", "spec.yaml")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    assert len(open_checkpoint(tmp_path).tensors()) == len(llama_tensors())


def test_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="holds no tensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["a.weight_packed", "a.qweight", "a.qzeros", "a.weight.absmax", "a.g_idx"]
)
def test_quantized_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    save_file({name: torch.zeros(2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"is already quantized: '{name}'"):
        open_checkpoint(tmp_path)


def test_integers_that_have_scales_are_refused(tmp_path: Path) -> None:
    codes = {"a.weight": torch.zeros(2, 2, dtype=torch.int8)}
    save_file(codes, tmp_path / "counts.safetensors")
    assert open_checkpoint(tmp_path / "counts.safetensors").layers() == ()
    save_file({**codes, "a.weight_scale": torch.ones(2, 1)}, tmp_path / "codes.safetensors")
    with pytest.raises(ModelError, match=r"is already quantized: 'a.weight' belongs"):
        open_checkpoint(tmp_path / "codes.safetensors")
