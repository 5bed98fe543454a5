"""Folders of small random language models as transformers saves them, and GGUF files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from compressor.exporters.gguf.exporter import GgufExporter
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.progress import quiet_libraries
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext

CONTEXT = PassContext(0, frozenset({"gguf"}))
WORDS, WIDTH = 300, 64
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PHI = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "num_hidden_layers": 7,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": 64}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "head_dim": 32},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    ),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {**_GEMMA3, "rope_parameters": {"full_attention": {**_LINEAR, "rope_theta": 1e6}}},
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", _PHI),
    "phi3-partial": ("Phi3Config", {**_PHI, "partial_rotary_factor": 0.75}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral-8": ("MistralConfig", {"sliding_window": 8}),
    "qwen2-mixed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
}
"""Further ones, for formats that hold more than GGUF does."""


def over_bytes(cut: str | None = None) -> Tokenizer:
    """Return byte-pair encoding over bytes, which cuts text as GPT-2 does or by a pattern."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["Ġt", "he", "Ġthe"]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, *merged])}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    tokenizer.pre_tokenizer = level
    if cut is not None:
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(cut), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    begins = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 0)]}
    tokenizer.post_processor = processors.TemplateProcessing(**begins)
    return tokenizer


def sentence_piece(*, prefix: bool) -> Tokenizer:
    """Return byte-pair encoding as SentencePiece has it, with bytes for unknown characters."""
    usual = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    tokens = [*usual, "▁", "t", "h", "e", "he", "▁t", "▁the"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *steps] if prefix else steps
    )
    return tokenizer


def save(
    folder: Path,
    kind: str = "llama",
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Save a random network of a kind, and return it."""
    name, values = {**KINDS, **OTHERS}[kind]
    config = getattr(transformers, name)(**{**SIZES, **values})
    return save_network(folder, config, tokenizer, dtype)


def with_pictures() -> Any:
    """Return the configuration of a gemma3 that reads pictures, too."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return transformers.Gemma3Config(
        text_config={**SIZES, **_GEMMA3},
        vision_config=vision.to_dict(),
        mm_tokens_per_image=4,
        image_token_index=WORDS - 1,
    )


def save_network(
    folder: Path,
    config: Any,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Save a random network of a configuration, and return it."""
    torch.manual_seed(0)
    with quiet_libraries():
        network = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        network = network.to(dtype)
        network.save_pretrained(folder)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer or over_bytes(),
            bos_token="<s>",
            eos_token="</s>",
            chat_template="{{ messages[0]['content'] }}",
        )
        fast.save_pretrained(folder)
    return network.eval()


def quantized(folder: Path, **options: Any) -> CheckpointCarrier:
    """Return a folder's model with codes for GGUF."""
    carrier = QuantizeWeights(**options).apply(open_checkpoint(folder), CONTEXT, {}).carrier
    assert isinstance(carrier, CheckpointCarrier)
    return carrier


def written(carrier: Any, folder: Path, **options: Any) -> Path:
    """Write a model, whose size is what was predicted, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    exporter = GgufExporter(**options)
    exporter.check(carrier)
    (path,) = exporter.write(carrier, folder, USUAL)
    assert path.stat().st_size == exporter.predict(carrier)
    return path
