"""``rotate``: rotate what flows through a decoder, so that no channel of it stands out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from compressor.errors import SpecError, listed
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prepare.maths.rotation import Rotation, rotation
from compressor.types.carrier import Capability, Carrier, WeightChange
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer, StoredTensor
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders whose residual stream only norms without a mean and products of matrices touch."""

_TABLE, _LAST_NORM, _OUTPUT = "model.embed_tokens", "model.norm.weight", "lm_head"
_READS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATES = ("mlp.gate_proj", "mlp.up_proj")
_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_BUFFERS = "rotary_emb.inv_freq"
_AROUND, _HEADS = "rotate the residual stream", "rotate the residual stream and heads"


class Rotate(GraphPass):
    """Rotate the residual stream of a decoder, and what its heads mix; it computes the same.

    A few channels of what flows through a language model are many times as large as the others,
    and set the scale of all. An orthogonal matrix spreads them over all channels: a Hadamard matrix
    with random signs (of the spec's seed), where the width has one. The scales of norms go into the
    products behind them, whose norms have scales of 1 then. The table of tokens and all products
    that write to the residual stream are multiplied by the matrix, and those that read from it by
    its transpose. `v_proj` and `o_proj` are rotated head by head, too. The written directory is an
    ordinary one of its class. Put the pass before those that round weights or activations; what
    `down_proj` reads would need a product as the model runs, and is not rotated. It takes llama,
    mistral, qwen2 and qwen3 with an output layer of their own.
    """

    name: ClassVar[str] = "rotate"
    source: ClassVar[str] = (
        "Ashkboos et al. 2024 (arXiv:2404.00456) section 4, what is folded into weights"
    )
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})

    heads: bool = Field(default=True, description="rotate `v_proj` and `o_proj` head by head, too")

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers of the decoder.

        Raises:
            SpecError: it is of another family, has tied embeddings, or tensors of its own.
        """
        parts = _parts_of(carrier)
        actions = {}
        for layer in carrier.layers():
            headed = self.heads and layer.name.endswith((".v_proj", ".o_proj"))
            actions[layer.name] = _HEADS if headed else _AROUND
        reasons = {n: "" if n in parts else "it is none of the decoder's" for n in actions}
        return Survey(plan_layers(self.name, actions, reasons))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Rotate it; of a checkpoint that is streamed, as its weights are read."""
        after = rotated(carrier, context.seed, heads=self.heads)
        outcomes = [LayerOutcome(x.name, x.dtype) for x in carrier.layers()]
        again = partial(rotated, seed=context.seed, heads=self.heads)
        return Outcome(after, tuple(outcomes), rescale=again)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model as it is: nothing becomes larger or smaller."""
        return carrier


def rotated(carrier: Carrier, seed: int, *, heads: bool) -> Carrier:
    """Return a decoder that computes the same with its residual stream rotated.

    Raises:
        SpecError: as :meth:`Rotate.survey`.
    """
    parts, tensors = _parts_of(carrier), carrier.tensors()
    turn = rotation(parts[_TABLE].shape[1], seed)
    width = _head_width(carrier) if heads else 0
    inner = rotation(width, seed + 1) if width else None
    changes, vectors = {}, {}
    for name, layer in parts.items():
        scale = _norm_before(name, tensors)
        if name.endswith(("o_proj", "down_proj")):
            by_heads = inner if name.endswith("o_proj") else None
            compute = partial(_written, turn, by_heads)
            changes[layer.weight] = WeightChange(layer, compute, None)
        else:
            by_heads = inner if name.endswith("v_proj") else None
            compute = partial(_read, turn, scale, by_heads)
            changes[layer.weight] = WeightChange(layer, compute, width if by_heads else 1)
        bias = tensors.get(f"{name}.bias")
        if inner is not None and bias is not None and name.endswith("v_proj"):
            value = bias.read()
            vectors[bias.name] = _each_head(inner, value[None])[0].to(value.dtype)
    for name, tensor in tensors.items():
        if name.endswith(("layernorm.weight", _LAST_NORM)):
            vectors[name] = torch.ones(tensor.shape, dtype=tensor.dtype)
    return carrier.with_changes(changes).with_weights(vectors)


def _norm_before(name: str, tensors: Mapping[str, StoredTensor]) -> Tensor | None:
    """Return the scales of the norm that a layer reads from, if it reads from one."""
    block = name.rpartition(".")[0].rpartition(".")[0]
    if name == _OUTPUT:
        norm = _LAST_NORM
    elif name.endswith(_READS):
        norm = f"{block}.input_layernorm.weight"
    elif name.endswith(_GATES):
        norm = f"{block}.post_attention_layernorm.weight"
    else:
        return None
    return tensors[norm].read().to(torch.float64)


def _read(
    turn: Rotation, scale: Tensor | None, heads: Rotation | None, matrix: Tensor, _: int
) -> Tensor:
    """Return rows of a weight that reads from the residual stream, or of the table."""
    wide = matrix.to(torch.float64)
    turned = turn.times(wide if scale is None else wide * scale)
    if heads is not None:
        turned = _each_head(heads, turned.T).T
    return turned.to(matrix.dtype).contiguous()


def _written(turn: Rotation, heads: Rotation | None, matrix: Tensor, _: int) -> Tensor:
    """Return a weight that writes to the residual stream."""
    wide = matrix.to(torch.float64)
    turned = turn.turned_rows(wide if heads is None else _each_head(heads, wide))
    return turned.to(matrix.dtype).contiguous()


def _each_head(heads: Rotation, rows: Tensor) -> Tensor:
    """Rotate each head's part of rows ``[n, heads * width]``."""
    return heads.times(rows.reshape(-1, len(heads.signs))).reshape(rows.shape)


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


def _parts_of(carrier: Carrier) -> dict[str, Layer]:
    """Return the layers that are rotated, by name.

    Raises:
        SpecError: the model is not one that can be rotated without changing what it computes.
    """
    config, kind = _config(carrier), str(_config(carrier).get("model_type"))
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
    if f"{_OUTPUT}.weight" not in tensors or config.get("tie_word_embeddings"):
        raise _refused(
            f"cannot turn tied embeddings: the scales of {_LAST_NORM} go into the output layer, "
            "and not into the table of tokens",
            "save the model with tie_word_embeddings: false and a weight lm_head.weight of its own",
        )
    parts, expected = [_TABLE, _OUTPUT], {_LAST_NORM}
    for index in range(_blocks(config)):
        block = f"model.layers.{index}"
        inside = (*_READS, "self_attn.o_proj", *_GATES, "mlp.down_proj")
        parts += [f"{block}.{part}" for part in inside]
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        expected |= {f"{block}.{name}" for name in (*norms, *_BIASES, *_HEAD_NORMS)}
    layers = {layer.name: layer for layer in carrier.layers()}
    missing = [part for part in parts if part not in layers]
    strange = sorted(tensors.keys() - expected - {f"{part}.weight" for part in parts})
    if missing or strange:
        what = f"misses {listed(missing)}" if missing else f"has no place for {listed(strange)}"
        raise _refused(f"{what} in a {kind}", "leave out this pass")
    return {part: layers[part] for part in parts}


def _blocks(config: Mapping[str, Any]) -> int:
    count = config.get("num_hidden_layers")
    return count if type(count) is int else 0


def _refused(problem: str, remedy: str) -> SpecError:
    return SpecError("pass rotate", problem, remedy)
