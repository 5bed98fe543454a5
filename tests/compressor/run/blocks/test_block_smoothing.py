"""``smooth`` on a checkpoint that stays in its files: the same function, and less is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.models.transformers.block_checkpoint import (
    BlockCheckpoint,
    open_blocks,
    opened_block,
)
from compressor.models.transformers.decoder import Decoder
from compressor.progress import Silent, quiet_libraries
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store
from compressor.run.workspace import Workspace
from compressor.spec.load import check_spec
from compressor.spec.source_text import Document
from tests.compressor.exporters.test_activation_formats import TOKENS, WORDS, spec

BLOCKS = 3
LARGE = 5  # a channel of the norms that is many times as large as the others
W8A8 = {"pass": "quantize-weights", "preset": "int8-w8a8", "method": "gptq"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outliers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=BLOCKS,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_libraries():
        network = transformers.LlamaForCausalLM(config)
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            elif "layernorm" in name:
                parameter.data[LARGE] = 60.0
        network.save_pretrained(path / "float32")
    np.savez(path / "tokens.npz", input_ids=TOKENS, labels=TOKENS)
    return path


def passed(folder: Path, output: Path, *steps: dict[str, Any]) -> tuple[BlockCheckpoint, Any]:
    value = spec(folder, "float32", {}, output)
    value = {k: v for k, v in value.items() if k not in ("metric", "limits")}
    value |= {"passes": list(steps), "data": {"calibration": value["data"]["calibration"]}}
    plan = make_plan(check_spec(Document(Path("spec.yaml"), value)))
    done = run_passes(Workspace(plan, Store(output), Silent()))
    carrier = done[-1].carrier
    assert isinstance(carrier, BlockCheckpoint)
    return carrier, done


def logits(carrier: BlockCheckpoint) -> torch.Tensor:
    tokens = torch.from_numpy(TOKENS)
    given = carrier.decoder.arguments(tokens)
    hidden = given[0].hidden
    for index in range(len(carrier.decoder.blocks)):
        hidden = carrier.decoder.run(opened_block(carrier, index), hidden, given[index])
    return carrier.decoder.logits(tokens, hidden)


def lost(carrier: BlockCheckpoint, wanted: torch.Tensor) -> float:
    return float((logits(carrier) - wanted).norm() / wanted.norm())


def test_the_function_stays_and_rounding_loses_less(folder: Path, tmp_path: Path):
    before = open_blocks(folder / "float32")
    wanted = logits(before)
    smoothed, steps = passed(folder, tmp_path / "smooth", {"pass": "smooth"})
    assert lost(smoothed, wanted) < 1e-5
    norm = "model.layers.1.input_layernorm.weight"
    new, old = (c.tensors()[norm].read() for c in (smoothed, before))
    assert old[LARGE] == 60
    assert new[LARGE] < 30
    weight = "model.layers.1.self_attn.q_proj.weight"
    q, v = (c.tensors()[weight].read() for c in (smoothed, before))
    torch.testing.assert_close(q * new, v * old, rtol=1e-4, atol=1e-5)
    changed = {row["name"] for row in steps[0].result["layers"]}
    assert {"model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"} <= changed
    without, _ = passed(folder, tmp_path / "without", W8A8)
    after, _ = passed(folder, tmp_path / "after", {"pass": "smooth"}, W8A8)
    assert lost(after, wanted) < 0.7 * lost(without, wanted)


def test_layers_that_are_kept_are_not_scaled(folder: Path, tmp_path: Path):
    rules = [{"match": "*.q_proj", "skip": True}]
    smoothed, _ = passed(folder, tmp_path / "run", {"pass": "smooth", "layers": rules})
    before = open_blocks(folder / "float32")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm"):
        key = f"model.layers.0.{name}.weight"
        assert torch.equal(smoothed.tensors()[key].read(), before.tensors()[key].read())
    assert lost(smoothed, logits(before)) < 1e-5


@pytest.mark.slow
def test_a_killed_run_begins_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It keeps nothing of its stages, and what entered the first blocks is gone."""
    whole, _ = passed(folder, tmp_path / "whole", {"pass": "smooth"})
    opener = Decoder.open

    def killed(self: Decoder, index: int, folder: Path | None = None) -> torch.nn.Module:
        if index == BLOCKS - 1:
            raise KeyboardInterrupt
        return opener(self, index, folder)

    monkeypatch.setattr(Decoder, "open", killed)
    with pytest.raises(KeyboardInterrupt):
        passed(folder, tmp_path / "killed", {"pass": "smooth"})
    monkeypatch.setattr(Decoder, "open", opener)
    again, _ = passed(folder, tmp_path / "killed", {"pass": "smooth"})
    for name, tensor in whole.tensors().items():
        assert torch.equal(again.tensors()[name].read(), tensor.read()), name
