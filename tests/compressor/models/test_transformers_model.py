"""Modules that transformers builds from a folder: mapped, complete, and faithful when lowered."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.carrier import auto_class_name, open_pretrained, usual_inputs
from compressor.models.transformers.classes import auto_class_for
from compressor.progress import quiet_libraries
from compressor.run.model import OpenedModel
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.models.transformers_folders import (
    CAUSAL,
    GROUPED,
    KINDS,
    change,
    opened,
    save,
)

pytestmark = pytest.mark.usefixtures("lowered_each_time")

SLOW = {"llama-tied", "qwen2", "mistral", "gpt2", "opt", "bert", "distilbert", "t5", "mamba2"}


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


def test_an_input_without_a_known_shape_is_asked_for_by_its_own_name() -> None:
    """A vocoder was told to write input_ids."""
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=4,
        upsample_initial_channel=8,
        upsample_rates=[2],
        upsample_kernel_sizes=[4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
    )
    asked = r"inputs: \{spectrogram: \{shape: \[batch, \.\.\.\], dtype: float32"
    with pytest.raises(SpecError, match=asked):
        usual_inputs(transformers.SpeechT5HifiGan(config))


def test_the_encoder_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    original = save(tmp_path, "whisper")
    auto = "AutoModelForSpeechSeq2Seq"
    with pytest.raises(SpecError, match=r"no single usual input.*part: model\.encoder"):
        opened(tmp_path, auto)
    carrier = open_pretrained(auto, tmp_path, {}, (), "model.encoder")
    assert carrier.inputs == (TensorSpec("input_features", ("batch", 8, 40), "float32"),)
    feed = batch_for(carrier.inputs, 2, 1)["input_features"]
    encoder = original.get_submodule("model.encoder")
    with torch.inference_mode():
        wanted = encoder(torch.from_numpy(feed)).last_hidden_state.numpy()
    (output,) = carrier.runner().run({"input_features": feed}).values()
    np.testing.assert_allclose(output, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    assert carrier.folder is None  # config.json describes the whole
    with pytest.raises(SpecError, match=r"model.part: 'encoder' is no module of Whisper"):
        open_pretrained(auto, tmp_path, {}, (), "encoder")


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
from compressor.models.transformers.carrier import open_pretrained
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


def test_a_decoder_of_a_type_that_no_auto_class_knows(tmp_path: Path) -> None:
    """The text decoder of Llama 3.2 Vision, saved alone."""
    sizes = {"num_hidden_layers": 2, "cross_attention_layers": [], "pad_token_id": 0}
    config = transformers.MllamaTextConfig(**{**GROUPED, **sizes})
    with quiet_libraries():
        transformers.MllamaForCausalLM(config).save_pretrained(tmp_path)
    module = open_pretrained("AutoModelForCausalLM", tmp_path, {}, ()).module
    assert type(module) is transformers.MllamaForCausalLM
    assert module.config._attn_implementation == "eager"
    with pytest.raises(SpecError, match="is not for models of type 'mllama_text_model'"):
        open_pretrained("AutoModelForSequenceClassification", tmp_path, {}, ())


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


def test_buffers_that_are_not_stored_are_computed(llama_copy: Path) -> None:
    change(llama_copy, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    buffers = dict(opened(llama_copy).module.named_buffers())
    wanted = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(buffers["model.rotary_emb.inv_freq"], wanted)


def test_names_of_the_bare_model_are_found(llama_copy: Path) -> None:
    stored = load_file(llama_copy / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(
        {k.removeprefix("model."): v for k, v in stored.items()}, llama_copy / "model.safetensors"
    )
    change(llama_copy, tie_word_embeddings=True)
    module = opened(llama_copy).module
    assert torch.equal(module.state_dict()["model.norm.weight"], stored["model.norm.weight"])


def test_the_element_type_is_the_files(llama_copy: Path) -> None:
    stored = load_file(llama_copy / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    save_file(halves, llama_copy / "model.safetensors")
    assert {p.dtype for p in opened(llama_copy).module.parameters()} == {torch.bfloat16}
    wide = opened(llama_copy, dtype="float32").module.state_dict()
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
        ("MarianMTModel", "AutoModelForSeq2SeqLM"),
        ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq"),
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText"),
        ("RoFormerForMaskedLM", "AutoModelForMaskedLM"),
        ("PatchTSTForPrediction", "AutoModel"),
        ("Swin2SRForImageSuperResolution", "AutoModelForImageToImage"),
        ("PoolFormerModel", "AutoModel"),
        ("BertModel", "AutoModel"),
        ("", "AutoModel"),
    ],
)
def test_the_auto_class_of_a_saved_class(saved: str, auto: str) -> None:
    assert auto_class_for(saved) == auto
