"""Heads and hidden units removed from networks of ``transformers``: its attributes follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.size_attributes import Attributes
from compressor.types.channels import Units
from compressor.types.tensors import TensorSpec
from tests.compressor.models.smaller_modules import (
    Kept,
    at,
    cut,
    heads,
    lowered_cut,
    shaken,
    worst,
)

transformers = pytest.importorskip("transformers")

TWO = heads([1, 3], 8)
"""Two of four heads of eight channels."""
UNITS = at(0, 3, 4, 9, 10, 17, 22, 31, 40, 41, 55)
"""Eleven of 64 hidden units."""
IDS = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
PIXELS = (TensorSpec("pixel_values", ("batch", 3, 16, 16), "float32"),)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
WORDS = {"vocab_size": 20, "max_position_embeddings": 16}


class States(nn.Module):
    """A network that returns a tensor."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__()
        config.use_cache = False
        config._attn_implementation = "eager"
        self.net = getattr(transformers, name)(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        states: Tensor = self.net(input_ids).last_hidden_state
        return states


def rows(start: str, names: str, positions: Units) -> dict[str, dict[int, Units]]:
    return {start + name: {0: positions} for name in names.split()}


def bert() -> tuple[nn.Module, Kept, Attributes]:
    module = States("BertModel", transformers.BertConfig(**SIZES, **WORDS))
    start, own = "net.encoder.layer.0.", "net.encoder.layer.0.attention.self."
    kept = {
        **rows(own, "query.weight query.bias key.weight key.bias value.weight value.bias", TWO),
        start + "attention.output.dense.weight": {1: TWO},
        **rows(start, "intermediate.dense.weight intermediate.dense.bias", UNITS),
        start + "output.dense.weight": {1: UNITS},
    }
    return module, kept, {own[:-1]: {"num_attention_heads": 2, "all_head_size": 16}}


def gpt2() -> tuple[nn.Module, Kept, Attributes]:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "n_inner": 64}
    ends = {"bos_token_id": None, "eos_token_id": None}
    module = States("GPT2Model", transformers.GPT2Config(**sizes, **ends, vocab_size=20))
    joined = heads([1, 3], 8, 3, 32)
    kept: Kept = {
        "net.h.0.attn.c_attn.weight": {1: joined},
        "net.h.0.attn.c_attn.bias": {0: joined},
        "net.h.0.attn.c_proj.weight": {0: TWO},
        "net.h.0.mlp.c_fc.weight": {1: UNITS},
        "net.h.0.mlp.c_fc.bias": {0: UNITS},
        "net.h.0.mlp.c_proj.weight": {0: UNITS},
    }
    sizes_after: Attributes = {
        "net.h.0.attn": {"num_heads": 2, "split_size": 16},
        "net.h.0.attn.c_attn": {"nf": 48},
        "net.h.0.attn.c_proj": {"nx": 16},
        "net.h.0.mlp.c_fc": {"nf": len(UNITS)},
        "net.h.0.mlp.c_proj": {"nx": len(UNITS)},
    }
    return module, kept, sizes_after


def llama() -> tuple[nn.Module, Kept, Attributes]:
    """Of two groups of two heads, the second stays."""
    config = transformers.LlamaConfig(
        **SIZES, **WORDS, num_key_value_heads=2, bos_token_id=None, eos_token_id=None
    )
    module = States("LlamaModel", config)
    own = "net.layers.0.self_attn."
    kept = {
        **rows(own, "q_proj.weight", heads([2, 3], 8)),
        **rows(own, "k_proj.weight v_proj.weight", heads([1], 8)),
        own + "o_proj.weight": {1: heads([2, 3], 8)},
        **rows("net.layers.0.mlp.", "gate_proj.weight up_proj.weight", UNITS),
        "net.layers.0.mlp.down_proj.weight": {1: UNITS},
    }
    sizes = {"num_key_value_groups": 2, "head_dim": 8}
    return module, kept, {own[:-1]: sizes, "net.layers.0.mlp": {"intermediate_size": len(UNITS)}}


def t5() -> tuple[nn.Module, Kept, Attributes]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    module = States("T5EncoderModel", transformers.T5Config(**sizes, vocab_size=20))
    own, dense = "net.encoder.block.0.layer.0.SelfAttention.", "net.encoder.block.0.layer.1."
    kept = {
        **rows(own, "q.weight k.weight v.weight", TWO),
        own + "o.weight": {1: TWO},
        own + "relative_attention_bias.weight": {1: at(1, 3)},
        **rows(dense, "DenseReluDense.wi.weight", UNITS),
        dense + "DenseReluDense.wo.weight": {1: UNITS},
    }
    sizes_after = {
        "n_heads": 2,
        "inner_dim": 16,
        "d_model": 32,
        "key_value_proj_dim": 8,
        "relative_attention_num_buckets": 32,
    }
    return module, kept, {own[:-1]: sizes_after}


def vit() -> tuple[nn.Module, Kept, Attributes]:
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8)
    module = States("ViTModel", config)
    start = "net.layers.0."
    if start + "attention.q_proj.weight" not in dict(module.named_parameters()):
        pytest.skip("its parameters have other names in this version of transformers")
    own = start + "attention."
    kept = {
        **rows(own, "q_proj.weight q_proj.bias k_proj.weight k_proj.bias", TWO),
        **rows(own, "v_proj.weight v_proj.bias", TWO),
        own + "o_proj.weight": {1: TWO},
        **rows(start, "mlp.fc1.weight mlp.fc1.bias", UNITS),
        start + "mlp.fc2.weight": {1: UNITS},
    }
    return module, kept, {own[:-1]: {"num_attention_heads": 2, "head_dim": 8}}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "build",
    [gpt2, *(pytest.param(build, marks=SLOW) for build in (t5, bert, llama, vit))],
)
def test_attributes_follow(build: Any) -> None:
    module, kept, sizes = build()
    module = shaken(module)
    inputs = PIXELS if build is vit else IDS
    carrier = TorchCarrier(module, inputs)
    after = carrier.with_channels(lowered_cut(module, inputs, kept, sizes), kept)
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    parts = dict(after.module.named_modules())
    for path, wanted in sizes.items():
        assert {name: getattr(parts[path], name) for name in wanted} == wanted
    rng = np.random.default_rng(5)
    if build is vit:
        batch = {"pixel_values": rng.normal(size=(2, 3, 16, 16)).astype(np.float32)}
    else:
        batch = {"input_ids": rng.integers(0, 20, (3, 7))}
    with torch.inference_mode():
        own = cut(module, kept, sizes)(torch.from_numpy(next(iter(batch.values()))))
    assert worst(after.module_outputs(batch)[0], own.numpy()) < 1e-6
    assert worst(after.runner().run(batch)["output"], own.numpy()) < 1e-4
