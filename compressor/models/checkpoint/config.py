"""What names, shapes and ``config.json`` tell of a checkpoint: its layers, and whether it is
whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, listed
from compressor.graph.layers import layer_name
from compressor.models.checkpoint.headers import read_json
from compressor.types.layers import CONVOLUTION, LINEAR, TABLE, Layer, LayerKind

# Model types whose decoder layers have Llama's names and shapes; "" stands for a config that does
# not say. Others keep to rules of their own, which only their own code knows.
_LLAMA_LIKE = {
    "",
    "cohere",
    "gemma",
    "gemma2",
    "granite",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
}
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_Shape = tuple[int, ...]


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ModelError: it is not a JSON object.
    """
    subject = f"config {str(path)!r}"
    # Some published files hold Infinity, which Python reads and writes.
    config = read_json(path, subject, "cannot be read", constants=True)
    if not isinstance(config, dict):
        raise ModelError(subject, "is not a JSON object", "fetch it again")
    return config


def check_config(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    """Compare a configuration with the tensors, where their names are those of Llama.

    Args:
        config: the content of ``config.json``; what it does not say is not compared.
        shapes: all tensors of the checkpoint.
        subject: what a message is about.

    Raises:
        ModelError: they disagree in a shape, in the number of layers, or in what a layer holds.
    """
    if str(config.get("model_type", "")) not in _LLAMA_LIKE:
        return
    wanted = _wanted(config)
    for name, shape in shapes.items():
        layer = _LAYER.fullmatch(name)
        expected = wanted.get(layer[2] if layer else name.removeprefix("model."))
        if expected is not None and not _agree(shape, expected):
            asked = ["?" if e is None else e for e in expected]
            raise ModelError(
                subject,
                f"asks for {name!r} with shape {_text(asked)}, the checkpoint has {_text(shape)}",
                "config.json and weights belong to different models; fetch both again",
            )
    if "quantization_config" not in config:  # with one, some layers may be stored otherwise
        _check_layers(config, shapes, subject)
    _check_output(config, shapes, subject)


def _wanted(config: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """Shapes that follow from a configuration; ``None`` for what it does not say."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    width = _number(config, "head_dim")
    if width is None and hidden and heads:
        width = hidden // heads
    key_heads = _number(config, "num_key_value_heads") or heads
    queries = heads * width if heads and width else None
    keys = key_heads * width if key_heads and width else None
    middle, vocabulary = _number(config, "intermediate_size"), _number(config, "vocab_size")
    return {
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
    }


def _check_layers(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    count = _number(config, "num_hidden_layers")
    held: dict[int, set[str]] = {}
    for name in shapes:
        if (found := _LAYER.fullmatch(name)) is not None:
            held.setdefault(int(found[1][:9]), set()).add(found[2])
    if not held:
        return
    if count is not None and held.keys() != set(range(count)):
        missing = sorted(set(range(count)) - held.keys())
        what = f"layer {missing[0]} is missing" if missing else f"there are {len(held)}"
        raise ModelError(
            subject,
            f"asks for {count} layers, in the checkpoint {what}",
            "config.json and weights belong to different models; fetch both again",
        )
    first = min(held)
    for number, names in sorted(held.items()):
        if names != held[first]:
            differing = [f"layers.{number}.{name}" for name in sorted(names ^ held[first])]
            raise ModelError(
                subject,
                f"asks for layers of one form; layer {number} differs from layer {first} in "
                f"{listed(differing)}",
                "a shard is missing or belongs to another model; fetch it again",
            )


def _check_output(config: Mapping[str, Any], shapes: Mapping[str, _Shape], subject: str) -> None:
    architectures = config.get("architectures")
    causal = isinstance(architectures, list) and any(
        str(name).endswith("ForCausalLM") for name in architectures
    )
    table = "model.embed_tokens.weight" in shapes
    untied = config.get("tie_word_embeddings") is False
    if causal and table and untied and "lm_head.weight" not in shapes:
        raise ModelError(
            subject,
            "says that lm_head is a weight of its own, the checkpoint has no 'lm_head.weight'",
            "a shard is missing, or tie_word_embeddings should be true",
        )


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int else None


def _agree(shape: _Shape, expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )


def _text(shape: Any) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


_WEIGHT = ".weight"
_TABLE = re.compile(
    r"(?:wte|wpe|shared|emb|embed|embed_in|embed_tokens\w*|embed_positions\w*|\w*_emb|\w*embeddings?"
    r"|relative_attention_bias)"
)
_NORM = re.compile(r"(?:\w*norm\d*|ln_\w+|ln\d*)", re.IGNORECASE)
_CONVOLUTION_AXES = (3, 4, 5)

# Models whose linear layers are ``transformers.pytorch_utils.Conv1D``, stored [columns, rows], and
# the names of these layers.
_CONV1D_MODELS = {"decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
_CONV1D_LAYERS = ("c_attn", "q_attn", "c_proj", "c_fc")


def layer_of(
    name: str, shape: tuple[int, ...], dtype: str, config: Mapping[str, Any]
) -> Layer | None:
    """Describe a tensor as a layer, or return ``None`` for a norm, a bias and their like.

    The layer is what the graph of the same model would give for it: a linear layer's weight is
    read by a ``MatMul``, an embedding's by a ``Gather``.

    Args:
        name: the tensor's name.
        shape: its shape.
        dtype: numpy name of its floating-point type.
        config: the content of ``config.json``; its ``model_type`` tells who stores weights
            transposed.
    """
    kind = _kind(name, shape)
    if kind is None:
        return None
    transposed = (
        kind == LINEAR
        and str(config.get("model_type")) in _CONV1D_MODELS
        and name.split(".")[-2] in _CONV1D_LAYERS
    )
    return Layer(layer_name(name), kind, name, shape, dtype, transposed)


def _kind(name: str, shape: tuple[int, ...]) -> LayerKind | None:
    if not name.endswith(_WEIGHT) or 0 in shape:
        return None
    module = layer_name(name).rpartition(".")[2]
    if len(shape) in _CONVOLUTION_AXES:
        return CONVOLUTION
    if len(shape) != 2 or _NORM.fullmatch(module):
        return None
    return TABLE if _TABLE.fullmatch(module) else LINEAR
