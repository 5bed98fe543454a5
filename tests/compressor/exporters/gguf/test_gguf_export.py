"""The exporter ``gguf``: what is written is what was meant, and what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import ArtifactError, ModelError, SpecError
from compressor.exporters.gguf.exporter import GgufExporter
from compressor.exporters.gguf.reading import GgufFile, network_of
from compressor.exporters.gguf.shapes import Sliding, shape_of
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.onnx.carrier import open_onnx
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.networks import completed
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types import exporter as exporters
from compressor.types.passes import PassContext
from tests.compressor.exporters.gguf.folders import (
    CONTEXT,
    KINDS,
    SIZES,
    WORDS,
    quantized,
    save,
    save_network,
    with_pictures,
    written,
)
from tests.compressor.tiny_project import tiny_onnx

pytest.importorskip("gguf", reason="gguf is not installed")

TOKENS = np.random.default_rng(0).integers(2, WORDS, (2, 24))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def logits(network: Any) -> np.ndarray:
    with torch.inference_mode():
        values: np.ndarray = network(input_ids=torch.from_numpy(TOKENS)).logits.numpy()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_alone_gives_the_network(kind: str, tmp_path: Path) -> None:
    network = save(tmp_path / kind, kind)
    path = written(open_checkpoint(tmp_path / kind), tmp_path / "out")
    found = GgufExporter().open(path).run({"input_ids": TOKENS, "labels": TOKENS})
    assert list(found) == ["output"]
    np.testing.assert_allclose(found["output"], logits(network), rtol=0, atol=2e-4)


def test_context_ends_where_attention_would_slide(tmp_path: Path) -> None:
    save(tmp_path / "mistral", "mistral")
    file = GgufFile(written(open_checkpoint(tmp_path / "mistral"), tmp_path / "out"))
    assert file.value("llama.context_length") == 64


_SLOWER = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar 16, only 32"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "but the last of every 2"),
        ("gemma2", {"attn_logit_softcapping": None}, "no bounds of scores and logits"),
        ("gemma3", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar 16, only 32"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}, "but the last of every 6"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "bounds of scores or logits"),
        ("gemma3", {"use_bidirectional_attention": True}, "attention that sees later tokens"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": _SLOWER, "sliding_attention": _SLOWER}},
            "'rope_theta': 5000.0} where attention slides",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_gemma_that_llama_cpp_would_compute_otherwise(
    kind: str, values: dict[str, Any], message: str
) -> None:
    name, usual = KINDS[kind]
    given = getattr(transformers, name)(**{**SIZES, **usual}).to_dict()
    shape_of(given, WORDS)
    with pytest.raises(SpecError, match=message):
        shape_of({**given, **values}, WORDS)


@pytest.mark.parametrize(
    ("blocks", "scalar", "fits"), [(62, 16, True), (62, 32, False), (61, 32, True)]
)
def test_scores_of_the_largest_gemma3_are_scaled_by_the_share_of_a_head(blocks, scalar, fits):
    given = transformers.Gemma3TextConfig(
        **{
            **SIZES,
            **KINDS["gemma3"][1],
            "num_hidden_layers": blocks,
            "query_pre_attn_scalar": scalar,
        }
    ).to_dict()
    with nullcontext() if fits else pytest.raises(SpecError, match="only 16"):
        shape_of(given, WORDS)


def test_a_config_of_few_numbers_has_those_of_its_class() -> None:
    # What the published gemma-3-4b has of its text: the class has defaults for the others.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    shape = shape_of(completed({"model_type": "gemma3", "text_config": text}), WORDS)
    assert (shape.heads, shape.key_heads, shape.head_width) == (8, 4, 256)
    assert (shape.rope_base, shape.linear, shape.context) == (1e6, 8.0, 131072)
    assert shape.sliding == Sliding(1024)


def test_of_a_network_that_reads_pictures_the_text_is_written(tmp_path: Path) -> None:
    network = save_network(tmp_path / "dir", with_pictures())
    carrier = quantized(tmp_path / "dir", preset="int4-g32")
    path = written(carrier, tmp_path / "out")
    file = GgufFile(path)
    assert file.names == GgufFile(written(open_text(tmp_path), tmp_path / "text")).names
    assert file.kind("blk.0.attn_q.weight") == "Q4_0"
    (remark,) = GgufExporter().remarks(carrier)
    pictured = [
        n for n in network.state_dict() if "language_model" not in n and n != "lm_head.weight"
    ]
    assert f"{len(pictured)} tensors of" in remark
    assert "--mmproj" in remark
    assert GgufExporter().remarks(open_text(tmp_path)) == ()
    (proof,) = GgufExporter().prove(carrier, path)
    assert proof.known


def open_text(folder: Path) -> CheckpointCarrier:
    if not (folder / "gemma3").is_dir():
        save(folder / "gemma3", "gemma3")
    return open_checkpoint(folder / "gemma3")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"preset": "int4-g32"}, "Q4_0"),
        ({"preset": "int8"}, "Q8_0"),
        ({"bits": 6, "group": 32}, "Q8_0"),
        ({"bits": 5, "group": 32}, "Q5_0"),
        ({"preset": "mxfp4"}, "MXFP4"),
        ({"bits": 4, "group": 32, "symmetric": False}, "Q4_1"),
    ],
)
def test_codes_of_a_pass_are_kept(options: dict[str, Any], kind: str, llama: Path, tmp_path: Path):
    carrier = quantized(llama, **options)
    path = written(carrier, tmp_path)
    file = GgufFile(path)
    assert file.kind("blk.0.attn_q.weight") == kind
    assert file.kind("token_embd.weight") == "F32"
    network = network_of(file)
    tensors = carrier.tensors()
    for name, parameter in network.named_parameters():
        codes = tensors[name].codes
        value = tensors[name].read()
        if codes is not None:
            value = codes.compute(value).dequantize()
        assert torch.equal(parameter, value), name
    assert "bit for bit" in GgufExporter().check_written(carrier, path)
    (proof,) = GgufExporter().prove(carrier, path)
    assert proof.known


def test_a_module_and_its_checkpoint_give_the_same_file(llama: Path, tmp_path: Path) -> None:
    streamed = quantized(llama, preset="int4-g32")
    codes = {name: t.codes for name, t in streamed.tensors().items() if t.codes is not None}
    opened = open_pretrained("AutoModelForCausalLM", llama, {}, ())
    from_module = TorchCarrier(opened.module, opened.inputs, None, codes, llama)
    paths = (written(from_module, tmp_path / "one"), written(streamed, tmp_path / "two"))
    files = [GgufFile(path) for path in paths]
    assert files[0].names == files[1].names
    assert all(torch.equal(*(f.raw(name) for f in files)) for name in files[0].names)


def test_the_same_model_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    paths = [
        written(quantized(llama, preset="int4-g32"), tmp_path / name) for name in ("one", "two")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_half_floats_keep_their_type_but_for_norms(tmp_path: Path) -> None:
    network = save(tmp_path / "half", dtype=torch.bfloat16)
    file = GgufFile(written(open_checkpoint(tmp_path / "half"), tmp_path / "out"))
    assert file.kind("blk.0.ffn_up.weight") == "BF16"
    assert file.kind("blk.0.ffn_norm.weight") == "F32"
    norm = network.model.layers[0].post_attention_layernorm.weight
    assert torch.equal(file.read("blk.0.ffn_norm.weight"), norm.to(torch.float32))


@pytest.mark.parametrize("floats", ["f16", "q8_0", "q5_0"])
def test_other_matrices_are_rounded_where_the_metric_sees_it(floats: str, llama: Path, tmp_path):
    carrier = open_pretrained("AutoModelForCausalLM", llama, {}, ())
    file = GgufFile(written(carrier, tmp_path, floats=floats))
    assert file.kind("token_embd.weight") == floats.upper()
    assert file.kind("output_norm.weight") == "F32"
    meant = dict(carrier.module.named_parameters())["model.embed_tokens.weight"]
    error = (file.read("token_embd.weight") - meant).abs().max() / meant.abs().max()
    assert (
        0 < float(error) < {"f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2, "q5_0": 0.07}.get(floats, 0.2)
    )
    with pytest.raises(SpecError, match="judged only by its codes"):
        GgufExporter(floats=floats).check(open_checkpoint(llama))


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "phi3"}, "no architecture for a model of type 'phi3'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        (
            {"model_type": "qwen2", "rope_parameters": {"rope_type": "llama3"}},
            "rope_type 'llama3' of a qwen2",
        ),
        ({"model_type": "qwen3"}, "no place for 'model.layers.0.mlp.down_proj.bias'"),
    ],
)
def test_what_llama_cpp_has_no_code_for_is_refused(values, message: str, copy: Path) -> None:
    carrier = open_checkpoint(copy)
    edit(copy, **values)
    carrier = CheckpointCarrier(open_checkpoint(copy).source, carrier.tensors(), carrier.layers())
    with pytest.raises(SpecError, match=message):
        GgufExporter().check(carrier)


def test_a_missing_tensor_is_found_before_anything_is_written(copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"misses 'output_norm\.weight'"):
        GgufExporter().check(open_checkpoint(copy))


def test_a_graph_is_refused(tmp_path: Path) -> None:
    onnx.save(tiny_onnx(), tmp_path / "net.onnx")
    with pytest.raises(SpecError, match="needs a Hugging Face directory"):
        GgufExporter().check(open_onnx(tmp_path / "net.onnx", 21))


@pytest.mark.parametrize(
    "options", [{"bits": 4, "group": 16}, {"preset": "fp8"}, {"preset": "nvfp4"}]
)
def test_codes_on_no_grid_are_refused(options: dict[str, Any], llama: Path) -> None:
    with pytest.raises(SpecError, match="for which GGUF has no blocks"):
        GgufExporter().check(quantized(llama, **options))


def test_scales_that_no_block_holds_are_refused(llama: Path, tmp_path: Path) -> None:
    step = QuantizeWeights(preset="int4-g32")
    carrier = step.apply(open_checkpoint(llama), PassContext(), {}).carrier
    with pytest.raises(ModelError, match="a scale is not a float16 number"):
        written(carrier, tmp_path)


def test_layers_that_do_not_divide_into_blocks_stay_float(llama: Path) -> None:
    carrier = open_checkpoint(llama)
    odd = carrier.with_weights({"model.layers.0.mlp.up_proj.weight": torch.randn(96, 40)})
    survey = QuantizeWeights(preset="int8").survey(odd, CONTEXT)
    reasons = {plan.name: plan.reason for plan in survey.layers}
    assert "40 columns do not divide into GGUF's blocks" in reasons["model.layers.0.mlp.up_proj"]
    assert not reasons["model.layers.0.mlp.gate_proj"]


def test_nan_is_refused(copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 3] = float("nan")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"embed_tokens\.weight': holds values that are NaN"):
        written(open_checkpoint(copy), tmp_path)


def test_without_the_package_the_remedy_is_named(llama: Path, monkeypatch) -> None:
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"compressor\[gguf\]"):
        GgufExporter().check(open_checkpoint(llama))


def test_a_changed_byte_is_found(llama: Path, tmp_path: Path) -> None:
    carrier = quantized(llama, preset="int4-g32")
    path = written(carrier, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(ArtifactError, match="holds other values than the model"):
        GgufExporter().check_written(carrier, path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.5, 0.99])
def test_a_cut_file_is_refused(share: float, llama: Path, tmp_path: Path) -> None:
    path = written(open_checkpoint(llama), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ArtifactError):
        GgufExporter().open(path)


def test_a_damaged_head_never_gives_a_traceback(llama: Path, tmp_path: Path) -> None:
    path = written(open_checkpoint(llama), tmp_path)
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    opened = 0
    for place in draw.integers(0, 1200, 30):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(draw.integers(8))
        path.write_bytes(changed)
        with suppress(ArtifactError):
            GgufExporter().open(path)
            opened += 1
    assert opened < 30
