"""Modules that transformers builds from a folder: mapped, complete, and faithful when lowered."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.carriers.torch_carrier import TorchCarrier
from compressor.carriers.transformers_model import (
    auto_class_for,
    auto_class_name,
    open_pretrained,
)
from compressor.errors import CompressorError, ExitCode, ModelError, SpecError
from compressor.model import OpenedModel, open_model
from compressor.plan import make_plan
from compressor.quiet import quiet_libraries
from compressor.spec.load import load_spec
from compressor.types.tensors import Array, Batch, TensorSpec

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
ONE = {"num_hidden_layers": 1}
CAUSAL, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (CAUSAL, "LlamaConfig", GROUPED),
    "llama-tied": (CAUSAL, "LlamaConfig", {**GROUPED, **ONE, "tie_word_embeddings": True}),
    "qwen2": (CAUSAL, "Qwen2Config", GROUPED | ONE),
    "mistral": (CAUSAL, "MistralConfig", {**GROUPED, **ONE, "sliding_window": 8}),
    "gpt2": (CAUSAL, "GPT2Config", {"vocab_size": 37, "n_embd": 32, "n_layer": 1, "n_head": 4}),
    "opt": (
        CAUSAL,
        "OPTConfig",
        {**SIZES, **ONE, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "bert": (CLASSES, "BertConfig", SIZES | ONE),
    "distilbert": (
        CLASSES,
        "DistilBertConfig",
        {"vocab_size": 37, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4},
    ),
    "t5": (
        "AutoModelForTextEncoding",
        "T5Config",
        {"vocab_size": 37, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 4, "d_kv": 8},
    ),
    "vit": (
        "AutoModelForImageClassification",
        "ViTConfig",
        {**SIZES, **ONE, "image_size": 16, "patch_size": 8},
    ),
}
SLOW = {"llama-tied", "qwen2", "mistral", "opt", "distilbert", "t5"}


def save(folder: Path, kind: str) -> torch.nn.Module:
    """Save a random network of a kind; weights large enough that attention is not uniform."""
    auto, config, values = KINDS[kind]
    torch.manual_seed(0)
    with quiet_libraries():
        module = getattr(transformers, auto).from_config(getattr(transformers, config)(**values))
        for parameter in module.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        module.save_pretrained(folder)
    network: torch.nn.Module = module.eval()
    return network


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder, "llama")
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of the Llama folder that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def opened(folder: Path, auto: str = CAUSAL, **config: Any) -> TorchCarrier:
    return open_pretrained(auto, folder, config, ())


def batch_for(inputs: tuple[TensorSpec, ...], batch: int, length: int) -> Batch:
    rng = np.random.default_rng(length)
    made: Batch = {}
    for spec in inputs:
        known = {"batch": batch, "sequence": length}
        shape = [known[d] if isinstance(d, str) else int(d or 1) for d in spec.shape]
        token = spec.dtype == "int64"
        made[spec.name] = (
            rng.integers(3, 37, shape) if token else rng.normal(size=shape).astype(np.float32)
        )
    return made


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS],
)
def test_built_lowered_and_faithful(tmp_path: Path, kind: str) -> None:
    original = save(tmp_path, kind)
    carrier = open_pretrained(KINDS[kind][0], tmp_path, {}, ())
    assert isinstance(carrier, TorchCarrier)
    model = OpenedModel(carrier, (), lambda: "", tmp_path)
    model.load()
    name = carrier.inputs[0].name
    for batch, length in ((1, 1), (3, 11), (2, 30)):
        feed = batch_for(carrier.inputs, batch, length)
        model.check_lowering(feed)
        with torch.inference_mode():
            wanted = original(**{name: torch.from_numpy(feed[name])})[0].numpy()
        got = next(iter(carrier.runner().run(feed).values()))
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    # Logits and nothing else: no cache.
    assert [o.name for o in carrier.outputs] == ["output"]
    assert carrier.outputs[0].shape[0] == "batch"
    state = carrier.module.state_dict()
    assert all(layer.weight in state for layer in carrier.layers())


def test_the_usual_inputs_and_those_of_a_spec(llama: Path, tmp_path: Path) -> None:
    assert opened(llama).inputs == (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
    given = (TensorSpec("input_ids", ("batch", 16), "int64"),)
    assert open_pretrained(CAUSAL, llama, {}, given).inputs == given
    save(tmp_path, "vit")
    vit = opened(tmp_path, "AutoModelForImageClassification")
    assert vit.inputs == (TensorSpec("pixel_values", ("batch", 3, 16, 16), "float32"),)


def test_parameters_are_views_of_the_files(llama: Path) -> None:
    module = opened(llama).module
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        tuple(int(edge, 16) for edge in fields[0].split("-"))
        for fields in maps
        if fields[-1] == str(llama / "model.safetensors")
    ]
    stored = load_file(llama / "model.safetensors")
    for name, parameter in module.named_parameters():
        place = parameter.data_ptr()
        assert any(start <= place < end for start, end in ranges), name
        assert torch.equal(parameter, stored[name])
        assert not parameter.requires_grad


@pytest.mark.slow
def test_anonymous_memory_does_not_grow_by_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6
    )
    with quiet_libraries():
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="100MB")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size > 300e6
    program = """
import sys
from pathlib import Path
from compressor.carriers.transformers_model import open_pretrained
from transformers import LlamaForCausalLM
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
before = anonymous()
folder = Path(sys.argv[1])
carrier = open_pretrained("AutoModelForCausalLM", folder, {}, ())
carrier.load(folder)
assert sum(p.numel() for p in carrier.module.parameters()) * 4 > 300e6
print(anonymous() - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < size / 5


def test_tied_weights_are_one(tmp_path: Path) -> None:
    save(tmp_path, "llama-tied")
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    module: Any = opened(tmp_path).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    # A head of its own wins over what the configuration says, as in transformers.
    own = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"] * 2}
    save_file(own, tmp_path / "model.safetensors")
    module = opened(tmp_path).module
    assert torch.equal(module.lm_head.weight, own["lm_head.weight"])
    assert torch.equal(module.model.embed_tokens.weight, stored["model.embed_tokens.weight"])


def test_buffers_that_are_not_stored_are_computed(copy: Path) -> None:
    change(copy, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    buffers = dict(opened(copy).module.named_buffers())
    wanted = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(buffers["model.rotary_emb.inv_freq"], wanted)


def test_names_of_the_bare_model_are_found(copy: Path) -> None:
    stored = load_file(copy / "model.safetensors")
    del stored["lm_head.weight"]
    save_file({k.removeprefix("model."): v for k, v in stored.items()}, copy / "model.safetensors")
    change(copy, tie_word_embeddings=True)
    module = opened(copy).module
    assert torch.equal(module.state_dict()["model.norm.weight"], stored["model.norm.weight"])


def test_the_element_type_is_the_files(copy: Path) -> None:
    stored = load_file(copy / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    save_file(halves, copy / "model.safetensors")
    assert {p.dtype for p in opened(copy).module.parameters()} == {torch.bfloat16}
    wide = opened(copy, dtype="float32").module.state_dict()
    assert torch.equal(wide["model.norm.weight"], halves["model.norm.weight"].float())


def test_the_spec_may_change_the_configuration(llama: Path) -> None:
    module: Any = opened(llama, rms_norm_eps=0.5).module
    assert module.model.norm.variance_epsilon == 0.5
    with pytest.raises(SpecError, match=r"model\.config\.rms_norm: .*did you mean 'rms_norm_eps'"):
        opened(llama, rms_norm=0.5)
    with pytest.raises(SpecError, match=r"model\.config\.model_type: .* that can be changed"):
        opened(llama, model_type="opt")
    with pytest.raises(SpecError, match=r"model\.config\.dtype: is 'int4'; give one of float32"):
        opened(llama, dtype="int4")


def test_nothing_is_fetched(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    opened(llama)


def remove(folder: Path, name: str) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored[name]
    save_file(stored, folder / "model.safetensors")


def narrow(folder: Path, name: str) -> None:
    stored = load_file(folder / "model.safetensors")
    stored[name] = stored[name][:, :16].contiguous()
    save_file(stored, folder / "model.safetensors")


def retype(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    retyped = {k: v.to(dtype) if v.ndim > 1 else v for k, v in stored.items()}
    save_file(retyped, folder / "model.safetensors")


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Any, type[CompressorError], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), SpecError, r"has no config\.json"),
    "cut config": (lambda d: (d / "config.json").write_text("{"), ModelError, "is not JSON"),
    "list": (lambda d: (d / "config.json").write_text("[]"), ModelError, "its model_type"),
    "unknown kind": (
        lambda d: change(d, model_type="lama"),
        ModelError,
        "has model_type 'lama', which transformers .* does not know; .*did you mean 'llama'",
    ),
    "code of its own": (
        lambda d: change(d, model_type="mine", auto_map={"AutoModel": "mine.Net"}),
        ModelError,
        r"wants code of its own for model_type 'mine' \(auto_map\), which never runs here",
    ),
    "quantized": (
        lambda d: change(d, quantization_config={"quant_method": "gptq"}),
        ModelError,
        "quantized already",
    ),
    "values": (lambda d: change(d, hidden_size="wide"), ModelError, "builds no network"),
    "activation": (lambda d: change(d, hidden_act="no"), ModelError, "builds no network"),
    "heads": (lambda d: change(d, num_attention_heads=5), ModelError, "builds no network"),
    "deeper": (
        lambda d: change(d, num_hidden_layers=3),
        ModelError,
        r"lacks 'model\.layers\.2\.input_layernorm\.weight'.* and 4 more of LlamaForCausalLM",
    ),
    "shallower": (
        lambda d: change(d, num_hidden_layers=1),
        ModelError,
        r"has 'model\.layers\.1\..* and 4 more, which LlamaForCausalLM does not",
    ),
    "wider": (
        lambda d: change(d, intermediate_size=64),
        ModelError,
        r"'model\.layers\.0\.mlp\.down_proj\.weight' with shape \[32, 48\], .* wants \[32, 64\]",
    ),
    "missing": (lambda d: remove(d, UP), ModelError, rf"lacks '{UP}' of LlamaForCausalLM"),
    "narrow": (lambda d: narrow(d, UP), ModelError, r"with shape \[48, 16\], .* wants \[48, 32\]"),
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
def test_folders_that_do_not_fit(copy: Path, damage: str) -> None:
    harm, error, message = DAMAGES[damage]
    harm(copy)
    before = sorted(path.name for path in copy.iterdir())
    with pytest.raises(error, match=message) as caught:
        opened(copy)
    assert caught.value.exit_code in (ExitCode.BAD_SPEC, ExitCode.BAD_INPUT)
    assert sorted(path.name for path in copy.iterdir()) == before


def test_not_a_number_is_found_when_weights_are_looked_at(copy: Path) -> None:
    stored = load_file(copy / "model.safetensors")
    stored[UP][3, 4] = float("nan")
    save_file(stored, copy / "model.safetensors")
    carrier = opened(copy)
    with pytest.raises(ModelError, match=rf"tensor '{UP}' holds 1 values that are NaN"):
        carrier.load(copy)


def test_classes_that_do_not_fit(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no auto class.*did you mean 'AutoModelForCausalLM'"):
        opened(llama, "AutoModelForCasualLM")
    with pytest.raises(SpecError, match=r"'transformers\.pipeline' is no auto class"):
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


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("transformers.AutoModel", "AutoModel"),
        ("transformers:AutoModelForCausalLM", "AutoModelForCausalLM"),
        ("transformers.models.llama:build", None),
        ("my_transformers:AutoModel", None),
        ("samples.digits.model:digits_net", None),
    ],
)
def test_what_names_an_auto_class(factory: str, name: str | None) -> None:
    assert auto_class_name(factory) == name


@pytest.mark.parametrize(
    ("saved", "auto"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("BertModel", "AutoModel"),
        ("", "AutoModel"),
    ],
)
def test_the_auto_class_of_a_saved_class(saved: str, auto: str) -> None:
    assert auto_class_for(saved) == auto


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


def test_in_a_spec(copy: Path, tmp_path: Path) -> None:
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    model = open_model(load_spec(write_spec(tmp_path, copy, {"checkpoint": "model"}, ids)))
    assert [file.name for file in model.files] == ["config.json", "model.safetensors"]
    digest = model.digest()
    assert open_model(load_spec(tmp_path / "spec.yaml")).digest() == digest
    change(copy, rms_norm_eps=0.25)
    assert open_model(load_spec(tmp_path / "spec.yaml")).digest() != digest
    for given, message in (
        (
            {},
            r"model\.factory: 'transformers\..*LM' builds a network from a folder",
        ),
        ({"checkpoint": "gone"}, r"spec\.yaml:\d+: checkpoint '.*gone': does not exist"),
        (
            {"checkpoint": "model", "config": {"hidden": 3}},
            r"spec\.yaml:\d+: model\.config\.hidden: is no entry",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            open_model(load_spec(write_spec(tmp_path, copy, given, ids)))


def test_bfloat16_is_refused_with_the_way_out(copy: Path, tmp_path: Path) -> None:
    retype(copy, torch.bfloat16)
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    with pytest.raises(SpecError, match=r"bfloat16 .* add config: \{dtype: float32\} to model"):
        open_model(load_spec(write_spec(tmp_path, copy, {"checkpoint": "model"}, ids)))
    wide = {"checkpoint": "model", "config": {"dtype": "float32"}}
    model = open_model(load_spec(write_spec(tmp_path, copy, wide, ids)))
    assert "float32" in {layer.dtype for layer in model.carrier.layers()}


def test_a_token_beyond_the_vocabulary_is_found_at_plan_time(copy: Path, tmp_path: Path) -> None:
    ids = np.full((2, 12), 36, np.int64)
    ids[0, 5] = 37
    spec = load_spec(write_spec(tmp_path, copy, {"checkpoint": "model"}, ids))
    with pytest.raises(CompressorError, match=r"'input_ids': holds 37, and .* 37 rows") as caught:
        make_plan(spec)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
