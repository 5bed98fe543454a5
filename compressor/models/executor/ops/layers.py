"""Matrix products, normalizations and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.element_types import widened
from compressor.models.executor.node import (
    Node,
    Operator,
    Read,
    Table,
    along,
    positive,
)
from compressor.models.executor.ops.reference import BY_REFERENCE
from compressor.models.executor.program import Result


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: bool = False,  # noqa: N803  # ONNX's name
    transB: bool = False,  # noqa: N803
) -> Tensor:
    """Y = alpha * A' * B' + beta * C, where A' and B' may be transposed."""
    product = torch.mm(a.t() if transA else a, b.t() if transB else b)
    if alpha != 1.0:
        product = (product * alpha).to(a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1.0 else (c * beta).to(c.dtype))


def _einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *operands)


# Normalizations.


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float = 1e-5
) -> Tensor:
    """Normalize each channel by its running statistics, vectors ``[channels]``."""
    if x.dtype == scale.dtype == mean.dtype:
        return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    factor = scale.to(mean.dtype) * torch.rsqrt(variance + epsilon)
    shift = bias.to(mean.dtype) - mean * factor
    return (x * along(factor, 1, x.dim()) + along(shift, 1, x.dim())).to(x.dtype)


def live_batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Tensor:
    """Normalize by the batch's statistics, and move the running ones in place."""
    share = 1.0 - momentum  # ONNX says what stays, torch what is new
    return functional.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)


def check_evaluated(node: Node) -> None:
    """Check that a batch norm is for evaluation.

    Raises:
        ModelError: it was exported in training mode.
    """
    if node.read("training_mode", "bool", False):
        raise node.refuse("attribute 'training_mode' is 1")


_BY_GROUP: Any = Read(lambda node, _: node.opset < 21)


def _layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: torch.dtype = torch.float32,
) -> Tensor:
    shape = x.shape[axis:]
    plain = scale.shape == shape and (bias is None or bias.shape == shape)
    if plain and x.dtype == scale.dtype:
        return functional.layer_norm(x, shape, scale, bias, epsilon)
    result = functional.layer_norm(x.to(stash_type), shape, eps=epsilon).to(x.dtype) * scale
    return result if bias is None else result + bias


def _rms_norm(
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: torch.dtype = torch.float32,
) -> Tensor:
    """x / sqrt(mean of x**2 + epsilon) * scale."""
    wide = x.to(stash_type)
    over = positive(range(axis, 0) if axis < 0 else range(axis, x.dim()), x.dim())
    factor = torch.rsqrt((wide * wide).mean(over, keepdim=True) + epsilon)
    return (wide * factor).to(scale.dtype) * scale


def _group_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: torch.dtype = torch.float32,
    by_group: bool = _BY_GROUP,
) -> Tensor:
    """Scale and bias have one value a group before opset 21, one a channel since."""
    if by_group:
        width = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(width), bias.repeat_interleave(width)
    wide = x.to(stash_type) if x.dtype.itemsize < stash_type.itemsize else x
    scale, bias = scale.to(wide.dtype), bias.to(wide.dtype)
    return torch.group_norm(wide, num_groups, scale, bias, epsilon).to(x.dtype)


def _instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return torch.group_norm(x, x.shape[1], scale, bias, epsilon)


def _local_response_norm(
    x: Tensor, *, size: int, alpha: float = 0.0001, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """Where the size is even, ONNX sees one channel more after and PyTorch one more before."""
    return functional.local_response_norm(x.flip(1), size, alpha, beta, bias).flip(1)


# Attention.


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Turn (batch, length, heads * size) into (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """Turn (batch, heads, length, size) into (batch, length, heads * size)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    is_causal: bool = False,
    scale: float = 0.0,
) -> Result:
    """Attention of ``[batch, heads, length, size]``; the past's keys and values come first."""
    packed = query.dim() == 3
    if packed:
        query = _split_heads(query, q_num_heads)
        key, value = _split_heads(key, kv_num_heads), _split_heads(value, kv_num_heads)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    queries, keys = query.shape[2], key.shape[2]
    hidden: float = False
    if mask is not None:
        if mask.dtype != torch.bool:
            mask, hidden = mask.to(query.dtype), float("-inf")
        mask = functional.pad(mask, (0, keys - mask.shape[-1]), value=hidden)
    if is_causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(past)
        mask = seen if mask is None else mask.where(seen, hidden)
    result = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale or None, enable_gqa=query.shape[1] != key.shape[1]
    )
    return _merge_heads(result) if packed else result, key, value


def _rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of features by angles that depend on the position (Su et al., RoFormer).

    Args:
        x: (batch, heads, length, size), or (batch, length, heads * size).
        cos: cosines of the angles, by position or by sample and position.
        sin: sines of the angles.
        positions: (batch, length), or ``None`` where the angles are by sample already.
        num_heads: number of heads, where they are not an axis.
        rotary_embedding_dim: features that are rotated, 0 for all.
        interleaved: whether pairs are neighbours or lie half a head apart.
    """
    value = _split_heads(x, num_heads) if x.dim() == 3 else x
    width = rotary_embedding_dim or value.shape[-1]
    turned, rest = value[..., :width], value[..., width:]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = -1 if interleaved else -2
    sizes = (-1, 2) if interleaved else (2, -1)
    first, second = turned.reshape(*turned.shape[:-1], *sizes).unbind(pairs)
    parts = [cos * first - sin * second, sin * first + cos * second]
    result = torch.cat([torch.stack(parts, pairs).flatten(-2), rest], -1)
    return _merge_heads(result) if x.dim() == 3 else result


LAYERS: Table = {
    "Attention": Operator(_attention, outputs=3, otherwise=BY_REFERENCE),
    "BatchNormalization": Operator(batch_norm, check=check_evaluated, train=live_batch_norm),
    "Einsum": Operator(_einsum),
    "Gemm": Operator(_gemm),
    "GroupNormalization": Operator(_group_norm),
    "InstanceNormalization": Operator(_instance_norm),
    "LRN": Operator(_local_response_norm),
    "LayerNormalization": Operator(_layer_norm, otherwise=BY_REFERENCE),
    "MatMul": Operator(widened(torch.matmul), inputs=(2, 2)),
    "RMSNormalization": Operator(_rms_norm),
    "RotaryEmbedding": Operator(_rotary_embedding),
    "SimplifiedLayerNormalization": Operator(_rms_norm),
}
