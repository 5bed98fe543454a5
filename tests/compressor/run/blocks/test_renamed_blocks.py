"""Classes that rename the tensors of a checkpoint are run block by block from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compressor.errors import SpecError
from compressor.models.transformers.block_checkpoint import open_blocks, opened_block
from compressor.progress import quiet_libraries
from tests.compressor.exporters.test_activation_formats import TOKENS, WORDS, perplexity, ran, spec

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 16, "pad_token_id": 0,
}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "parts": (  # its blocks have attn and ffn in the file, self_attn and mlp in the class
        "DeepseekV4Config",
        {
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["hash_moe", "moe"], "moe_intermediate_size": 32, "o_groups": 2,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "o_lora_rank": 32,
            "qk_rope_head_dim": 8, "partial_rotary_factor": 0.5, "index_n_heads": 2,
            "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 256,
        },
        "attn.wq_a", "self_attn.q_a_proj", "head",
    ),
    "layers": (
        "Lfm3Config",
        {"layer_types": ["conv", "full_attention"], "intermediate_size": 64},
        "self_attn.gate_proj", "self_attn.g_proj", "model.embed_tokens",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CLASSES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, str, str]:
    kind, more, *names = CLASSES[request.param]
    if not hasattr(transformers, kind):
        pytest.skip(f"this version of transformers has no {kind}")
    path = tmp_path_factory.mktemp("renamed")
    torch.manual_seed(0)
    with quiet_libraries():
        config = getattr(transformers, kind)(**SIZES, **more)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        network.save_pretrained(path / "float")
    labels = np.concatenate([TOKENS[:, 1:], np.full((len(TOKENS), 1), -100)], axis=1)
    np.savez(path / "tokens.npz", input_ids=TOKENS, labels=labels)
    return path, names[0], names[1], names[2]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_what_the_blocks_report_is_what_transformers_computes(
    saved: tuple[Path, str, str, str], tmp_path: Path, method: str
):
    folder, stored, *_ = saved
    keys = {"bits": 4, "group": 16, "method": method}
    report = ran(spec(folder, "float", keys, tmp_path / "out"))
    reported = report["artifacts"][0]["metric"]["value"]
    assert perplexity(tmp_path / "out") == pytest.approx(reported, rel=1e-5)
    rows = {row["name"]: row["scheme"] for row in report["passes"][0]["layers"]}
    assert rows[f"model.layers.1.{stored}"] == "int4/group 16"


def test_a_layer_is_found_and_replaced_by_its_name_in_the_file(saved: tuple[Path, str, str, str]):
    folder, stored, own, output = saved
    carrier = open_blocks(folder / "float").unstacked()
    assert f"model.layers.1.{stored}" in carrier.observed
    module = opened_block(carrier, 1)
    weight = torch.zeros_like(module.get_submodule(own).weight)
    carrier.decoder.replace(module, 1, {f"model.layers.1.{stored}.weight": weight})
    assert torch.equal(module.get_submodule(own).weight, weight)
    assert list(dict(module.named_modules())).count(stored) == 1
    assert own not in dict(module.named_modules())
    with pytest.raises(SpecError, match=r"tensor 'model.layers.1.x.weight': is not a parameter of"):
        carrier.decoder.replace(module, 1, {"model.layers.1.x.weight": weight})
    decoder = carrier.decoder.with_changes({f"{output}.weight": torch.zeros(WORDS, 32)})
    hidden = decoder.arguments(torch.zeros((1, 4), dtype=torch.int64))[0].hidden
    assert not decoder.logits(torch.zeros((1, 4), dtype=torch.int64), hidden).any()
