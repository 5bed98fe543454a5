"""The numbers of a model that llama.cpp is told: made of a ``config.json``, and read back.

What its code has no place for, or computes otherwise, is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

import torch

from compressor.errors import ModelError, SpecError
from compressor.exporters.gguf.architectures import (
    ARCHITECTURES,
    BLOCK,
    FULL,
    REMEDY,
    SLIDING,
    Architecture,
    ExpertRule,
    SlidingRule,
    architecture_of,
)

_EXPERTS = ("num_local_experts", "num_experts")
_SHARED = "shared_expert_intermediate_size"
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Sliding:
    """What a model has whose attention slides in some blocks.

    Attributes:
        window: tokens that attention sees where it slides.
        caps: what bounds the scores of attention, and the logits; nothing where neither is.
    """

    window: int
    caps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Experts:
    """The experts of each block.

    Attributes:
        used: how many of them a token is sent to.
        inner: the width inside of one.
        shared: that of the one that all tokens are sent to; 0 where there is none.
    """

    count: int
    used: int
    inner: int
    shared: int = 0


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that llama.cpp is told.

    Attributes:
        context: tokens at most.
        factors: what frequencies of the rotary embedding are divided by, float32
            ``[head_width / 2]``; ``None`` where it is 1.
        linear: what positions are divided by.
        experts: those of a block; ``None`` where there are none.
        sliding: the window of some blocks, and caps; ``None`` where there is no such.
    """

    architecture: Architecture
    vocabulary: int
    context: int
    width: int
    inner: int
    blocks: int
    heads: int
    key_heads: int
    head_width: int
    epsilon: float
    rope_base: float
    factors: torch.Tensor | None = None
    linear: float = 1.0
    experts: Experts | None = None
    sliding: Sliding | None = None

    def add_to(self, writer: Any) -> None:
        """Give everything to a ``gguf.GGUFWriter``."""
        from gguf import RopeScalingType

        writer.add_vocab_size(self.vocabulary)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.width)
        writer.add_feed_forward_length(self.inner)
        writer.add_block_count(self.blocks)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.key_heads)
        writer.add_key_length(self.head_width)
        writer.add_value_length(self.head_width)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_rope_dimension_count(self.head_width)
        writer.add_rope_freq_base(self.rope_base)
        if self.linear != 1.0:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self.linear)
        if self.experts is not None:
            writer.add_expert_count(self.experts.count)
            writer.add_expert_used_count(self.experts.used)
            writer.add_expert_feed_forward_length(self.experts.inner)
            if self.experts.shared:
                writer.add_expert_shared_feed_forward_length(self.experts.shared)
        if self.sliding is not None:
            if self.sliding.caps:
                writer.add_attn_logit_softcapping(self.sliding.caps[0])
                writer.add_final_logit_softcapping(self.sliding.caps[1])
            writer.add_sliding_window(self.sliding.window)

    def order(self, name: str) -> torch.Tensor | None:
        """Return the rows of the checkpoint's tensor in the order of the file, int64 ``[rows]``.

        ``None`` where it is the same.
        """
        kind = self.architecture.turned(name)
        if not kind:
            return None
        heads = self.heads if kind == "query" else self.key_heads
        rows = torch.arange(heads * self.head_width)
        return rows.reshape(heads, 2, self.head_width // 2).transpose(1, 2).reshape(-1)


def shape_of(config: Mapping[str, Any], vocabulary: int) -> Shape:
    """Return the numbers of a model, from the content of its ``config.json``.

    Args:
        vocabulary: rows of its table of tokens.

    Raises:
        SpecError: llama.cpp has no code for its type, activation or positions.
        ModelError: a number is missing.
    """
    architecture = architecture_of(config)
    experts, sliding = architecture.experts, architecture.sliding
    _check(config, architecture)
    heads = _number(config, "num_attention_heads")
    width = _number(config, "hidden_size")
    head_width = config.get("head_dim") or width // heads
    rope = _rope(config, FULL)
    kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), 1.0
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    factors = None
    if kind not in architecture.rope_types:
        raise SpecError(
            "export gguf",
            f"cannot write rope_type {kind!r} of a {config['model_type']}, only "
            f"{', '.join(architecture.rope_types)}",
            REMEDY,
        )
    if kind == "llama3":
        factors = _llama3_factors(rope, base, head_width)
    elif kind == "linear":
        factor = float(rope["factor"])
    return Shape(
        architecture,
        vocabulary,
        _context(config),
        width,
        _number(config, "intermediate_size"),
        _number(config, "num_hidden_layers"),
        heads,
        config.get("num_key_value_heads") or heads,
        head_width,
        float(config.get("rms_norm_eps", 1e-6)),
        base,
        factors,
        factor,
        _experts(config, experts) if experts is not None else None,
        _sliding(config, sliding, head_width) if sliding is not None else None,
    )


def _check(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise ``SpecError`` for an activation or an output layer that llama.cpp has no code for."""
    act = str(config.get("hidden_act") or config.get("hidden_activation"))
    if act not in architecture.activations:
        raise SpecError(
            "export gguf",
            f"cannot say that hidden_act is {act!r}: llama.cpp computes "
            f"{architecture.activations[0]!r} in a {config['model_type']}",
            REMEDY,
        )
    if config.get("tie_word_embeddings") and not architecture.tied:
        raise SpecError(
            "export gguf",
            f"cannot say that the output layer of a {config['model_type']} is its table of tokens",
            REMEDY,
        )


def _experts(config: Mapping[str, Any], rule: ExpertRule) -> Experts:
    """Return the numbers of experts and their widths.

    Raises:
        SpecError: llama.cpp computes their shares otherwise.
        ModelError: a number is missing.
    """
    # Of those that have no such setting, the shares sum to 1.
    if config.get("norm_topk_prob", True) != rule.shares_sum:
        raise SpecError(
            "export gguf",
            f"cannot write norm_topk_prob {not rule.shares_sum} of a {config['model_type']}, "
            f"only {rule.shares_sum}",
            REMEDY,
        )
    return Experts(
        _number(config, next((key for key in _EXPERTS if key in config), _EXPERTS[0])),
        _number(config, "num_experts_per_tok"),
        _number(config, rule.inner),
        _number(config, _SHARED) if rule.shared else 0,
    )


def _sliding(config: Mapping[str, Any], rule: SlidingRule, head_width: int) -> Sliding:
    """Return the window and the caps.

    Raises:
        SpecError: llama.cpp has other numbers built in.
        ModelError: a number is missing.
    """
    blocks = _number(config, "num_hidden_layers")
    share = _number(config, "hidden_size") // _number(config, "num_attention_heads")
    scaled = share if blocks == rule.largest else head_width
    usual = rule.kinds(blocks)
    caps = [float(cap) for key in _CAPS if isinstance(cap := config.get(key), int | float)]
    local = _rope(config, SLIDING)
    problem = ""
    if list(config.get("layer_types") or usual) != usual:
        problem = f"attention that does not slide in all blocks but the last of every {rule.period}"
    elif config.get("use_bidirectional_attention"):
        problem = "attention that sees later tokens"
    elif config.get("query_pre_attn_scalar") != scaled:
        problem = f"query_pre_attn_scalar {config.get('query_pre_attn_scalar')}, only {scaled}"
    elif rule.capped and len(caps) < len(_CAPS):
        problem = "no bounds of scores and logits"
    elif caps and not rule.capped:
        problem = "bounds of scores or logits"
    elif rule.rope_base is not None and local != {
        "rope_type": "default",
        "rope_theta": rule.rope_base,
    }:
        problem = f"rotary embeddings {dict(local)} where attention slides, only the usual ones"
    if problem:
        raise SpecError("export gguf", f"cannot write {problem}", REMEDY)
    return Sliding(_number(config, "sliding_window"), tuple(caps))


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError("config.json", f"has {value!r} as {key}", "fetch it again")
    return value


def _context(config: Mapping[str, Any]) -> int:
    """Return the most tokens for which attention to all of them is what the model computes."""
    longest = _number(config, "max_position_embeddings")
    window = config.get("sliding_window")
    slides = architecture_of(config).sliding is not None  # in llama.cpp as well
    if window is None or slides or not config.get("use_sliding_window", True):
        return longest
    return min(longest, _number(config, "sliding_window"))


def _rope(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding, of new and of older configurations.

    Args:
        kind: of attention; some models have settings for each.
    """
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    of_kind: Mapping[str, Any] = rope.get(kind, rope)
    return of_kind


def _llama3_factors(rope: Mapping[str, Any], base: float, head_width: int) -> torch.Tensor:
    """Return what each frequency is divided by, as Llama 3.1 stretches its context.

    Short waves stay, long ones are divided by ``factor``, and between them it goes over smoothly.
    """
    factor, low, high = (
        float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(rope["original_max_position_embeddings"])
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    turns = original / (2 * pi * base**exponents)  # of each frequency in the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).to(torch.float32)


Read = Callable[[str], Any]


def config_values(read: Read, tensors: set[str]) -> tuple[str, dict[str, Any]]:
    """Return the ``model_type`` and the configuration that a file's own numbers describe.

    The inverse of :class:`Shape`, for a file that has been written.

    Args:
        read: returns what the file holds under a key.
        tensors: the names of its tensors.
    """
    name = str(read("general.architecture"))
    count = int(read(f"{name}.expert_count") or 0)
    known = {(a.name, a.experts is not None): a for a in ARCHITECTURES.values()}
    if (name, count > 0) not in known:
        raise KeyError(f"architecture {name!r} with {count} experts")
    architecture = known[name, count > 0]
    start = BLOCK.format(0)
    values: dict[str, Any] = {
        "vocab_size": int(read(f"{name}.vocab_size")),
        "max_position_embeddings": int(read(f"{name}.context_length")),
        "hidden_size": int(read(f"{name}.embedding_length")),
        "intermediate_size": int(read(f"{name}.feed_forward_length")),
        "num_hidden_layers": int(read(f"{name}.block_count")),
        "num_attention_heads": int(read(f"{name}.attention.head_count")),
        "num_key_value_heads": int(read(f"{name}.attention.head_count_kv")),
        "head_dim": int(read(f"{name}.attention.key_length")),
        "rms_norm_eps": float(read(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_values(read, architecture),
        "hidden_act": architecture.activations[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": f"{start}attn_q.bias" in tensors,
        "mlp_bias": f"{start}ffn_up.bias" in tensors,
    }
    if architecture.experts is not None:
        inner = int(read(f"{name}.expert_feed_forward_length"))
        values |= {
            **dict.fromkeys(_EXPERTS, count),
            "num_experts_per_tok": int(read(f"{name}.expert_used_count")),
            architecture.experts.inner: inner,
            "norm_topk_prob": architecture.experts.shares_sum,
        }
        if architecture.experts.shared:
            values[_SHARED] = int(read(f"{name}.expert_shared_feed_forward_length"))
    if architecture.sliding is not None:
        values |= _sliding_values(read, architecture.name, architecture.sliding, values)
    return architecture.reading, values


def _rope_values(read: Read, architecture: Architecture) -> dict[str, Any]:
    name, rule = architecture.name, architecture.sliding
    linear = float(read(f"{name}.rope.scaling.factor") or 1.0)
    base = float(read(f"{name}.rope.freq_base"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if linear != 1.0:
        rope |= {"rope_type": "linear", "factor": linear}
    if rule is None or rule.rope_base is None:
        return rope
    return {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": rule.rope_base}}


def _sliding_values(
    read: Read, name: str, rule: SlidingRule, values: Mapping[str, Any]
) -> dict[str, Any]:
    keys = [f"{name}.attn_logit_softcapping", f"{name}.final_logit_softcapping"]
    caps = [float(read(key)) for key in keys] if rule.capped else [None, None]
    share = values["hidden_size"] // values["num_attention_heads"]
    largest = values["num_hidden_layers"] == rule.largest
    return {
        **dict(zip(_CAPS, caps, strict=True)),
        "layer_types": rule.kinds(values["num_hidden_layers"]),
        "sliding_window": int(read(f"{name}.attention.sliding_window")),
        "query_pre_attn_scalar": share if largest else values["head_dim"],
        "hidden_activation": values["hidden_act"],
    }
