"""GGUF files of mixtures of experts: all experts of a block are in one tensor, code by code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import ModelError, SpecError
from compressor.exporters.gguf.exporter import GgufExporter
from compressor.exporters.gguf.reading import GgufFile, network_of
from compressor.exporters.gguf.shapes import shape_of
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.networks import completed
from compressor.passes.quantize.weights.layers import WeightRule
from tests.compressor.exporters.gguf.folders import KINDS, SIZES, WORDS, quantized, save, written

pytest.importorskip("gguf", reason="gguf is not installed")

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
LEAVES = {  # of an expert in a file of Mixtral, and in those of the others
    "ffn_gate_exps": ("w1", "gate_proj"),
    "ffn_up_exps": ("w3", "up_proj"),
    "ffn_down_exps": ("w2", "down_proj"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in MIXTURES}
    for kind, folder in made.items():
        save(folder, kind)
    return made


def config(kind: str, **values: Any) -> dict[str, Any]:
    name, usual = KINDS[kind]
    given: dict[str, Any] = getattr(transformers, name)(**{**SIZES, **usual, **values}).to_dict()
    return given


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(
    ("options", "format"),
    [
        ({"preset": "int4-g32"}, "Q4_0"),
        ({"bits": 4, "group": 32, "symmetric": False}, "Q4_1"),
    ],
)
def test_codes_of_experts_follow_each_other(kind, options, format, folders, tmp_path) -> None:
    carrier = quantized(folders[kind], **options)
    path = written(carrier, tmp_path)
    file = GgufFile(path)
    tensors = carrier.tensors()
    module, place = ("block_sparse_moe", 0) if kind == "mixtral" else ("mlp", 1)
    for name, leaves in LEAVES.items():
        held = f"blk.1.{name}.weight"
        assert (file.kind(held), file.shape(held)[0]) == (format, 4)
        for expert in range(4):
            tensor = tensors[f"model.layers.1.{module}.experts.{expert}.{leaves[place]}.weight"]
            assert tensor.codes is not None
            meant = tensor.codes.compute(tensor.read()).dequantize()
            assert torch.equal(file.read(held, expert), meant)
    assert file.kind("blk.0.ffn_gate_inp.weight") == "F32"
    assert "bit for bit" in GgufExporter().check_written(carrier, path)
    (proof,) = GgufExporter().prove(carrier, path)
    assert proof.known


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_file_gives_back_the_stacks_of_a_network(kind: str, folders, tmp_path) -> None:
    network = network_of(GgufFile(written(open_checkpoint(folders[kind]), tmp_path)))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folders[kind]).state_dict()
    found = network.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("floats", ["keep", "q8_0"])
def test_stacks_of_a_network_in_memory_are_written(floats: str, folders, tmp_path) -> None:
    opened = open_pretrained("AutoModelForCausalLM", folders["qwen3_moe"], {}, ())
    file = GgufFile(written(opened, tmp_path / "one", floats=floats))
    kind = "F32" if floats == "keep" else "Q8_0"
    assert file.kind("blk.0.ffn_up_exps.weight") == kind
    assert file.kind("blk.0.ffn_gate_inp.weight") == "F32"  # it chooses, and is not rounded
    assert "bit for bit" in GgufExporter(floats=floats).check_written(
        opened, tmp_path / "one" / "model.gguf"
    )
    streamed = GgufFile(written(open_checkpoint(folders["qwen3_moe"]), tmp_path / "two"))
    if floats == "keep":
        assert file.names == streamed.names
        assert all(torch.equal(file.raw(name), streamed.raw(name)) for name in file.names)


def test_a_router_of_half_floats_is_widened(tmp_path: Path) -> None:
    save(tmp_path / "half", "qwen2_moe", dtype=torch.bfloat16)
    file = GgufFile(written(open_checkpoint(tmp_path / "half"), tmp_path / "out"))
    kinds = [file.kind(f"blk.0.ffn_{n}.weight") for n in ("gate_inp", "gate_inp_shexp", "up_exps")]
    assert kinds == ["F32", "F32", "BF16"]


def test_one_rule_decides_for_all_experts(folders) -> None:
    rule = WeightRule(match="model.layers.1.mlp.experts.2.up_proj", skip=True)
    carrier = quantized(folders["qwen3_moe"], preset="int4-g32", layers=(rule,))
    with pytest.raises(SpecError, match=r"experts\.2\.up_proj.*is F32.*all experts of a block"):
        GgufExporter().check(carrier)


def test_a_missing_expert_is_found_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.w2\.weight' of experts: misses '3' of 4"):
        GgufExporter().check(open_checkpoint(tmp_path))


def test_more_experts_than_config_json_says_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_local_experts": 3}))
    with pytest.raises(ModelError, match="has too many experts: '3' of 3"):
        GgufExporter().check(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False of a qwen3_moe, only True"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True of a qwen2_moe, only False"),
        ("qwen2_moe", {"tie_word_embeddings": True}, "the output layer of a qwen2_moe"),
    ],
)
def test_a_mixture_that_llama_cpp_would_compute_otherwise(kind, values, message) -> None:
    shape_of(config(kind), WORDS)
    with pytest.raises(SpecError, match=message):
        shape_of(config(kind, **values), WORDS)


def test_shares_that_no_setting_names_are_those_of_the_class() -> None:
    given = config("qwen3_moe")
    del given["norm_topk_prob"]  # its class does not make them sum to 1, llama.cpp does
    with pytest.raises(SpecError, match="norm_topk_prob False"):
        shape_of(completed(given), WORDS)


def test_dense_blocks_among_those_of_experts_are_refused(tmp_path: Path) -> None:
    values = {**KINDS["qwen3_moe"][1], "mlp_only_layers": [1]}
    made = transformers.Qwen3MoeConfig(**{**SIZES, **values})
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"no place for 'model\.layers\.1\.mlp\.down_proj\.weight'"):
        GgufExporter().check(open_checkpoint(tmp_path))
