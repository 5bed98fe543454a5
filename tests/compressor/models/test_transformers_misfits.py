"""Folders, classes and specs from which no module of transformers can be built."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import CompressorError, ExitCode, ModelError, SpecError
from compressor.models.transformers.decoder import Decoder
from compressor.progress import quiet_libraries
from compressor.run.model import open_model
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from compressor.types.tensors import Array
from tests.compressor.models.transformers_folders import (
    CAUSAL,
    CLASSES,
    change,
    opened,
    retype,
    save,
)


def remove(folder: Path, name: str) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored[name]
    save_file(stored, folder / "model.safetensors")


def narrow(folder: Path, name: str) -> None:
    stored = load_file(folder / "model.safetensors")
    stored[name] = stored[name][:, :16].contiguous()
    save_file(stored, folder / "model.safetensors")


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Any, type[CompressorError], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), SpecError, r"has no config\.json"),
    "cut config": (lambda d: (d / "config.json").write_text("{"), ModelError, "as JSON"),
    "list": (lambda d: (d / "config.json").write_text("[]"), ModelError, "not a JSON object"),
    "unknown kind": (
        lambda d: change(d, model_type="lama"),
        ModelError,
        "has model_type 'lama', which transformers .* does not know; .*did you mean 'llama'",
    ),
    "code of its own": (
        lambda d: change(d, model_type="mine", auto_map={"AutoModel": "mine.Net"}),
        ModelError,
        r"needs code of its own for model_type 'mine' \(auto_map\), which never runs here",
    ),
    "quantized": (
        lambda d: change(d, quantization_config={"quant_method": "gptq"}),
        ModelError,
        "quantized already",
    ),
    "values": (lambda d: change(d, hidden_size="wide"), ModelError, "describes no network"),
    "activation": (lambda d: change(d, hidden_act="no"), ModelError, "describes no network"),
    "heads": (lambda d: change(d, num_attention_heads=5), ModelError, "describes no network"),
    "deeper": (
        lambda d: change(d, num_hidden_layers=2),
        ModelError,
        r"lacks 'model\.layers\.1\.input_layernorm\.weight'.* and 4 more of LlamaForCausalLM",
    ),
    "shallower": (
        lambda d: change(d, num_hidden_layers=0),
        ModelError,
        r"has 'model\.layers\.0\..* and 4 more, which LlamaForCausalLM does not",
    ),
    "wider": (
        lambda d: change(d, intermediate_size=64),
        ModelError,
        r"'model\.layers\.0\.mlp\.down_proj\.weight' with shape \[32, 48\], .* expects \[32, 64\]",
    ),
    "missing": (lambda d: remove(d, UP), ModelError, rf"lacks '{UP}' of LlamaForCausalLM"),
    "narrow": (
        lambda d: narrow(d, UP),
        ModelError,
        r"with shape \[48, 16\], .* expects \[48, 32\]",
    ),
    "codes": (lambda d: retype(d, torch.int8), ModelError, "as int8; give the float checkpoint"),
    "fp8": (lambda d: retype(d, torch.float8_e4m3fn), ModelError, "as float8_e4m3fn"),
    "cut weights": (
        lambda d: (d / "model.safetensors").write_bytes(
            (d / "model.safetensors").read_bytes()[:-100]
        ),
        ModelError,
        r"model\.safetensors",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        CompressorError,
        r"holds no \.safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_folders_that_do_not_fit(llama_copy: Path, damage: str) -> None:
    harm, error, message = DAMAGES[damage]
    harm(llama_copy)
    before = sorted(path.name for path in llama_copy.iterdir())
    with pytest.raises(error, match=message) as caught:
        opened(llama_copy)
    assert caught.value.exit_code in (ExitCode.BAD_SPEC, ExitCode.BAD_INPUT)
    assert sorted(path.name for path in llama_copy.iterdir()) == before


def test_not_a_number_is_found_when_weights_are_looked_at(llama_copy: Path) -> None:
    stored = load_file(llama_copy / "model.safetensors")
    stored[UP][3, 4] = float("nan")
    save_file(stored, llama_copy / "model.safetensors")
    carrier = opened(llama_copy)
    with pytest.raises(ModelError, match=rf"tensor '{UP}' holds 1 values that are NaN"):
        carrier.load(llama_copy)


@pytest.mark.slow
def test_a_class_is_found_without_listing_thousands(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(_: object) -> list[str]:
        raise AssertionError("it takes a third of a second")

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(type(transformers), "__dir__", listed)
    assert opened(llama).layers()


def test_classes_that_do_not_fit(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"not an auto class.*did you mean 'AutoModelForCausalLM'"):
        opened(llama, "AutoModelForCasualLM")
    with pytest.raises(SpecError, match=r"'transformers\.pipeline' is not an auto class"):
        opened(llama, "pipeline")
    save(tmp_path, "vit")
    with pytest.raises(SpecError, match=r"of type 'vit'; use transformers\.AutoModelForImage"):
        opened(tmp_path, CAUSAL)
    with pytest.raises(ModelError, match=r"lacks 'score\.weight' of LlamaForSeq"):
        opened(llama, CLASSES)
    with pytest.raises(SpecError, match=r"gone': does not exist"):
        opened(llama / "gone")
    with pytest.raises(SpecError, match=r"has no config\.json"):
        opened(llama / "model.safetensors")


def test_without_the_package(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[transformers\]"'):
        opened(llama)


def write_spec(folder: Path, checkpoint: Path, model: Mapping[str, Any], ids: Array) -> Path:
    np.savez(folder / "ids.npz", input_ids=ids)
    path = folder / "spec.yaml"
    spec = {
        "version": 1,
        "name": "llama",
        "model": {"factory": "transformers.AutoModelForCausalLM", **model},
        "data": {"evaluation": {"npz": "ids.npz", "inputs": {"input_ids": "input_ids"}}},
        "exports": [{"format": "safetensors"}],
    }
    path.write_text(json.dumps(spec, indent=1))
    return path


def test_a_network_of_a_package_that_is_missing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LayoutLMv2 needs detectron2: the advice was to correct config.json."""

    def absent(*_: object, **__: object) -> None:
        raise ImportError("LlamaForCausalLM requires the other library")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", absent)
    with pytest.raises(ModelError, match=r"package that is not installed .* other library.*; inst"):
        opened(llama)


def test_in_a_spec(llama_copy: Path, tmp_path: Path) -> None:
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    model = open_model(load_spec(write_spec(tmp_path, llama_copy, {"checkpoint": "model"}, ids)))
    assert [file.name for file in model.files] == ["config.json", "model.safetensors"]
    digest = model.digest()
    assert open_model(load_spec(tmp_path / "spec.yaml")).digest() == digest
    change(llama_copy, rms_norm_eps=0.25)
    assert open_model(load_spec(tmp_path / "spec.yaml")).digest() != digest
    for given, message in (
        (
            {},
            r"model\.factory: 'transformers\..*LM' builds a network from a folder",
        ),
        ({"checkpoint": "gone"}, r"spec\.yaml:\d+: checkpoint '.*gone': does not exist"),
        (
            {"checkpoint": "model", "config": {"hidden": 3}},
            r"spec\.yaml:\d+: model\.config\.hidden: is not an entry",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            open_model(load_spec(write_spec(tmp_path, llama_copy, given, ids)))


def test_bfloat16_is_refused_with_the_way_out(llama_copy: Path, tmp_path: Path) -> None:
    retype(llama_copy, torch.bfloat16)
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    with pytest.raises(SpecError, match=r"bfloat16 .* add config: \{dtype: float32\} to model"):
        open_model(load_spec(write_spec(tmp_path, llama_copy, {"checkpoint": "model"}, ids)))
    wide = {"checkpoint": "model", "config": {"dtype": "float32"}}
    model = open_model(load_spec(write_spec(tmp_path, llama_copy, wide, ids)))
    assert {tensor.dtype for tensor in model.carrier.tensors().values()} == {torch.float32}


def test_a_token_beyond_the_vocabulary_is_found_at_plan_time(
    llama_copy: Path, tmp_path: Path
) -> None:
    ids = np.full((2, 12), 36, np.int64)
    ids[0, 5] = 37
    spec = load_spec(write_spec(tmp_path, llama_copy, {"checkpoint": "model"}, ids))
    with pytest.raises(CompressorError, match=r"'input_ids': holds 37, and .* 37 rows") as caught:
        make_plan(spec)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_blocks_whose_layers_are_not_linear_are_named() -> None:
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)
    why = r"the blocks of GPT2LMHeadModel \(transformer.h\) hold no nn.Linear, but Conv1D"
    with quiet_libraries(), pytest.raises(SpecError, match=why):
        Decoder(transformers.GPT2LMHeadModel(config))


def test_blocks_that_pass_on_more_than_hidden_values_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a block returns beside them is not known, so no other block may take it."""
    config = transformers.LlamaConfig(vocab_size=20, hidden_size=8, num_attention_heads=2)
    config.intermediate_size, config.num_hidden_layers = 16, 2
    with quiet_libraries():
        network = transformers.LlamaForCausalLM(config)
    block = type(network.model.layers[0])
    forward = block.forward
    monkeypatch.setattr(
        block, "forward", lambda *given, **more: (forward(*given, **more), given[1])
    )

    def followed(self: Any, input_ids: Any, **_: Any) -> Any:
        hidden, first = self.model.embed_tokens(input_ids), None
        rotary = self.model.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for layer in self.model.layers:
            hidden, first = layer(hidden, position_embeddings=rotary, first=first)
        return hidden

    monkeypatch.setattr(type(network), "forward", followed)
    with pytest.raises(SpecError, match="takes more of the one before than its hidden values"):
        Decoder(network)
