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
    REMEDY,
    Architecture,
    architecture_of,
)

_ALTERNATING = ("sliding_attention", "full_attention")
_LARGEST_GEMMA2 = 46  # blocks; of that model alone llama.cpp scales scores by the heads' share


@dataclass(frozen=True)
class Alternating:
    """What a model has whose attention slides in every second block.

    Attributes:
        scores: what bounds the scores of attention.
        logits: what bounds the logits.
        window: tokens that attention sees where it slides.
    """

    scores: float
    logits: float
    window: int


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that llama.cpp is told.

    Attributes:
        context: tokens at most.
        factors: what frequencies of the rotary embedding are divided by, float32
            ``[head_width / 2]``; ``None`` where it is 1.
        linear: what positions are divided by.
        alternating: what bounds scores and logits, and the window of every second block; ``None``
            where there is no such.
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
    alternating: Alternating | None = None

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
        if self.alternating is not None:
            writer.add_attn_logit_softcapping(self.alternating.scores)
            writer.add_final_logit_softcapping(self.alternating.logits)
            writer.add_sliding_window(self.alternating.window)

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
    act = str(config.get("hidden_act") or config.get("hidden_activation"))
    if act not in architecture.activations:
        raise SpecError(
            "export gguf",
            f"cannot say that hidden_act is {act!r}: llama.cpp computes "
            f"{architecture.activations[0]!r} in a {config['model_type']}",
            REMEDY,
        )
    heads = _number(config, "num_attention_heads")
    width = _number(config, "hidden_size")
    head_width = config.get("head_dim") or width // heads
    rope = _rope(config)
    kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), 1.0
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    factors = None
    if kind == "llama3":
        factors = _llama3_factors(rope, base, head_width)
    elif kind == "linear":
        factor = float(rope["factor"])
    elif kind != "default":
        raise SpecError(
            "export gguf",
            f"cannot write rope_type {kind!r}, only default, linear and llama3",
            REMEDY,
        )
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
        _alternating(config, head_width) if architecture.alternates else None,
    )


def _alternating(config: Mapping[str, Any], head_width: int) -> Alternating:
    """Return what bounds scores and logits, and the window.

    Raises:
        SpecError: llama.cpp has other numbers built in.
    """
    blocks = _number(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [_ALTERNATING[i % 2] for i in range(blocks)]
    share = _number(config, "hidden_size") // _number(config, "num_attention_heads")
    scaled = share if blocks == _LARGEST_GEMMA2 else head_width
    caps = [config.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")]
    problem = ""
    if any(kind != _ALTERNATING[i % 2] for i, kind in enumerate(kinds)):
        problem = "attention that does not slide in every second block, the first among them"
    elif config.get("query_pre_attn_scalar") != scaled:
        problem = f"query_pre_attn_scalar {config.get('query_pre_attn_scalar')}, only {scaled}"
    elif any(not isinstance(cap, int | float) for cap in caps):
        problem = "no bounds of scores and logits"
    if problem:
        raise SpecError("export gguf", f"cannot write {problem}", REMEDY)
    return Alternating(float(caps[0]), float(caps[1]), _number(config, "sliding_window"))  # type: ignore[arg-type]  # they are numbers


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError("config.json", f"has {value!r} as {key}", "fetch it again")
    return value


def _context(config: Mapping[str, Any]) -> int:
    """Return the most tokens for which attention to all of them is what the model computes."""
    longest = _number(config, "max_position_embeddings")
    window = config.get("sliding_window")
    alternates = architecture_of(config).alternates  # llama.cpp lets attention slide
    if window is None or alternates or not config.get("use_sliding_window", True):
        return longest
    return min(longest, _number(config, "sliding_window"))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding, of new and of older configurations."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


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
    known = {a.name: a for a in ARCHITECTURES.values()}
    if name not in known:
        raise KeyError(f"architecture {name!r}")
    architecture = known[name]
    linear = float(read(f"{name}.rope.scaling.factor") or 1.0)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(read(f"{name}.rope.freq_base")),
    }
    if linear != 1.0:
        rope |= {"rope_type": "linear", "factor": linear}
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
        "rope_parameters": rope,
        "hidden_act": architecture.activations[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": f"{start}attn_q.bias" in tensors,
        "mlp_bias": f"{start}ffn_up.bias" in tensors,
    }
    if architecture.alternates:
        values |= {
            "attn_logit_softcapping": float(read(f"{name}.attn_logit_softcapping")),
            "final_logit_softcapping": float(read(f"{name}.final_logit_softcapping")),
            "sliding_window": int(read(f"{name}.attention.sliding_window")),
            "query_pre_attn_scalar": values["head_dim"],
            "hidden_activation": architecture.activations[0],
        }
        if values["num_hidden_layers"] == _LARGEST_GEMMA2:
            values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
    return architecture.reading, values
