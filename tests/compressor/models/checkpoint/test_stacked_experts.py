"""Experts in stacks become layers of their own, and stacks again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.checkpoint.rows import read_rows
from compressor.models.checkpoint.stacked_experts import restacked, unstacked

EXPERTS, HIDDEN, INNER = 3, 8, 5
PATH = "model.layers.0.feed_forward"
STACKS = {
    f"{PATH}.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
    f"{PATH}.experts.down_proj": (EXPERTS, INNER, HIDDEN),
}
SHAPES = {
    "model.embed_tokens.weight": (11, HIDDEN),
    f"{PATH}.router.weight": (EXPERTS, HIDDEN),
    **STACKS,
    "model.norm.weight": (HIDDEN,),
}


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=draw, dtype=torch.bfloat16) for n, s in SHAPES.items()}


def opened(folder: Path, model_type: str) -> CheckpointCarrier:
    """Open a checkpoint whose stacks lie in one shard and whose other tensors in another."""
    tensors = weights()
    parts = [
        {n: tensors[n] for n in tensors if (n in STACKS) is stacks} for stacks in (False, True)
    ]
    index = {}
    for number, part in enumerate(parts, 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        index |= dict.fromkeys(part, name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return open_checkpoint(folder)


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text"])
def test_an_expert_is_three_linear_layers(model_type: str, tmp_path: Path) -> None:
    carrier = unstacked(opened(tmp_path, model_type))
    parts = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    expected = {
        f"{PATH}.experts.{expert}.{part}": shape
        for expert in range(EXPERTS)
        for part, shape in parts.items()
    }
    layers = {layer.name: layer for layer in carrier.layers() if ".experts." in layer.name}
    assert {name: layer.shape for name, layer in layers.items()} == expected
    held = weights()
    x = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
    both = x @ held[f"{PATH}.experts.gate_up_proj"][1]
    gate, up = (carrier.weight(layers[f"{PATH}.experts.1.{n}"]) for n in ("gate_proj", "up_proj"))
    torch.testing.assert_close(both, torch.cat([x @ gate.T, x @ up.T], 1))
    some = read_rows(carrier, layers[f"{PATH}.experts.2.down_proj"], 2, 6)
    torch.testing.assert_close(some, held[f"{PATH}.experts.down_proj"][2].T[2:6])


def test_layers_together_are_the_stacks(tmp_path: Path) -> None:
    carrier = unstacked(opened(tmp_path, "llama4"))
    single = {name: tensor.read() for name, tensor in carrier.tensors().items()}
    assert restacked(single, {"model_type": "qwen3_moe"}) is single  # its files have single experts
    found = restacked(single, carrier.config)
    wanted = weights()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_layers_stay_in_the_shard_of_their_stack(tmp_path: Path) -> None:
    carrier = unstacked(opened(tmp_path, "llama4"))
    first, second = carrier.source.shards
    assert set(first.tensors) == SHAPES.keys() - STACKS.keys()
    assert set(second.tensors) == {n for n in carrier.tensors() if ".experts." in n}


def test_other_models_keep_their_stacks(tmp_path: Path) -> None:
    carrier = opened(tmp_path, "gpt_oss")
    assert unstacked(carrier) is carrier
