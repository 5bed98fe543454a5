"""A checkpoint calibrated from its files: the codes of the run in memory, one block at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import CompressorError, InputError, ModelError, SpecError
from compressor.models.transformers.block_checkpoint import open_blocks
from compressor.models.transformers.decoder import Decoder
from compressor.passes.prune.sparse.pruning import Pruner
from compressor.passes.quantize.weights.gptq import GptqWork
from compressor.progress import Silent, quiet_libraries
from compressor.report.run import run_spec
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from compressor.types.carrier import Carrier

LAYERS, WORDS = 3, 50
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
GPTQ = {"pass": "quantize-weights", "method": "gptq", "bits": 4, "group": 16}
FACTORY = "transformers.AutoModelForCausalLM"


def folder_of(path: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    with quiet_libraries():
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        network.to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tokens = np.random.default_rng(0).integers(0, WORDS, (10, 24))
    np.savez(folder / "tokens.npz", input_ids=tokens)
    folder_of(folder / "wide", transformers.LlamaConfig(**SIZES))
    folder_of(folder / "half", transformers.LlamaConfig(**SIZES), torch.bfloat16)
    # The same numbers, each of which bfloat16 can hold, as float32.
    weights = load_file(folder / "half" / "model.safetensors")
    (folder / "widened").mkdir()
    config = json.loads((folder / "wide" / "config.json").read_text())
    (folder / "widened" / "config.json").write_text(json.dumps(config))
    widened = {name: tensor.float() for name, tensor in weights.items()}
    save_file(widened, folder / "widened" / "model.safetensors", {"format": "pt"})
    return folder


def value_of(
    folder: Path, name: str, step: Mapping[str, Any], output: Path, **model: Any
) -> dict[str, Any]:
    data = {"npz": str(folder / "tokens.npz"), "inputs": {"input_ids": "input_ids"}, "batch": 4}
    return {
        "version": 1,
        "name": "tiny",
        "model": {"checkpoint": str(folder / name), **model},
        "data": {"calibration": data},
        "passes": [dict(step)],
        "exports": [{"format": "safetensors", "layout": "compressed-tensors"}],
        "output": str(output),
    }


def workspace(folder: Path, name: str, step: Mapping[str, Any], output: Path, **model: Any) -> Any:
    value = value_of(folder, name, step, output, **model)
    plan = make_plan(check_spec(Document(Path("spec.yaml"), value)))
    return Workspace(plan, Store(output), Silent())


def passed(*given: Any, **model: Any) -> Carrier:
    (step,) = run_passes(workspace(*given, **model))
    carrier: Carrier = step.carrier
    return carrier


def opened_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that the number of each block joins as it is opened."""
    opened: list[int] = []
    opener = Decoder.open

    def noted(self: Decoder, index: int, folder: Path) -> torch.nn.Module:
        opened.append(index)
        return opener(self, index, folder)

    monkeypatch.setattr(Decoder, "open", noted)
    return opened


def values(carrier: Carrier) -> dict[str, torch.Tensor]:
    """Return codes and floats of all layers, in canonical form."""
    found = {}
    for layer in carrier.layers():
        tensor = carrier.tensors()[layer.weight]
        matrix = layer.canonical(tensor.read())
        found[layer.name] = matrix if tensor.codes is None else tensor.codes.compute(matrix).codes
    return found


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("awq", "prune-wanda", "prune-sparsegpt")
        ),
    ],
)
def test_the_codes_are_those_of_the_run_in_memory(llama: Path, tmp_path: Path, name: str):
    quantizes = name in ("gptq", "awq")
    step = {**GPTQ, "method": name} if quantizes else {"pass": name, "sparsity": 0.5}
    blocks = passed(llama, "wide", step, tmp_path / "blocks")
    whole = passed(llama, "wide", step, tmp_path / "whole", factory=FACTORY)
    float_model = open_blocks(llama / "wide")
    ours, theirs, before = (values(carrier) for carrier in (blocks, whole, float_model))
    assert ours.keys() == theirs.keys()
    inside = [key for key in ours if ".layers." in key]
    assert len(inside) == 7 * LAYERS
    for key in inside:
        assert not torch.equal(ours[key].float(), before[key]), key
        if name == "prune-sparsegpt":  # it solves for floats, which differ in the last bits
            assert ((ours[key] == 0) == (theirs[key] == 0)).all(), key
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(ours[key], theirs[key]), key
    if name == "awq":  # norms absorb factors
        norm = "model.layers.1.post_attention_layernorm.weight"
        new, wanted, old = (c.tensors()[norm].read() for c in (blocks, whole, float_model))
        torch.testing.assert_close(new, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(new, old, rtol=0.01)


def test_bfloat16_is_computed_with_as_float32(llama: Path, tmp_path: Path):
    step = {"pass": "prune-wanda", "sparsity": 0.5}
    halves = values(passed(llama, "half", step, tmp_path / "half"))
    wide = values(passed(llama, "widened", step, tmp_path / "wide"))
    for key, pruned in halves.items():
        assert pruned.dtype == torch.bfloat16
        assert torch.equal(pruned.float(), wide[key]), key


def test_a_killed_run_goes_on_with_the_next_stage(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = values(passed(llama, "half", GPTQ, tmp_path / "whole"))
    quantized, calls = GptqWork.quantized, 0

    def counted(self: GptqWork, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return quantized(self, *given)

    monkeypatch.setattr(GptqWork, "quantized", counted)
    with pytest.raises(KeyboardInterrupt):
        passed(llama, "half", GPTQ, tmp_path / "killed")
    entered = sorted(path.name for path in (tmp_path / "killed").glob("partial-*/*"))
    assert entered == ["block-1-of-process-0-1"], "what enters the block that was begun"
    opened = opened_blocks(monkeypatch)
    again = values(passed(llama, "half", GPTQ, tmp_path / "killed"))
    stages = 2 * LAYERS + 1  # the last is what lies outside blocks
    assert calls == 4 + stages - 3, "three stages were done"
    assert opened == [1, 2], "block 0 is not run again"
    assert not list((tmp_path / "killed").glob("partial-*"))
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole)


def test_each_block_sees_what_the_pruned_ones_before_it_give(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without that the last layers would be pruned by what the float model gives them."""
    step = {"pass": "prune-wanda", "sparsity": 0.7}
    seen: dict[str, torch.Tensor] = {}
    pruned = Pruner.pruned

    def noted(self: Pruner, rows: Any, pattern: Any, request: Any, statistics: Any) -> Any:
        if request is not None:
            seen[rows.layer.name] = statistics[request.key][0]
        return pruned(self, rows, pattern, request, statistics)

    monkeypatch.setattr(Pruner, "pruned", noted)
    carrier = passed(llama, "wide", step, tmp_path / "run")
    with quiet_libraries():
        network = transformers.AutoModelForCausalLM.from_pretrained(llama / "wide")
    tokens = torch.from_numpy(np.load(llama / "tokens.npz")["input_ids"])
    for stage in ("self_attn.q_proj", "mlp.down_proj"):
        norms = []
        last = f"model.layers.{LAYERS - 1}.{stage}"

        def look(_: Any, given: Any, norms: list[torch.Tensor] = norms) -> None:
            norms.append(given[0].reshape(-1, given[0].shape[-1]).norm(dim=0))

        handle = network.get_submodule(last).register_forward_pre_hook(look)
        state = {name: tensor.read() for name, tensor in carrier.tensors().items()}
        for part in ("gate", "up", "down"):  # of the same block, pruned later or with it
            name = f"model.layers.{LAYERS - 1}.mlp.{part}_proj.weight"
            state[name] = network.get_parameter(name).data.clone()
        with torch.inference_mode():
            network(tokens)
            network.load_state_dict(state)
            network(tokens)
        handle.remove()
        before, after = norms
        expected = seen[last] * (after.norm() / seen[last].norm())
        torch.testing.assert_close(expected, after, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(before, after, rtol=1e-2)
        with quiet_libraries():
            network = transformers.AutoModelForCausalLM.from_pretrained(llama / "wide")


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SIZES, head_dim=8),
        transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
        transformers.OPTConfig(
            vocab_size=WORDS, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
            num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=64,
        ),
        transformers.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if "key" not in k}),
        transformers.BambaConfig(**SIZES, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_blocks_one_by_one_give_what_the_network_gives(tmp_path: Path, config: Any):
    folder = folder_of(tmp_path / "m", config)
    decoder = open_blocks(folder).decoder
    tokens = torch.randint(0, WORDS, (2, 20), generator=torch.Generator().manual_seed(0))
    given = decoder.arguments(tokens)
    hidden = given[0].hidden
    with quiet_libraries():
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )
    expected = []
    lists = [m for m in network.modules() if isinstance(m, torch.nn.ModuleList)]
    lists[0][-1].register_forward_hook(lambda *given: expected.append(given[2]))
    with torch.inference_mode():
        network(tokens)
    for index in range(len(decoder.blocks)):
        hidden = decoder.run(decoder.open(index), hidden, given[index])
    last = expected[0] if isinstance(expected[0], torch.Tensor) else expected[0][0]
    torch.testing.assert_close(hidden, last)


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_run_in_memory(llama: Path, tmp_path: Path):
    tokens = np.load(llama / "tokens.npz")["input_ids"]
    labels = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -100)], axis=1)
    np.savez(tmp_path / "judged.npz", input_ids=tokens, labels=labels)
    found = []
    for name, model in (("blocks", {}), ("whole", {"factory": FACTORY})):
        spec = value_of(llama, "wide", GPTQ, tmp_path / name, **model)
        fields = {"input_ids": "input_ids"}
        evaluation = {"npz": str(tmp_path / "judged.npz"), "inputs": fields, "target": "labels"}
        spec["data"]["evaluation"] = {**evaluation, "batch": 4}
        spec |= {"metric": "perplexity", "limits": {"metric-drop": 1e6, "size-ratio": 1}}
        result = run_spec(check_spec(Document(Path("spec.yaml"), spec)))
        assert result.report["verdict"] == "passed", result.report["limits"]
        found.append(result.report)
    ours, theirs = (report["artifacts"][0] for report in found)
    for key in ("metric_drop", "kl"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
    assert ours["metric"]["value"] == pytest.approx(theirs["metric"]["value"], rel=1e-6)
    before, expected = (report["baseline"]["metric"]["value"] for report in found)
    assert before == pytest.approx(expected, rel=1e-6)
    assert 0.001 < ours["kl"] < 1
    assert not list((tmp_path / ".compressor" / "blocks").glob(".staging-*"))
    assert "nats a token of KL divergence" in (tmp_path / "blocks" / "README.md").read_text()


def test_of_other_models_it_says_why_not(llama: Path, tmp_path: Path):
    bert = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    with quiet_libraries():
        transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    np.savez(tmp_path / "tokens.npz", **np.load(llama / "tokens.npz"))
    with pytest.raises(SpecError, match="is a BertModel, and only causal language models"):
        passed(tmp_path, "bert", GPTQ, tmp_path / "out")
    with pytest.raises(SpecError, match="is no Hugging Face directory"):
        open_blocks(bare(tmp_path))
    with pytest.raises(SpecError, match=r"Linear has no list of blocks of one class; its modules"):
        Decoder(torch.nn.Linear(2, 2))


def bare(folder: Path) -> Path:
    save_file({"a.weight": torch.zeros(4, 4)}, folder / "bare.safetensors")
    return folder / "bare.safetensors"


def test_a_weight_that_is_not_finite_is_named(llama: Path, tmp_path: Path):
    weights = load_file(llama / "wide" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_bytes((llama / "wide" / "config.json").read_bytes())
    save_file(weights, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
    np.savez(tmp_path / "tokens.npz", **np.load(llama / "tokens.npz"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.* NaN"):
        passed(tmp_path, "bad", GPTQ, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("??/*/changes.safetensors"))) == 2, "block 0 is kept"


def test_a_file_that_is_cut_in_the_middle_of_a_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To read it would kill the process; what was finished serves once the file is back."""
    (tmp_path / "cut").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "cut" / name).write_bytes((llama / "half" / name).read_bytes())
    np.savez(tmp_path / "tokens.npz", **np.load(llama / "tokens.npz"))
    shard = tmp_path / "cut" / "model.safetensors"
    whole, opener = shard.read_bytes(), Decoder.open

    def opened(self: Decoder, index: int, folder: Path) -> torch.nn.Module:
        module = opener(self, index, folder)
        if index == 1:
            shard.write_bytes(whole[:-100])
        return module

    monkeypatch.setattr(Decoder, "open", opened)
    step = {"pass": "prune-wanda", "sparsity": 0.5}
    with pytest.raises(ModelError, match=r"is missing or has changed .*finished blocks are kept"):
        passed(tmp_path, "cut", step, tmp_path / "out")
    shard.write_bytes(whole)
    monkeypatch.setattr(Decoder, "open", opener)
    again = values(passed(tmp_path, "cut", step, tmp_path / "out"))
    untouched = values(passed(llama, "half", step, tmp_path / "untouched"))
    assert all(torch.equal(again[key], untouched[key]) for key in untouched)


def test_a_disk_that_fills_at_a_later_block(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Numpy does not say which error of the system it was."""
    step = {"pass": "prune-wanda", "sparsity": 0.5}
    whole = values(passed(llama, "half", step, tmp_path / "whole"))
    save = np.save

    def full(path: Path, array: Any) -> None:
        if "block-2" in str(path):
            raise OSError("200000 requested and 76768 written")
        save(path, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(InputError, match=r"is full .*free some space and run the same command"):
            passed(llama, "half", step, tmp_path / "out")
    again = values(passed(llama, "half", step, tmp_path / "out"))
    assert all(torch.equal(again[key], whole[key]) for key in whole)


@pytest.mark.parametrize(
    "step",
    [
        {"pass": "quantize-static"},
        {"pass": "prune-nm", "criterion": "wanda", "permute": True},
    ],
    ids=str,
)
def test_passes_that_want_more_than_blocks_are_refused(
    llama: Path, tmp_path: Path, step: dict[str, Any]
):
    with pytest.raises(CompressorError, match=r"needs .*; a bare checkpoint offers"):
        workspace(llama, "wide", step, tmp_path)


def test_tokens_beyond_the_vocabulary(llama: Path, tmp_path: Path):
    folder_of(tmp_path / "wide", transformers.LlamaConfig(**{**SIZES, "vocab_size": WORDS - 9}))
    np.savez(tmp_path / "tokens.npz", **np.load(llama / "tokens.npz"))
    with pytest.raises(CompressorError, match="the model's table has 41 rows"):
        workspace(tmp_path, "wide", GPTQ, tmp_path)
