"""Operators of ONNX Runtime's own domain, ``com.microsoft``."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.attention import masked_softmax, merge_heads, split_heads
from compressor.models.executor.ops.normalization import layer_norm, rms_norm
from compressor.models.executor.ops.quantize import QUANTIZE
from compressor.models.executor.program import Op, Result


def _gelu(_: NodeView) -> Op:
    def run(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.gelu(x if bias is None else x + bias)

    return run


def _fast_gelu(_: NodeView) -> Op:
    def run(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.gelu(x if bias is None else x + bias, approximate="tanh")

    return run


def _quick_gelu(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.702)

    def run(x: Tensor) -> Tensor:
        return x * torch.sigmoid(alpha * x)

    return run


def _fused_matmul(node: NodeView) -> Op:
    alpha = node.number("alpha", 1.0)
    a_across, b_across = node.flag("transA"), node.flag("transB")
    if node.flag("transBatchA") or node.flag("transBatchB"):
        raise node.refuse("attribute 'transBatchA' or 'transBatchB' is 1")

    def run(a: Tensor, b: Tensor) -> Tensor:
        a = a.transpose(-1, -2) if a_across and a.dim() > 1 else a
        b = b.transpose(-1, -2) if b_across and b.dim() > 1 else b
        return torch.matmul(a, b) * alpha

    return run


def _skip_layer_norm(node: NodeView) -> Op:
    """Layer normalization of the sum of input, skip and bias, which is the fourth output."""
    epsilon = node.number("epsilon", 1e-12)
    node.wants(3)

    def run(
        x: Tensor,
        skip: Tensor,
        gamma: Tensor,
        beta: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Result:
        total = x + skip if bias is None else x + skip + bias
        result = functional.layer_norm(total, gamma.shape, gamma, beta, epsilon)
        return result, None, None, total

    return run


def _skip_rms_norm(node: NodeView) -> Op:
    epsilon = node.number("epsilon", 1e-12)
    node.wants(3)

    def run(x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> Result:
        total = x + skip if bias is None else x + skip + bias
        wide = total.to(torch.float32)
        factor = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
        return (wide * factor).to(x.dtype) * gamma, None, None, total

    return run


def _multi_head_attention(node: NodeView) -> Op:
    """Attention over separate query, key and value, padding masked by a large negative bias."""
    heads = node.integer("num_heads")
    factor = node.number("scale", 0.0)
    filler = node.number("mask_filter_value", -10000.0)
    causal = node.flag("unidirectional")
    if node.has_input(8) or node.has_input(9):
        raise node.refuse("a key and value buffer shared between steps is not supported")
    if not node.has_input(1) or not node.has_input(2):
        raise node.refuse("query, key and value packed into one input are not supported")
    node.wants(1)
    node.wants(2)

    def run(query: Tensor, key: Tensor, value: Tensor, *more: Tensor | None) -> Result:
        bias, padding, added, past_key, past_value = (*more, *(None,) * 5)[:5]
        if bias is not None:
            hidden = query.shape[-1]
            parts = torch.split(bias, [hidden, hidden, bias.numel() - 2 * hidden])
            query = query + parts[0]
            key, value = (
                x + part if x.dim() == 3 else x + part.reshape(heads, 1, -1)
                for x, part in zip((key, value), parts[1:], strict=True)
            )
        query = split_heads(query, heads)
        key, value = (split_heads(x, heads) if x.dim() == 3 else x for x in (key, value))
        if past_key is not None and past_value is not None:
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        scores = query @ key.transpose(-1, -2) * (factor or 1 / math.sqrt(query.shape[-1]))
        if causal:
            scores = scores.masked_fill(_future(scores), float("-inf"))
        if padding is not None:
            scores = scores + filler * (~_kept(padding, scores)).to(scores.dtype)
        if added is not None:
            scores = scores + added
        return merge_heads(masked_softmax(scores) @ value), key, value

    return run


def _future(scores: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return torch.triu(ones, keys - queries + 1)


def _kept(padding: Tensor, scores: Tensor) -> Tensor:
    """Return which keys are no padding, from their number or from a mask."""
    batch, _, _, keys = scores.shape
    if padding.dim() == 1:
        if padding.numel() != batch:
            raise ValueError("the key padding mask holds cumulated lengths; give a mask")
        return torch.arange(keys, device=scores.device) < padding.reshape(-1, 1, 1, 1)
    return padding.reshape(batch, 1, -1, padding.shape[-1]) != 0


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """Split bytes into their values, the low bits first; the last axis grows accordingly."""
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    values = torch.bitwise_right_shift(codes.unsqueeze(-1), shifts) & ((1 << bits) - 1)
    return values.flatten(-2)


def _matmul_n_bits(node: NodeView) -> Op:
    """A times the transpose of (codes - zero point) * scale, by blocks of the columns."""
    columns, rows = node.integer("K"), node.integer("N")
    bits, block = node.integer("bits", 4), node.integer("block_size")
    node.ignore("accuracy_level")
    if bits not in (2, 4, 8):
        raise node.refuse(f"attribute 'bits' is {bits}, not 2, 4 or 8")
    if node.integer("weight_prepacked", 0):
        raise node.refuse("attribute 'weight_prepacked' asks for a layout of one device")
    if node.has_input(4):
        raise node.refuse("input 'g_idx' is not supported")
    blocks = -(-columns // block)

    def run(
        a: Tensor,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        _: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        zero: Tensor | int = 1 << (bits - 1)
        if zeros is not None:
            given = zeros.reshape(rows, -1)
            packed = given.dtype == torch.uint8
            zero = (_unpacked(given, bits) if packed else given)[:, :blocks, None].to(a.dtype)
        levels = _unpacked(codes.reshape(rows, blocks, -1), bits).to(a.dtype)
        weight = (levels - zero) * scales.reshape(rows, blocks, 1)
        return functional.linear(a, weight.reshape(rows, -1)[:, :columns], bias)

    return run


CONTRIB: Table = {
    "BiasGelu": _gelu,
    "DequantizeLinear": QUANTIZE["DequantizeLinear"],
    "FastGelu": _fast_gelu,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "LayerNormalization": layer_norm,
    "MatMulNBits": _matmul_n_bits,
    "MultiHeadAttention": _multi_head_attention,
    "QuantizeLinear": QUANTIZE["QuantizeLinear"],
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": rms_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
}
