"""Which weights ``transformers`` reads as codes: decided on the ``meta`` device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressor.errors import SpecError
from compressor.exporters.safetensors.quantization_config import quantization_config
from compressor.models.layer_uses import routers
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.reading import Reading, read_by, reading_of
from compressor.types.layers import Layer, Scheme, StoredTensor, WeightCodes
from tests.compressor.exporters.tiny_directories import meta_network, save_tiny, stored_shapes

pytest.importorskip("transformers", reason="transformers is not installed")

INT8 = Scheme(8, granularity="channel", narrow=False)
INT4_ASYMMETRIC = Scheme(4, False, False, "group", 32)
FP8 = Scheme(8, element="e4m3")


@cache
def read(kind: str) -> tuple[Reading, dict[str, tuple[int, ...]]]:
    network = meta_network(kind)
    shapes = stored_shapes(network)
    return read_by(network, shapes), shapes


def tensors_of(kind: str, scheme: Scheme = INT8, keep: str = "none") -> dict[str, StoredTensor]:
    """Return what a checkpoint holds with all linear layers quantized that can be."""
    reading, shapes = read(kind)
    made = {}
    for name, shape in shapes.items():
        linear = reading.module(name) in reading.linear or name in reading.merged
        codes = None
        if linear and name.endswith(".weight") and not reading.obstacle(name) and keep not in name:
            layer = Layer(name.removesuffix(".weight"), "MatMul", name, shape)
            codes = WeightCodes(layer, scheme, lambda _: pytest.fail("nothing is computed"))
        made[name] = StoredTensor(name, shape, torch.float32, lambda: torch.empty(0), codes)
    return made


@pytest.mark.parametrize(
    ("kind", "weight", "reason"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", ""),
        ("llama", "lm_head.weight", ""),
        ("llama", "model.layers.7.mlp.up_proj.weight", "LlamaForCausalLM has no tensor of this"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.weight", ""),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "parameter of MixtralTopKRou"),
        ("qwen2_moe", "model.layers.0.mlp.gate.weight", "parameter of Qwen2MoeTopKRouter"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.up_proj.weight", ""),
        ("granitemoe", "model.layers.0.block_sparse_moe.router.layer.weight", "which is not a lin"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", "it is a parameter of GptOssExperts"),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", "it is a parameter of Conv1D, which is not"),
        ("vit", "vit.embeddings.patch_embeddings.projection.weight", "a parameter of Conv2d"),
        ("whisper", "model.encoder.layers.0.fc1.weight", ""),
        ("qwen3_vl_moe", "model.visual.pos_embed.weight", "a table is looked up, not multiplied"),
        ("falcon", "transformer.h.0.mlp.dense_h_to_4h.weight", ""),
    ],
)
def test_which_weights_are_read_as_codes(kind: str, weight: str, reason: str) -> None:
    found = read(kind)[0].obstacle(weight)
    assert (reason in found) if reason else not found


@pytest.mark.parametrize("kind", ["dinov2", "llama4_text"])
def test_classes_that_read_no_codes(kind: str) -> None:
    with pytest.raises(SpecError, match=r"transformers [\d.]+ reads no codes into a \w+ \("):
        read_by(meta_network(kind), ["lm_head.weight"])


SETS_UP_WEIGHTS = ("falcon", "mamba", "mamba2", "rwkv", "recurrent_gemma", "t5")
SETS_UP_WEIGHTS += ("siglip", "wav2vec2", "gemma3", "modernbert")
LOADS_CODES = ("llama", "bert", "mixtral", "whisper", "hubert", "gpt_oss")


@pytest.mark.parametrize(
    ("kind", "asked"),
    [*((kind, True) for kind in SETS_UP_WEIGHTS), *((kind, False) for kind in LOADS_CODES)],
)
def test_transformers_is_asked_to_dequantize_where_it_must_be(kind: str, asked: bool) -> None:
    reading, _ = read(kind)
    weights = {path: m._parameters.get("weight") for path, m in reading.network.named_modules()}
    assert quantization_config(tensors_of(kind), reading).get("dequantize", False) is asked
    assert "dequantize" not in quantization_config(tensors_of(kind, FP8), reading)
    # What was taken away to see is in place again.
    for path, module in reading.network.named_modules():
        assert module._parameters.get("weight") is weights[path]


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("whisper", "proj_out"),
        ("modernbert", "decoder"),
        ("distilbert", "vocab_projector"),
        ("albert", "predictions.decoder"),
        ("electra", "generator_lm_head"),
        ("gemma", "lm_head"),
    ],
)
def test_output_layers_without_a_tensor_are_ignored(kind: str, output: str) -> None:
    reading, shapes = read(kind)
    assert f"{output}.weight" not in shapes
    assert output in quantization_config(tensors_of(kind), reading)["ignore"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "mistral", "opt", "gpt_neox"])
def test_decoders_are_written_as_by_their_names(kind: str) -> None:
    tensors = tensors_of(kind, keep="embed_out" if kind == "gpt_neox" else "lm_head")
    assert quantization_config(tensors, read(kind)[0]) == quantization_config(tensors)


def test_what_is_kept_is_called_as_the_class_calls_it() -> None:
    # Checkpoints of this type have older names than its class.
    reading, shapes = read("llava")
    tensors = tensors_of("llava", keep="up_proj")
    ignore = quantization_config(tensors, reading)["ignore"]
    assert "language_model.model.layers.0.mlp.up_proj.weight" in shapes
    assert r"re:model\.language_model\.layers\.\d+\.mlp\.up_proj$" in ignore


def test_experts_that_transformers_cannot_stack() -> None:
    reading, _ = read("mixtral")
    quantization_config(tensors_of("mixtral"), reading)
    quantization_config(tensors_of("mixtral", FP8, keep="experts"), reading)
    for tensors, message in (
        (tensors_of("mixtral", INT4_ASYMMETRIC), "^expert .*would be uint4/group 32 asym"),
        (tensors_of("mixtral", keep="experts.1.w2"), r"experts\.1\.w2' stays float"),
        (tensors_of("mixtral", FP8, keep="experts.1.w2"), r"experts\.1\.w2' stays float"),
        (tensors_of("mixtral", keep="experts"), "stays float, and transformers cannot stack it"),
    ):
        with pytest.raises(SpecError, match=message):
            quantization_config(tensors, reading)


def test_floats_that_transformers_would_lose_while_it_joins_them() -> None:
    """Its reader of packed codes gives on nothing else; codes of 8-bit floats it leaves alone."""
    reading, _ = read("olmo_hybrid")
    quantization_config(tensors_of("olmo_hybrid", FP8), reading)
    with pytest.raises(SpecError, match=r"k_conv1d\.weight': is joined.*use preset fp8"):
        quantization_config(tensors_of("olmo_hybrid"), reading)


def test_a_module_is_read_as_its_directory(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "falcon", "falcon")
    reading = reading_of(open_pretrained("AutoModelForCausalLM", folder, {}, ()))
    assert reading is not None
    weight = "transformer.h.1.mlp.dense_4h_to_h.weight"
    assert not reading.obstacle(weight)
    assert reading.initializes([weight])
    assert reading.places == read("falcon")[0].places


def carrier(**shapes: tuple[int, ...]) -> Any:
    """Return a carrier of layers with these names and shapes."""
    named = {name.replace("_0_", ".0.").replace("__", "."): s for name, s in shapes.items()}
    layers = [Layer(n.removesuffix(".weight"), "MatMul", n, s) for n, s in named.items()]
    tensors = {
        n: StoredTensor(n, s, torch.float32, lambda: torch.empty(0)) for n, s in named.items()
    }
    matrices = [layer for layer in layers if len(layer.shape) == 2]
    return SimpleNamespace(layers=lambda: matrices, tensors=lambda: tensors)


def test_what_chooses_among_experts_is_found_by_its_rows() -> None:
    single = carrier(
        mlp__experts_0_up__weight=(32, 16),
        mlp__experts__7__up__weight=(32, 16),
        mlp__gate__weight=(8, 16),
        mlp__shared_gate__weight=(1, 16),
        mlp__shared__up__weight=(32, 16),
        attention__q__weight=(8, 16),
    )
    assert set(routers(single)) == {"mlp.gate", "mlp.shared_gate"}
    fused = carrier(mlp__experts__up=(4, 32, 16), mlp__choice__layer__weight=(4, 16))
    assert set(routers(fused)) == {"mlp.choice.layer"}
    divided = {f"mlp__experts__gate_up_proj__{i}": (32, 16) for i in range(4)}
    by_fuse = carrier(**divided, mlp__gate__weight=(4, 16), mlp__up__weight=(3, 16))
    assert set(routers(by_fuse)) == {"mlp.gate"}
    assert not routers(carrier(mlp__gate__weight=(8, 16), mlp__up__weight=(1, 16)))
