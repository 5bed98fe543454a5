"""A decoder as a graph with a cache: tokens, a mask and the past in; logits and the present out.

Operators, inputs and outputs are those that onnxruntime-genai looks for: ``GroupQueryAttention``
turns queries and keys, adds keys and values to the cache and attends to it, so that a token costs
no more than its own products and a look at the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper

from compressor.errors import ModelError, SpecError, listed
from compressor.exporters.genai.description import Decoder
from compressor.exporters.genai.weights import (
    Codes,
    check_float,
    check_table,
    codes_of,
    float_tensors,
)
from compressor.exporters.onnx.matmul_nbits import ACCURACY, DOMAIN, Compute
from compressor.exporters.onnx.opsets import ir_version
from compressor.graph.skeleton import Skeleton
from compressor.types.layers import StoredTensor

OPSET = 23  # the first with RMSNormalization
_TABLE, _OUTPUT = "model.embed_tokens", "lm_head"
_BUFFERS = "rotary_emb.inv_freq"  # computed anew
_TIES = {False: (), True: (f"{_OUTPUT}.weight",)}
_KV = ("key", "value")
_KEPT = {None: TensorProto.FLOAT, 8: TensorProto.INT8, 4: TensorProto.UINT8}  # by bits


def decoder_graph(
    decoder: Decoder, tensors: Mapping[str, StoredTensor], compute: Compute
) -> Skeleton:
    """Return the graph of a decoder; nothing is computed.

    Args:
        tensors: its parameters, by the names that ``transformers`` gives them.
        compute: what products with codes round their inputs to.

    Raises:
        SpecError: there are tensors that it has no place for, or codes without a kernel.
        ModelError: it misses some, or they have other shapes.
    """
    given = {name: t for name, t in tensors.items() if not name.endswith(_BUFFERS)}
    _check_names(decoder, given)
    return _Builder(decoder, given, compute).build()


def _check_names(decoder: Decoder, given: Mapping[str, StoredTensor]) -> None:
    strange = sorted(given.keys() - decoder.names.keys() - set(_TIES[decoder.tied]))
    if strange:
        raise SpecError(
            "export genai",
            f"has no place for {listed(strange)} in a {decoder.kind}",
            "leave out this export",
        )
    needed = decoder.names.keys() - set(_TIES[decoder.tied])
    missing = sorted(needed - given.keys())
    wrong = [n for n in sorted(needed & given.keys()) if given[n].shape != decoder.names[n]]
    if missing or wrong:
        raise ModelError(
            "export genai",
            f"misses {listed(missing)} of a {decoder.kind}"
            if missing
            else f"has {wrong[0]!r} with shape {list(given[wrong[0]].shape)}, and config.json "
            f"describes {list(decoder.names[wrong[0]])}",
            "a shard is missing, or config.json belongs to another model",
        )
    for source in given.values():
        check_float(source)


class _Builder:
    """Adds nodes to a graph, one after another."""

    def __init__(self, decoder: Decoder, given: Mapping[str, StoredTensor], compute: Compute):
        self._decoder = decoder
        self._given = given
        self._compute: Compute = compute
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, ir.TensorProtocol] = {}

    def build(self) -> Skeleton:
        """Return the whole graph."""
        decoder = self._decoder
        self._stored("cos_cache", decoder.cosine)
        self._stored("sin_cache", decoder.sine)
        seen, length = self._lengths()
        residual, branch = self._embedded(), ""
        for index, window in enumerate(decoder.windows):
            start = f"model.layers.{index}"
            norm = f"{start}.input_layernorm"
            normed, residual = self._normed(norm, residual, branch)
            branch = self._attention(f"{start}.self_attn", index, window, normed, (seen, length))
            norm = f"{start}.post_attention_layernorm"
            normed, residual = self._normed(norm, residual, branch)
            branch = self._gated(f"{start}.mlp", normed)
        normed, _ = self._normed("model.norm", residual, branch)
        self._product(_OUTPUT, [_TABLE if decoder.tied else _OUTPUT], normed, "logits")
        return self._skeleton()

    def _skeleton(self) -> Skeleton:
        decoder = self._decoder
        kept: list[str | int | None] = ["batch", decoder.key_heads, "past", decoder.kept_width]
        grown: list[str | int | None] = ["batch", decoder.key_heads, "total", decoder.kept_width]
        floats, integers = TensorProto.FLOAT, TensorProto.INT64
        cached = _KEPT[decoder.kept_bits]
        value = helper.make_tensor_value_info
        inputs = [
            value("input_ids", integers, ["batch", "sequence"]),
            value("attention_mask", integers, ["batch", "total"]),
        ]
        shape: list[str | int | None] = ["batch", "sequence", decoder.vocabulary]
        outputs = [value("logits", floats, shape)]
        for index in range(len(decoder.windows)):
            for part in _KV:
                inputs.append(value(f"past_key_values.{index}.{part}", cached, kept))
                outputs.append(value(f"present.{index}.{part}", cached, grown))
        initializers = [
            TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
            for name, tensor in sorted(self._tensors.items())
        ]
        graph = helper.make_graph(self._nodes, decoder.kind, inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version(OPSET))
        return Skeleton(proto, dict(sorted(self._tensors.items())), {})

    def _node(
        self,
        kind: str,
        inputs: Sequence[str],
        output: str,
        fields: Mapping[str, Any] = MappingProxyType({}),
        *,
        others: Sequence[str] = (),
        domain: str = "",
    ) -> str:
        """Add an operator with its attributes; return its first output."""
        made = helper.make_node(kind, inputs, [output, *others], output, domain=domain, **fields)
        self._nodes.append(made)
        return output

    def _add(
        self,
        kind: str,
        inputs: Sequence[str],
        output: str,
        fields: Mapping[str, Any],
        others: Sequence[str] = (),
    ) -> str:
        """Add an operator of ONNX Runtime's own; return its first output."""
        return self._node(kind, inputs, output, fields, others=others, domain=DOMAIN)

    def _stored(self, name: str, value: torch.Tensor) -> str:
        self._tensors[name] = ir.tensor(value.contiguous(), name=name)
        return name

    def _float(self, name: str, dtype: torch.dtype | None = None, plus: float = 0.0) -> str:
        """Add a float parameter in its own type, or in another; return its name."""
        self._tensors[name] = float_tensors(name, [self._given[name]], dtype, plus)
        return name

    def _widened(self, name: str, value: str, dtype: torch.dtype) -> str:
        """Return a value as float32."""
        if dtype == torch.float32:
            return value
        return self._node("Cast", [value], f"{name}.float32", {"to": TensorProto.FLOAT})

    def _lengths(self) -> tuple[str, str]:
        """Return the last position of each sequence, and the length of the longest, int32."""
        self._stored("one", torch.tensor([1]))
        self._stored("one_scalar", torch.tensor(1))
        sums = self._node("ReduceSum", ["attention_mask", "one"], "lengths", {"keepdims": 0})
        last = self._node("Sub", [sums, "one"], "last")
        shape = self._node("Shape", ["attention_mask"], "mask_shape")
        total = self._node("Gather", [shape, "one_scalar"], "total", {"axis": 0})
        return (
            self._node("Cast", [last], "last_position", {"to": TensorProto.INT32}),
            self._node("Cast", [total], "total_length", {"to": TensorProto.INT32}),
        )

    def _embedded(self) -> str:
        decoder, source = self._decoder, self._given[f"{_TABLE}.weight"]
        codes = codes_of(_TABLE, [source], self._compute)
        if codes is None:
            table = self._float(source.name)
            rows = self._node("Gather", [table, "input_ids"], f"{_TABLE}.rows", {"axis": 0})
            rows = self._widened(f"{_TABLE}.rows", rows, source.dtype)
        else:
            rows = self._looked_up(codes)
        if decoder.table_scale == 1.0:
            return rows
        scale = self._stored("table_scale", torch.tensor(decoder.table_scale))
        return self._node("Mul", [rows, scale], f"{_TABLE}.scaled")

    def _looked_up(self, codes: Codes) -> str:
        """Return rows of a table of codes, which the output layer may have, too."""
        check_table(codes)
        packing, inputs = codes.packing, list(self._coded(codes))
        flat = torch.tensor([packing.layer.rows, -1])
        shape = self._stored(f"{_TABLE}.flat", flat)
        inputs[0] = self._node("Reshape", [inputs[0], shape], f"{_TABLE}.codes")
        inputs.insert(1, "input_ids")
        fields = {"gather_axis": 0, "quantize_axis": 1, "block_size": packing.block}
        fields["bits"] = packing.bits
        return self._add("GatherBlockQuantized", inputs, f"{_TABLE}.rows", fields)

    def _coded(self, codes: Codes) -> list[str]:
        """Add the initializers of codes; return their names."""
        made = codes.tensors()
        self._tensors |= made
        return list(made)

    def _normed(self, name: str, residual: str, branch: str) -> tuple[str, str]:
        """Add a branch to the residual stream and normalize it; return both."""
        family, epsilon = self._decoder.family, self._decoder.epsilon
        gamma = self._float(f"{name}.weight", torch.float32, float(family.norms_add_one))
        if not branch:
            return self._rms(name, residual, gamma), residual
        kind, fields = "SkipSimplifiedLayerNormalization", {"epsilon": epsilon}
        self._add(kind, [residual, branch, gamma], name, fields, ["", "", f"{name}.sum"])
        return name, f"{name}.sum"

    def _rms(self, name: str, value: str, gamma: str) -> str:
        fields = {"axis": -1, "epsilon": self._decoder.epsilon}
        return self._node("RMSNormalization", [value, gamma], name, fields)

    def _product(self, name: str, layers: Sequence[str], value: str, output: str = "") -> str:
        """Multiply with the weights of layers, one above the other; they have one form.

        Args:
            name: of the product.
            output: the name of what comes out; by default that of the product.
        """
        sources = [self._given[f"{layer}.weight"] for layer in layers]
        biases = [f"{layer}.bias" for layer in layers if f"{layer}.bias" in self._given]
        bias = f"{name}.bias" if biases else ""
        if biases:
            parts = [self._given[each] for each in biases]
            # What it is added to is float32, whatever the type of the weights.
            self._tensors[bias] = float_tensors(bias, parts, torch.float32)
        codes = codes_of(layers[0] if len(layers) == 1 else name, sources, self._compute)
        output = output or name
        if codes is not None:
            inputs = [value, *self._coded(codes)]
            if bias:
                inputs += [""] * (5 - len(inputs)) + [bias]
            packing = codes.packing
            fields = {"K": packing.layer.columns, "N": packing.layer.rows, "bits": packing.bits}
            fields |= {"block_size": packing.block, "accuracy_level": ACCURACY[self._compute]}
            return self._add("MatMulNBits", inputs, output, fields)
        weight = self._float(sources[0].name)
        weight = self._widened(weight, weight, sources[0].dtype)
        into = f"{name}.product" if bias else output
        made = self._add("FusedMatMul", [value, weight], into, {"transB": 1})
        return self._node("Add", [made, bias], output) if bias else made

    def _attention(
        self, name: str, index: int, window: int, value: str, lengths: tuple[str, str]
    ) -> str:
        decoder = self._decoder
        parts = [f"{name}.{part}_proj" for part in "qkv"]
        if decoder.family.fused:
            inputs = [self._product(f"{name}.qkv_proj", [f"{name}.qkv_proj"], value), "", ""]
        elif not decoder.family.head_norms and self._stackable(parts):
            inputs = [self._product(f"{name}.qkv_proj", parts, value), "", ""]
        else:
            inputs = [self._product(part, [part], value) for part in parts]
        if decoder.family.head_norms:
            heads = (("q", 0, decoder.heads), ("k", 1, decoder.key_heads))
            for part, place, count in heads:
                inputs[place] = self._head_normed(f"{name}.{part}_norm", inputs[place], count)
        past = [f"past_key_values.{index}.{part}" for part in _KV]
        present = [f"present.{index}.{part}" for part in _KV]
        fields: dict[str, Any] = {
            "num_heads": decoder.heads,
            "kv_num_heads": decoder.key_heads,
            "scale": decoder.scaling,
            "local_window_size": window,
            "do_rotary": 1,
            "rotary_interleaved": 0,
        }
        inputs += [*past, *lengths, "cos_cache", "sin_cache"]
        if decoder.caches:
            inputs += ["", "", "", *self._cache_scales(name)]
            fields |= {"kv_cache_bit_width": decoder.kept_bits}
            fields |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        attended = self._add("GroupQueryAttention", inputs, f"{name}.attended", fields, present)
        return self._product(f"{name}.o_proj", [f"{name}.o_proj"], attended)

    def _cache_scales(self, name: str) -> tuple[str, str]:
        """Add the scales of what an attention keeps, one for each channel of each head."""
        cache = self._decoder.caches[name]
        count = self._decoder.key_heads * self._decoder.head_width
        planned = cache.keys is None
        keys = torch.ones(count) if planned else torch.tensor(cache.scales("keys"))
        values = torch.ones(count) if planned else torch.tensor(cache.scales("values"))
        return self._stored(f"{name}.k_scale", keys), self._stored(f"{name}.v_scale", values)

    def _stackable(self, layers: Sequence[str]) -> bool:
        """Return whether weights are codes of one form, so that one product can be of all."""
        sources = [self._given[f"{layer}.weight"] for layer in layers]
        biased = [f"{layer}.bias" in self._given for layer in layers]
        same = all(biased) or not any(biased)
        return same and codes_of(layers[0], sources, self._compute) is not None

    def _head_normed(self, name: str, value: str, heads: int) -> str:
        """Normalize each head."""
        width = self._decoder.head_width
        apart = self._stored(f"heads_{heads}", torch.tensor([0, 0, heads, width]))
        joined = self._stored(f"joined_{heads}", torch.tensor([0, 0, heads * width]))
        split = self._node("Reshape", [value, apart], f"{name}.heads")
        gamma = self._float(f"{name}.weight", torch.float32)
        normed = self._rms(f"{name}.normed", split, gamma)
        return self._node("Reshape", [normed, joined], name)

    def _gated(self, name: str, value: str) -> str:
        if self._decoder.family.fused:
            layer = f"{name}.gate_up_proj"
            both = self._product(layer, [layer], value)
            gate, up = f"{name}.gate", f"{name}.up"
            self._node("Split", [both], gate, {"axis": -1, "num_outputs": 2}, others=[up])
        else:
            gate, up = (
                self._product(part, [part], value)
                for part in (f"{name}.gate_proj", f"{name}.up_proj")
            )
        gated = self._node("Mul", [self._activated(name, gate), up], f"{name}.gated")
        return self._product(f"{name}.down_proj", [f"{name}.down_proj"], gated)

    def _activated(self, name: str, gate: str) -> str:
        kind = self._decoder.activation
        if kind == "silu":
            sigmoid = self._node("Sigmoid", [gate], f"{name}.sigmoid")
            return self._node("Mul", [gate, sigmoid], f"{name}.activated")
        return self._node("Gelu", [gate], f"{name}.activated", {"approximate": kind})
