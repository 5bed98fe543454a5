"""Tell from names and shapes which tensors of a checkpoint are weights of layers, and of which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compressor.graph.layers import layer_name
from compressor.types.layers import Layer, LayerKind

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
        kind == "MatMul"
        and str(config.get("model_type")) in _CONV1D_MODELS
        and name.split(".")[-2] in _CONV1D_LAYERS
    )
    return Layer(layer_name(name), kind, name, shape, dtype, transposed)


def _kind(name: str, shape: tuple[int, ...]) -> LayerKind | None:
    if not name.endswith(_WEIGHT) or 0 in shape:
        return None
    module = layer_name(name).rpartition(".")[2]
    if len(shape) in _CONVOLUTION_AXES:
        return "Conv"
    if len(shape) != 2 or _NORM.fullmatch(module):
        return None
    return "Gather" if _TABLE.fullmatch(module) else "MatMul"
