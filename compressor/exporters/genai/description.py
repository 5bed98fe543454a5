"""What a decoder computes, as its class in ``transformers`` says, and ``genai_config.json``.

The graph is written for one shape of block: a norm, attention with rotary embedding, a second norm,
and three products with a gate. Models of other shapes are refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from compressor.errors import ArtifactError, SpecError, artifact_errors
from compressor.exporters.safetensors.code_layouts import caches_of
from compressor.files import json_text, read_json
from compressor.models.transformers.reading import float_class_of
from compressor.types.carrier import Carrier
from compressor.types.rounded_inputs import CacheScheme

SETTINGS = "genai_config.json"
_REMEDY = "leave out this export"
_HEAD_STEP = 16  # GroupQueryAttention turns such heads only
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on positions alone
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """How a family of models differs from Llama.

    Attributes:
        head_norms: queries and keys of a head are normalized before they are turned.
        norms_add_one: norms multiply with 1 more than their weight.
        scaled_table: what the table of tokens gives is multiplied with the root of its width.
        fused: query, key and value have one weight, and so have gate and up.
    """

    head_norms: bool = False
    norms_add_one: bool = False
    scaled_table: bool = False
    fused: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms=True),
    "gemma": Family(norms_add_one=True, scaled_table=True),
    "phi3": Family(fused=True),
}
"""Families by ``model_type`` of ``config.json``, which onnxruntime-genai knows them by too."""

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
}
"""Activations by their names in a configuration: ``silu``, or how Gelu is approximated."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder's numbers.

    Attributes:
        kind: its ``model_type``.
        context: tokens at most.
        windows: of each block, how many tokens attention goes back, with the token itself; -1 for
            all.
        scaling: what products of queries and keys are multiplied with.
        activation: a value of :data:`ACTIVATIONS`.
        table_scale: what the table's rows are multiplied with.
        tied: the output layer has the table's weight.
        cosine: of the rotary embedding's angles, float32 ``[context, head_width / 2]``.
        sine: likewise.
        names: parameters of its class with their shapes.
        caches: how attention rounds what it keeps, by its path; none where it keeps floats.
    """

    kind: str
    family: Family
    vocabulary: int
    context: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    windows: tuple[int, ...]
    epsilon: float
    scaling: float
    activation: str
    table_scale: float
    tied: bool
    cosine: torch.Tensor
    sine: torch.Tensor
    names: Mapping[str, tuple[int, ...]]
    caches: Mapping[str, CacheScheme]

    @property
    def kept_bits(self) -> int | None:
        """Width of a number that attention keeps; ``None`` where it keeps floats."""
        return next((cache.bits for cache in self.caches.values()), None)

    @property
    def kept_width(self) -> int:
        """Elements that a head keeps of a token; two numbers of 4 bits share one."""
        return self.head_width // 2 if self.kept_bits == 4 else self.head_width

    def settings(self, folder: Path, file: str) -> str:
        """Return the content of ``genai_config.json``.

        Args:
            folder: of the float model, whose tokens and search are taken along.
            file: the name of the graph.

        Raises:
            SpecError: no token of the vocabulary ends a text.
        """
        config = _values(folder / "config.json")
        generation = _values(folder / "generation_config.json")
        named = _tokens_of(folder)
        tokens = {
            key: self._known(generation.get(key, config.get(key))) or self._known(named.get(key))
            for key in _TOKENS
        }
        ends = tokens["eos_token_id"]
        if not ends:
            raise _refused(
                f"names no token among {self.vocabulary} that ends a text",
                "write eos_token_id to generation_config.json",
            )
        value = {
            "model": {
                "bos_token_id": (tokens["bos_token_id"] or ends)[0],
                "eos_token_id": ends[0] if len(ends) == 1 else ends,
                "pad_token_id": (tokens["pad_token_id"] or ends)[0],
                "context_length": self.context,
                "type": self.kind,
                "vocab_size": self.vocabulary,
                "decoder": {
                    "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                    "filename": file,
                    "head_size": self.kept_width,
                    "hidden_size": self.width,
                    "num_attention_heads": self.heads,
                    "num_hidden_layers": len(self.windows),
                    "num_key_value_heads": self.key_heads,
                    "inputs": {
                        "input_ids": "input_ids",
                        "attention_mask": "attention_mask",
                        "past_key_names": "past_key_values.%d.key",
                        "past_value_names": "past_key_values.%d.value",
                    },
                    "outputs": {
                        "logits": "logits",
                        "present_key_names": "present.%d.key",
                        "present_value_names": "present.%d.value",
                    },
                },
            },
            "search": {
                "do_sample": False,
                **{k: generation[k] for k in _SEARCH if generation.get(k) is not None},
                "max_length": self.context,
                "past_present_share_buffer": True,
            },
        }
        return json_text(value)

    def _known(self, token: Any) -> list[int]:
        """Return those of one or several tokens that the vocabulary has."""
        tokens = token if isinstance(token, list) else [token]
        return [t for t in tokens if type(t) is int and 0 <= t < self.vocabulary]


def describe(carrier: Carrier) -> tuple[Decoder, Any]:
    """Return the numbers of a model, and its network on the ``meta`` device.

    Args:
        carrier: a model from a folder.

    Raises:
        SpecError: it is of another family, or computes what the graph does not.
    """
    folder = carrier.folder
    kind = str(_values(folder / "config.json").get("model_type")) if folder else ""
    family = FAMILIES.get(kind)
    if family is None:
        raise _refused(f"has no graph for models of type {kind!r}, only for {', '.join(FAMILIES)}")
    network, why = float_class_of(carrier)
    if network is None:
        raise _refused(f"cannot be planned: {why}")
    if type(network).__name__.partition("For")[2] != "CausalLM":
        raise _refused(f"needs a model that writes text, and this is a {type(network).__name__}")
    config = network.config
    activation = ACTIVATIONS.get(config.hidden_act)
    if activation is None:
        raise _refused(f"has no operators for hidden_act {config.hidden_act!r}")
    if getattr(config, "use_bidirectional_attention", None):
        raise _refused("cannot write use_bidirectional_attention: a cache looks back only")
    attention = network.model.layers[0].self_attn
    head_width = attention.head_dim
    rope = dict(config.rope_parameters or {})
    turned = str(rope.get("rope_type", "default"))
    if turned not in _STATIC_ROPES:
        raise _refused(f"cannot write rope_type {turned!r}, only {', '.join(_STATIC_ROPES)}")
    cosine, sine = _angles(type(network.model.rotary_emb)(config), config)
    if head_width % _HEAD_STEP or cosine.shape[1] * 2 != head_width:
        raise _refused(
            f"cannot turn {cosine.shape[1] * 2} channels of heads of {head_width}: "
            f"GroupQueryAttention turns all, in heads of a multiple of {_HEAD_STEP}"
        )
    decoder = Decoder(
        kind,
        family,
        config.vocab_size,
        config.max_position_embeddings,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_width,
        tuple(_window(config, index) for index in range(config.num_hidden_layers)),
        config.rms_norm_eps,
        attention.scaling,
        activation,
        sqrt(config.hidden_size) if family.scaled_table else 1.0,
        bool(config.tie_word_embeddings),
        cosine,
        sine,
        {name: tuple(value.shape) for name, value in network.named_parameters()},
        caches_of(carrier),
    )
    return decoder, network


def _angles(rotary: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of all positions, computed as the class does."""
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, rotary.inv_freq.to(torch.float32))
    factor = rotary.attention_scaling
    return angles.cos() * factor, angles.sin() * factor


def _window(config: Any, index: int) -> int:
    """Return how many tokens the attention of a block goes back; -1 for all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds else _SLIDING
    if kind not in (_SLIDING, _FULL):
        raise _refused(f"cannot write layer_types {kind!r}")
    return -1 if window is None or kind == _FULL else int(window)


def _tokens_of(folder: Path) -> dict[str, int]:
    """Return the special tokens that a tokenizer names, by the keys of a configuration."""
    names = _values(folder / "tokenizer_config.json")
    added = _values(folder / "tokenizer.json").get("added_tokens") or ()
    numbers = {token["content"]: token["id"] for token in added if isinstance(token, dict)}
    found = {}
    for key in _TOKENS:
        token = names.get(key.removesuffix("_id"))
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in numbers:
            found[key] = numbers[content]
    return found


def _values(path: Path) -> dict[str, Any]:
    """Return what a file of settings holds; nothing without it."""
    if not path.is_file():
        return {}
    value = read_json(path, f"config {str(path)!r}", "cannot be read", constants=True)
    return value if isinstance(value, dict) else {}


def read_settings(path: Path, subject: str) -> Mapping[str, Any]:
    """Return the part ``model.decoder`` of a written ``genai_config.json``.

    Raises:
        ArtifactError: it is damaged, or says nothing of the graph.
    """
    again = "export it again"
    with artifact_errors(again):
        value = read_json(path, subject, "is not JSON")
    decoder: Any = value
    for part in ("model", "decoder"):
        decoder = decoder.get(part) if isinstance(decoder, dict) else None
    wanted = {
        "filename": str,
        "num_hidden_layers": int,
        "num_key_value_heads": int,
        "head_size": int,
    }
    for key, kind in wanted.items():
        if not isinstance(decoder, dict) or type(decoder.get(key)) is not kind:
            raise ArtifactError(subject, f"{path.name} has no {kind.__name__} as {key}", again)
    return dict(decoder)


def _refused(problem: str, remedy: str = _REMEDY) -> SpecError:
    return SpecError("export genai", problem, remedy)
