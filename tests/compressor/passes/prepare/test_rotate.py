"""``rotate``: the network computes the same, and its channels are alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import SpecError
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.graph.costs import model_bytes
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.checkpoint.dequantized import dequantized
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.block_checkpoint import (
    BlockCheckpoint,
    open_blocks,
    opened_block,
)
from compressor.models.transformers.carrier import open_pretrained
from compressor.passes.prepare.rotate import Rotate
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.progress import quiet_libraries
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from tests.compressor.exporters.gguf.folders import WIDTH, WORDS, save
from tests.compressor.exporters.test_activation_formats import STATIC, ran, spec

CONTEXT = PassContext(seed=3)
ANY = {"metric-drop": 1e6, "size-ratio": 2.0}
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(2, WORDS, (2, 24)))


def saved(folder: Path, kind: str) -> Any:
    """Save a network whose norms have scales of their own."""
    save(folder, kind)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.rand(tensor.shape, generator=generator) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def network(folder: Path) -> TorchCarrier:
    return open_pretrained("AutoModelForCausalLM", folder, {}, ())


def tokens_of(folder: Path) -> None:
    """Save the tokens that a spec calibrates with and judges by."""
    labels = np.pad(TOKENS[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    np.savez(folder / "tokens.npz", input_ids=TOKENS, labels=labels)


def perplexity(folder: Path) -> float:
    """Return what transformers gives for these tokens."""
    with quiet_libraries():
        module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    values = logits(module)[:, :-1].reshape(-1, WORDS)
    return float(torch.nn.functional.cross_entropy(values, TOKENS[:, 1:].reshape(-1)).exp())


def logits(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        values: torch.Tensor = module(input_ids=TOKENS).logits
    return values


@pytest.mark.parametrize("kind", ["llama-linear", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("heads", [True, False])
def test_the_network_computes_the_same(kind: str, heads: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / kind, kind)
    before = network(folder)
    want = logits(before.module)
    stream = open_checkpoint(folder)
    after = Rotate(heads=heads).apply(stream, CONTEXT, {}).carrier
    assert isinstance(after, CheckpointCarrier)
    changed = {name: tensor.read() for name, tensor in after.tensors().items()}
    norms = [t for n, t in changed.items() if n.endswith(("layernorm.weight", "model.norm.weight"))]
    assert len(norms) == 5
    assert all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)
    original = stream.tensors()
    same = [n for n, t in changed.items() if torch.equal(t, original[n].read())]
    assert not [n for n in same if n.endswith("proj.weight")]
    before.module.load_state_dict(changed)
    error = (logits(before.module) - want).abs().max() / want.abs().max()
    assert error < 1e-5


def test_rows_alone_are_those_of_the_whole(tmp_path: Path) -> None:
    carrier = open_checkpoint(saved(tmp_path / "m", "qwen2"))
    after = Rotate().apply(carrier, CONTEXT, {}).carrier.tensors()
    for name in ("model.layers.1.self_attn.v_proj.weight", "model.embed_tokens.weight"):
        read: Any = after[name].read
        whole = read()
        assert torch.equal(read.rows(5, 23), whole[5:23])


@pytest.mark.slow  # the module is lowered
def test_the_module_gets_the_same_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "qwen3")
    stream = Rotate().apply(open_checkpoint(folder), CONTEXT, {}).carrier.tensors()
    module = Rotate().apply(network(folder), CONTEXT, {}).carrier.tensors()
    assert stream.keys() == module.keys()
    assert all(torch.equal(t.read(), module[n].read()) for n, t in stream.items())


def test_another_seed_is_another_rotation(tmp_path: Path) -> None:
    carrier = open_checkpoint(saved(tmp_path / "m", "mistral"))
    name = "model.layers.0.mlp.up_proj.weight"
    found = [
        Rotate().apply(carrier, PassContext(seed), {}).carrier.tensors()[name].read()
        for seed in (3, 3, 4)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def by_blocks(carrier: BlockCheckpoint) -> torch.Tensor:
    """Run a checkpoint as its passes have left it, one block after the other."""
    given = carrier.decoder.arguments(TOKENS)
    hidden = given[0].hidden
    for index in range(len(carrier.decoder.blocks)):
        hidden = carrier.decoder.run(opened_block(carrier, index), hidden, given[index])
    return carrier.decoder.logits(TOKENS, hidden)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-3"])  # the last's output layer is tied
def test_blocks_run_one_by_one_compute_the_same(kind: str, tmp_path: Path) -> None:
    before = open_blocks(saved(tmp_path / "m", kind))
    want = by_blocks(before)
    after = Rotate().apply(before, CONTEXT, {}).carrier
    assert isinstance(after, BlockCheckpoint)
    entered = [carrier.decoder.arguments(TOKENS)[0].hidden for carrier in (before, after)]
    assert not torch.allclose(*entered, rtol=0.1)
    error = (by_blocks(after) - want).abs().max() / want.abs().max()
    assert error < 1e-5
    assert torch.equal(by_blocks(before), want), "the first is what it was"


@pytest.mark.parametrize("kind", ["qwen3", "llama-3"])  # the second's output layer is tied
def test_tables_as_codes_are_run_as_they_are_meant(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", kind)
    step = QuantizeWeights(preset="int4-g32", embeddings=True)
    after = step.apply(open_blocks(folder), CONTEXT, {}).carrier
    assert isinstance(after, BlockCheckpoint)
    state = {name: dequantized(tensor) for name, tensor in after.tensors().items()}
    module = network(folder).module
    module.load_state_dict(state, strict=False)
    assert after.tensors()["model.embed_tokens.weight"].codes is not None
    torch.testing.assert_close(by_blocks(after), logits(module), rtol=1e-4, atol=1e-5)


def test_a_tied_output_layer_gets_a_weight_of_its_own(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "llama-3")
    want = logits(network(folder).module)
    before = open_checkpoint(folder)
    after = Rotate().apply(before, CONTEXT, {}).carrier
    (note,) = Rotate().survey(before, CONTEXT).notes
    size = WORDS * WIDTH * 4
    assert f"{size:,} bytes" in note
    assert model_bytes(Rotate().preview(before, CONTEXT, {})) == model_bytes(before) + size
    out = tmp_path / "out"
    out.mkdir()
    SafetensorsExporter(layout="compressed-tensors").write(after, out, USUAL)
    assert load_file(out / "model.safetensors").keys() == after.tensors().keys()
    module = network(out).module
    table, output = module.get_input_embeddings(), module.get_output_embeddings()
    assert table.weight.data_ptr() != output.weight.data_ptr()
    assert not torch.allclose(table.weight, output.weight, rtol=0.1)
    error = (logits(module) - want).abs().max() / want.abs().max()
    assert error < 1e-5
    assert "lm_head.weight" not in before.tensors(), "the first is what it was"


def test_a_weight_of_its_own_goes_into_the_last_of_several_files(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "llama-3")
    want = logits(module := network(folder).module)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    after = Rotate().apply(open_checkpoint(folder), CONTEXT, {}).carrier
    out = tmp_path / "out"
    out.mkdir()
    SafetensorsExporter(layout="compressed-tensors").write(after, out, USUAL)
    assert {p.name for p in out.glob("*.safetensors")} == {
        p.name for p in folder.glob("*.safetensors")
    }
    error = (logits(network(out).module) - want).abs().max() / want.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("own", [True, False])
def test_a_file_that_holds_a_tied_weight_twice(own: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "llama-3")
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.zeros_like(rows) if own else rows.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    after = Rotate().apply(open_checkpoint(folder), CONTEXT, {}).carrier.tensors()
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    want = Rotate().apply(open_checkpoint(folder), CONTEXT, {}).carrier.tensors()
    assert torch.equal(after["lm_head.weight"].read(), want["lm_head.weight"].read())


def test_rotated_tables_that_were_one_are_codes_of_their_own(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "llama-3")
    rotated = Rotate().apply(open_blocks(folder), CONTEXT, {}).carrier
    after = QuantizeWeights(preset="int4-g32", embeddings=True).apply(rotated, CONTEXT, {}).carrier
    assert isinstance(after, BlockCheckpoint)
    kept = [name for name, tensor in after.tensors().items() if tensor.codes is None]
    assert not [name for name in kept if "norm" not in name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    state = {name: dequantized(tensor) for name, tensor in after.tensors().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    want = logits(network(folder).module)
    torch.testing.assert_close(by_blocks(after), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_tied_checkpoint_is_rotated_and_quantized_by_one_spec(tmp_path: Path) -> None:
    saved(tmp_path / "float32", "llama-3")
    tokens_of(tmp_path)
    steps = [{"pass": "rotate"}, {"pass": "quantize-weights", **STATIC}]
    report = ran(spec(tmp_path, "float32", {}, tmp_path / "out", passes=steps, limits=ANY))
    artifact = report["artifacts"][0]
    assert any("outputs" in c["name"] and c["ok"] for c in artifact["checks"]), artifact["checks"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert perplexity(tmp_path / "out") == pytest.approx(artifact["metric"]["value"], rel=1e-4)


@pytest.mark.slow
def test_one_spec_rotates_calibrates_and_judges(tmp_path: Path) -> None:
    saved(tmp_path / "float32", "llama-linear")
    tokens_of(tmp_path)
    steps = [{"pass": "rotate"}, {"pass": "quantize-weights", **STATIC}]
    report = ran(spec(tmp_path, "float32", {}, tmp_path / "out", passes=steps))
    artifact = report["artifacts"][0]
    assert perplexity(tmp_path / "out") == pytest.approx(artifact["metric"]["value"], rel=1e-4)
    assert artifact["metric"]["value"] == pytest.approx(report["baseline"]["metric"]["value"], 0.1)


def refusal(carrier: Any) -> str:
    with pytest.raises(SpecError) as caught:
        Rotate().survey(carrier, CONTEXT)
    return str(caught.value)


def test_what_cannot_be_rotated_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "tied", "llama-3")
    assert "cannot turn a module's tied embeddings" in refusal(network(tmp_path / "tied"))
    save(tmp_path / "gemma", "gemma")
    assert "a model of type 'gemma'" in refusal(open_checkpoint(tmp_path / "gemma"))
    save(tmp_path / "biased", "llama")
    assert "has no place for" in refusal(open_checkpoint(tmp_path / "biased"))
    save(tmp_path / "m", "mistral")
    coded = QuantizeWeights(preset="int8").apply(open_checkpoint(tmp_path / "m"), CONTEXT, {})
    assert "is codes; put it before the pass" in refusal(coded.carrier)
    shutil.copytree(tmp_path / "m", tmp_path / "deeper")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "strange"}))
    assert "a model of type 'strange'" in refusal(open_checkpoint(tmp_path / "deeper"))
