"""Multiply the weights of a decoder by orthogonal matrices so that it computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.errors import SpecError, listed
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prepare.maths.rotation import DenseRotation, Rotation, rotation
from compressor.types.carrier import Carrier, WeightChange
from compressor.types.layers import Layer, StoredTensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders whose residual stream only norms without a mean and products of matrices touch."""

TABLE, OUTPUT = "model.embed_tokens", "lm_head"
LAST_NORM = "model.norm.weight"
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
"""Norms of a block; their scales go into the products behind them."""

_READS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATES = ("mlp.gate_proj", "mlp.up_proj")
_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_BUFFERS = "rotary_emb.inv_freq"

AnyRotation = Rotation | DenseRotation


@dataclass(frozen=True, eq=False)
class Rotations:
    """The matrices that a decoder is rotated by.

    Attributes:
        residual: what flows between the blocks.
        heads: what the heads of each block mix; none where that is left as it is.
    """

    residual: AnyRotation
    heads: tuple[AnyRotation, ...] = ()

    def of_block(self, name: str) -> AnyRotation | None:
        """Return the matrix for the heads of the block that a tensor is in."""
        parts = name.split(".")
        inside = parts[:2] == ["model", "layers"]
        return self.heads[int(parts[2])] if inside and self.heads else None


def random_rotations(carrier: Carrier, seed: int, *, heads: bool) -> Rotations:
    """Return randomized Hadamard matrices, the same one for all heads.

    Raises:
        SpecError: as :func:`parts_of`.
    """
    residual = rotation(parts_of(carrier)[TABLE].shape[1], seed)
    if not heads:
        return Rotations(residual)
    inner = rotation(_head_width(carrier), seed + 1)
    return Rotations(residual, (inner,) * blocks_of(carrier))


def rotated(carrier: Carrier, rotations: Rotations) -> Carrier:
    """Return a decoder that computes the same with its residual stream and heads rotated.

    Raises:
        SpecError: as :func:`parts_of`.
    """
    parts, tensors = parts_of(carrier), carrier.tensors()
    changes, vectors = {}, {}
    for name, layer in parts.items():
        heads = rotations.of_block(name)
        compute = partial(_rows, name, rotations, norm_before(name, tensors))
        if name.endswith(("o_proj", "down_proj")):
            multiple = None
        else:
            multiple = len(heads) if heads is not None and name.endswith("v_proj") else 1
        changes[layer.weight] = WeightChange(layer, compute, multiple)
        bias = tensors.get(f"{name}.bias")
        if heads is not None and bias is not None and name.endswith("v_proj"):
            value = bias.read()
            vectors[bias.name] = rotated_bias(value, heads).to(value.dtype)
    for name, tensor in tensors.items():
        if name.endswith((*NORMS, LAST_NORM)):
            vectors[name] = torch.ones(tensor.shape, dtype=tensor.dtype)
    return carrier.with_changes(changes).with_weights(vectors)


def _rows(name: str, rotations: Rotations, scale: Tensor | None, matrix: Tensor, _: int) -> Tensor:
    return rotated_weight(name, rotations, scale, matrix).to(matrix.dtype).contiguous()


def rotated_weight(name: str, rotations: Rotations, scale: Tensor | None, matrix: Tensor) -> Tensor:
    """Return rows of a layer's weight, rotated, in the dtype of the matrices.

    Args:
        name: the layer.
        scale: of the norm that it reads from, ``[columns]``; ``None`` where it reads from none.
        matrix: ``[rows, columns]``: all rows of a layer that writes to the residual stream, and of
            `v_proj` all of some heads.
    """
    heads, wide = rotations.of_block(name), matrix.to(rotations.residual.dtype)
    if name.endswith(("o_proj", "down_proj")):
        if heads is not None and name.endswith("o_proj"):
            wide = _each_head(heads, wide)
        return rotations.residual.rotated_rows(wide)
    read = rotations.residual.times(wide if scale is None else wide * scale.to(wide.dtype))
    if heads is not None and name.endswith("v_proj"):
        return _each_head(heads, read.T).T
    return read


def rotated_bias(bias: Tensor, heads: AnyRotation) -> Tensor:
    """Return the bias of `v_proj`, rotated, ``[rows]``, in the dtype of the matrix."""
    return _each_head(heads, bias[None].to(heads.dtype))[0]


def _each_head(heads: AnyRotation, rows: Tensor) -> Tensor:
    """Rotate each head's part of rows ``[n, heads * width]``."""
    return heads.times(rows.reshape(-1, len(heads))).reshape(rows.shape)


def norm_before(name: str, tensors: Mapping[str, StoredTensor]) -> Tensor | None:
    """Return the scales of the norm that a layer reads from, float64, if it reads from one."""
    block = name.rpartition(".")[0].rpartition(".")[0]
    if name == OUTPUT:
        norm = LAST_NORM
    elif name.endswith(_READS):
        norm = f"{block}.{NORMS[0]}"
    elif name.endswith(_GATES):
        norm = f"{block}.{NORMS[1]}"
    else:
        return None
    return tensors[norm].read().to(torch.float64)


def untied(carrier: Carrier) -> Carrier:
    """Return a carrier whose output layer has a weight of its own, where that can be said of it.

    The scales of the last norm go into the output layer. With the table's weight they would go into
    the table, too, and what it gives to the first block would not be the rotated stream.
    """
    if not isinstance(carrier, CheckpointCarrier) or not is_tied(carrier):
        return carrier
    table = carrier.tensors()[f"{TABLE}.weight"]
    if table.codes is not None or carrier.config.get("model_type") not in FAMILIES:
        return carrier
    return carrier.with_own_output(table.name, f"{OUTPUT}.weight")


def added_by_untying(carrier: Carrier) -> tuple[str, ...]:
    """Return a note on what untying the output layer costs; none if it was not tied."""
    if not (isinstance(carrier, CheckpointCarrier) and carrier.source.untied):
        return ()
    size = carrier.tensors()[f"{OUTPUT}.weight"].float_nbytes
    return (
        f"{OUTPUT} gets a weight of its own, {size:,} bytes in floats: the scales of {LAST_NORM} "
        f"go into it, and not into {TABLE}, whose weight it had",
    )


def is_tied(carrier: Carrier) -> bool:
    """Return whether a decoder's output layer has the weight of its table of tokens."""
    tensors = carrier.tensors()
    shared = f"{OUTPUT}.weight" not in tensors or _config(carrier).get("tie_word_embeddings")
    return f"{TABLE}.weight" in tensors and bool(shared)


def parts_of(carrier: Carrier) -> dict[str, Layer]:
    """Return the layers that are rotated, by name.

    Raises:
        SpecError: the model is not one that can be rotated without changing what it computes.
    """
    kind = model_type(carrier)
    if kind not in FAMILIES:
        raise _refused(
            f"knows no residual stream in a model of type {kind!r}, only in {', '.join(FAMILIES)}",
            "give a Hugging Face directory of one of these as model.checkpoint, with factory: "
            "transformers.AutoModelForCausalLM or alone",
        )
    tensors = {n: t for n, t in carrier.tensors().items() if not n.endswith(_BUFFERS)}
    coded = sorted(name for name, tensor in tensors.items() if tensor.codes is not None)
    if coded:
        raise _refused(f"turns float weights, and {coded[0]!r} is codes", "put it before the pass")
    if is_tied(carrier):
        raise _refused(
            f"cannot turn a module's tied embeddings: the scales of {LAST_NORM} go into the "
            "output layer, and not into the table of tokens",
            "leave out model.factory: a checkpoint's output layer gets a weight of its own",
        )
    parts, expected = [TABLE, OUTPUT], {LAST_NORM}
    for index in range(blocks_of(carrier)):
        block = f"model.layers.{index}"
        inside = (*_READS, "self_attn.o_proj", *_GATES, "mlp.down_proj")
        parts += [f"{block}.{part}" for part in inside]
        expected |= {f"{block}.{name}" for name in (*NORMS, *_BIASES, *_HEAD_NORMS)}
    layers = {layer.name: layer for layer in carrier.layers()}
    missing = [part for part in parts if part not in layers]
    strange = sorted(tensors.keys() - expected - {f"{part}.weight" for part in parts})
    if missing or strange:
        what = f"misses {listed(missing)}" if missing else f"has no place for {listed(strange)}"
        raise _refused(f"{what} in a {kind}", "leave out this pass")
    return {part: layers[part] for part in parts}


def model_type(carrier: Carrier) -> str:
    """Return the model type by the configuration; the text ``None`` without one."""
    return str(_config(carrier).get("model_type"))


def blocks_of(carrier: Carrier) -> int:
    """Return how many blocks a decoder has by its configuration."""
    count = _config(carrier).get("num_hidden_layers")
    return count if type(count) is int else 0


def _head_width(carrier: Carrier) -> int:
    config = _config(carrier)
    width, count = config.get("head_dim"), config.get("num_attention_heads")
    if type(width) is int and width > 0:
        return width
    return int(config["hidden_size"]) // int(count or 1)


def _config(carrier: Carrier) -> Mapping[str, Any]:
    if isinstance(carrier, CheckpointCarrier | TorchCarrier) and carrier.folder is not None:
        return carrier.config
    return {}


def _refused(problem: str, remedy: str) -> SpecError:
    return SpecError("pass rotate", problem, remedy)
