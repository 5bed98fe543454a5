"""Folders of small random networks as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.carrier import (
    open_pretrained,
)
from compressor.progress import quiet_libraries

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CAUSAL, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (CAUSAL, "LlamaConfig", GROUPED),
    "llama-tied": (CAUSAL, "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": (CAUSAL, "Qwen2Config", GROUPED),
    "mistral": (CAUSAL, "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "gpt2": (CAUSAL, "GPT2Config", {"vocab_size": 37, "n_embd": 32, "n_layer": 1, "n_head": 4}),
    "opt": (
        CAUSAL,
        "OPTConfig",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "bert": (CLASSES, "BertConfig", SIZES),
    "distilbert": (
        CLASSES,
        "DistilBertConfig",
        {"vocab_size": 37, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4},
    ),
    "t5": (
        "AutoModelForTextEncoding",
        "T5Config",
        {"vocab_size": 37, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 4, "d_kv": 8},
    ),
    # one chunk of a sequence, two and four; config.json says that a limit is infinite
    "mamba2": (
        CAUSAL,
        "Mamba2Config",
        {
            "vocab_size": 37,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "vit": (
        "AutoModelForImageClassification",
        "ViTConfig",
        {**SIZES, "image_size": 16, "patch_size": 8},
    ),
}
TWO_SIDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        "WhisperConfig",
        {
            "vocab_size": 37,
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
            **{f"{token}_token_id": i for i, token in enumerate(("pad", "bos", "eos"))},
            "decoder_start_token_id": 1,
        },
    ),
}
"""Encoders with a decoder; each side has an input of its own."""


def save(folder: Path, kind: str) -> torch.nn.Module:
    """Save a random network of a kind; weights large enough that attention is not uniform."""
    auto, config, values = {**KINDS, **TWO_SIDED}[kind]
    torch.manual_seed(0)
    with quiet_libraries():
        module = getattr(transformers, auto).from_config(getattr(transformers, config)(**values))
        for parameter in module.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        module.save_pretrained(folder)
    network: torch.nn.Module = module.eval()
    return network


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def opened(folder: Path, auto: str = CAUSAL, **config: Any) -> TorchCarrier:
    return open_pretrained(auto, folder, config, ())


def retype(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    retyped = {k: v.to(dtype) if v.ndim > 1 else v for k, v in stored.items()}
    save_file(retyped, folder / "model.safetensors")
