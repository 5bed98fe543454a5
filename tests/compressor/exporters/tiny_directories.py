"""Tiny directories of many model types of ``transformers`` with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compressor.progress import quiet_libraries

HIDDEN, WORDS = 64, 96

# What configurations call their sizes; each takes those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), HIDDEN
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "d_ff",
            "ffn_dim",
            "hidden_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
        ),
        96,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "num_mel_bins"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "projection_dim", "image_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("sliding_window", "max_target_positions"), 32),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("rotary_dim", "patch_size"), 8),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "decoder_sparse_step"), 1),
    "n_group": 2,
    "topk_group": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_source_positions": 20,
    "num_channels": 3,
    "rotary_pct": 1.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "depths": [1, 1],
    "hidden_sizes": [32, 64],
}

# The class of each type. What follows a name with "For" is the rest of a usual class' name.
CLASSES: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi": "Phi",
    "phi3": "Phi3",
    "gpt_neox": "GPTNeoX",
    "gptj": "GPTJ",
    "opt": "OPT",
    "bloom": "Bloom",
    "falcon": "Falcon",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "cohere": "Cohere",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "mpt": "Mpt",
    "codegen": "CodeGen",
    "granite": "Granite",
    "glm": "Glm",
    "smollm3": "SmolLM3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
    "gpt_oss": "GptOss",
    "jamba": "Jamba",
    "llama4_text": "Llama4",
    "phimoe": "Phimoe",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "rwkv": "Rwkv",
    "recurrent_gemma": "RecurrentGemma",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "glm4_moe": "Glm4Moe",
    "dbrx": "Dbrx",
    "olmo_hybrid": "OlmoHybrid",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "dinov2": "Dinov2Model",
    "swin": "SwinForImageClassification",
    "segformer": "SegformerForImageClassification",
    "wav2vec2": "Wav2Vec2ForCTC",
    "hubert": "HubertForCTC",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}

_SOUND: dict[str, Any] = {
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_LLAMA4: dict[str, Any] = {
    "interleave_moe_layer_step": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "attn_temperature_tuning": False,
    "no_rope_layers": [1, 1],
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_IMAGE_TOKENS = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "falcon": {"ffn_hidden_size": 96},
    "mpt": {"max_seq_len": 64, "expansion_ratio": 2},
    "glm": {"partial_rotary_factor": 0.5},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v2": {"n_group": 1, "topk_method": "greedy", "num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "mamba2": {"num_heads": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": HIDDEN, "context_length": 64},
    "recurrent_gemma": {
        "lru_width": HIDDEN,
        "attention_window_size": 32,
        "block_types": ["recurrent", "attention"],
    },
    "llama4_text": _LLAMA4,
    "dbrx": {
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "albert": {"embedding_size": 32},
    "electra": {"embedding_size": 32},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "swin": {
        "embed_dim": 32,
        "num_heads": [2, 4],
        "num_attention_heads": [2, 4],
        "window_size": 2,
        "patch_size": 4,
    },
    "segformer": {
        "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32,
    },
    "wav2vec2": {**_SOUND, "do_stable_layer_norm": True},
    "hubert": _SOUND,
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model"},
        "image_token_id": 90,
        "vision_feature_layer": -1,
    },
    "gemma3": {"mm_tokens_per_image": 4, **_IMAGE_TOKENS},
    "llama4": {
        "text_config": _LLAMA4,
        "vision_config": {
            **dict.fromkeys(("projector_input_dim", "projector_output_dim"), HIDDEN),
            "vision_output_dim": HIDDEN,
            "intermediate_size": 256,
            "pixel_shuffle_ratio": 0.5,
        },
        **_IMAGE_TOKENS,
    },
    "qwen2_vl": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            }
        },
        "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2},
        **_QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "vision_config": {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_QWEN_TOKENS,
    },
}


def class_of(kind: str) -> Any:
    """Return the class of a type."""
    import transformers

    name = CLASSES[kind]
    with quiet_libraries():
        return getattr(transformers, name, None) or getattr(transformers, f"{name}ForCausalLM")


def config_of(kind: str) -> Any:
    """Return a configuration of two small layers."""
    from transformers import CONFIG_MAPPING

    with quiet_libraries():
        return _sized(CONFIG_MAPPING[kind], _OWN_SIZES.get(kind, {}))


def _sized(config_class: Any, sizes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    usual = config_class().to_dict()
    values = {
        key: value
        for key, value in _SIZES.items()
        if (key in usual or key in config_class.attribute_map)
        and isinstance(usual.get(key), list) <= isinstance(value, list)
    }
    parts = {}
    for name, part in (config_class.sub_configs or {}).items():
        inner = dict(sizes.get(name, {}))
        kind = inner.pop("model_type", getattr(part, "model_type", ""))
        if kind in CONFIG_MAPPING and name in ("text_config", "vision_config"):
            parts[name] = {**_sized(CONFIG_MAPPING[kind], inner).to_dict(), "model_type": kind}
    return config_class(**{**values, **sizes, **parts})


def save_tiny(folder: Path, kind: str) -> Path:
    """Write a directory as ``transformers`` writes it."""
    network = class_of(kind)
    with quiet_libraries(), torch.random.fork_rng():
        torch.manual_seed(1)
        model = network(config_of(kind))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # Biases and norms are drawn, too: zeros and ones would hide mistakes.
            if parameter.ndim == 1:
                parameter.data += 0.05 * torch.randn_like(parameter)
            elif "A_log" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
    return folder


def meta_network(kind: str) -> Any:
    """Return the class of a type on the ``meta`` device."""
    with quiet_libraries(), torch.device("meta"):
        return class_of(kind)(config_of(kind))


def stored_shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of what ``transformers`` would write of a network."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = network.get_expanded_tied_weights_keys(all_submodels=True)
    state = {n: t for n, t in network.state_dict().items() if n not in tied}
    stored = revert_weight_conversion(network, state)
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}
