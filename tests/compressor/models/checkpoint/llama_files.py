"""Small Hugging Face folders with Llama's names, written file by file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 50,
}
COMPANIONS = {
    "generation_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer.model": "pieces",
    "chat_template.jinja": "{{ x }}",
    "LICENSE": "yours",
}
LEFT = {"pytorch_model.bin": "old", "model.onnx": "other", ".gitattributes": "*"}


def llama_tensors(
    layers: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors of the shapes that ``CONFIG`` asks for."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (50, 64),
    }
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (64,),
            f"{base}.self_attn.q_proj.weight": (64, 64),
            f"{base}.self_attn.k_proj.weight": (32, 64),
            f"{base}.self_attn.v_proj.weight": (32, 64),
            f"{base}.self_attn.o_proj.weight": (64, 64),
            f"{base}.post_attention_layernorm.weight": (64,),
            f"{base}.mlp.gate_proj.weight": (96, 64),
            f"{base}.mlp.up_proj.weight": (96, 64),
            f"{base}.mlp.down_proj.weight": (64, 96),
        }
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 2,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder with shards, index, configuration, companions, and what is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llama_tensors() if tensors is None else tensors
    names = sorted(tensors)
    size = -(-len(names) // shards)
    places = {}
    for index in range(shards):
        name = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        held = names[index * size : (index + 1) * size]
        places.update(dict.fromkeys(held, name))
        save_file({n: tensors[n].contiguous() for n in held}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    for name, text in {**COMPANIONS, **LEFT}.items():
        (folder / name).write_text(text)
    (folder / "original").mkdir(exist_ok=True)
    (folder / "original" / "params.json").write_text("{}")
    return folder
