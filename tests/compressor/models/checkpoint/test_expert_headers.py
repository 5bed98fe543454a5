"""Stacks of experts in the form of memory are read as the layers of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.checkpoint.rows import read_rows
from compressor.progress import quiet_libraries

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
KINDS = {
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=3),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_a_checkpoint_are_the_same(kind: str, tmp_path: Path) -> None:
    with quiet_libraries():
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(KINDS[kind])
        network.save_pretrained(tmp_path / "usual")
        network.save_pretrained(tmp_path / "stacks", save_original_format=False)
    usual, stacks = (open_checkpoint(tmp_path / name) for name in ("usual", "stacks"))
    wanted, found = usual.tensors(), stacks.tensors()
    assert found.keys() == wanted.keys()
    assert any(".experts.2." in name for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].read(), tensor.read()), name
    layers = {layer.name: layer for layer in stacks.layers()}
    assert layers == {layer.name: layer for layer in usual.layers()}
    for name, layer in layers.items():
        assert torch.equal(read_rows(stacks, layer, 1, 3), read_rows(usual, layer, 1, 3)), name
