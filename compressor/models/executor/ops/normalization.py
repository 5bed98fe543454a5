"""Normalizations."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import positive
from compressor.models.executor.program import Op, Result


def batch_norm(node: NodeView) -> Op:
    """Prepare ``BatchNormalization``; a module that is trained takes the batch's statistics."""
    epsilon = node.number("epsilon", 1e-5)
    share = 1.0 - node.number("momentum", 0.9)  # ONNX says what stays, torch what is new
    if node.flag("training_mode"):
        raise node.refuse("attribute 'training_mode' is 1")
    if not node.flag("spatial", default=True):
        raise node.refuse("attribute 'spatial' is 0")

    def run(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if x.dtype == scale.dtype == mean.dtype:
            return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        shape = (-1, *(1,) * (x.dim() - 2))
        factor = scale.to(mean.dtype) * torch.rsqrt(variance + epsilon)
        shift = bias.to(mean.dtype) - mean * factor
        return (x * factor.reshape(shape) + shift.reshape(shape)).to(x.dtype)

    def train(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return functional.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)

    node.train = train
    return run


def layer_norm(node: NodeView) -> Op:
    """Prepare ``LayerNormalization``, its statistics included."""
    axis, epsilon = node.integer("axis", -1), node.number("epsilon", 1e-5)
    stash = TORCH_DTYPES[node.element_type("stash_type") or ir.DataType.FLOAT]
    wants_statistics = node.wants(1) | node.wants(2)

    def run(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Result:
        shape = x.shape[axis:]
        if scale.shape == shape and (bias is None or bias.shape == shape) and _same(x, scale):
            result = functional.layer_norm(x, shape, scale, bias, epsilon)
        else:
            result = functional.layer_norm(x.to(stash), shape, eps=epsilon).to(x.dtype) * scale
            result = result if bias is None else result + bias
        if not wants_statistics:
            return result
        over = list(range(axis % x.dim(), x.dim()))
        variance, mean = torch.var_mean(x.to(stash), over, correction=0, keepdim=True)
        return result, mean, torch.rsqrt(variance + epsilon)

    return run


def _same(x: Tensor, scale: Tensor) -> bool:
    return x.dtype == scale.dtype


def rms_norm(node: NodeView) -> Op:
    """Prepare x / sqrt(mean of x**2 + epsilon) * scale."""
    axis, epsilon = node.integer("axis", -1), node.number("epsilon", 1e-5)
    stash = TORCH_DTYPES[node.element_type("stash_type") or ir.DataType.FLOAT]
    wants_statistics = node.wants(1)

    def run(x: Tensor, scale: Tensor) -> Result:
        wide = x.to(stash)
        over = positive(range(axis, 0) if axis < 0 else range(axis, x.dim()), x.dim())
        factor = torch.rsqrt((wide * wide).mean(over, keepdim=True) + epsilon)
        result = (wide * factor).to(scale.dtype) * scale
        return (result, factor) if wants_statistics else result

    return run


def _group_norm(node: NodeView) -> Op:
    """Scale and bias have one value a group before opset 21, one a channel since."""
    epsilon, groups = node.number("epsilon", 1e-5), node.integer("num_groups")
    stash = TORCH_DTYPES[node.element_type("stash_type") or ir.DataType.FLOAT]
    by_group = node.opset < 21

    def run(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if by_group:
            width = x.shape[1] // groups
            scale, bias = scale.repeat_interleave(width), bias.repeat_interleave(width)
        wide = x.to(stash) if x.dtype.itemsize < stash.itemsize else x
        result = torch.group_norm(wide, groups, scale.to(wide.dtype), bias.to(wide.dtype), epsilon)
        return result.to(x.dtype)

    return run


def _instance_norm(node: NodeView) -> Op:
    epsilon = node.number("epsilon", 1e-5)

    def run(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return torch.group_norm(x, x.shape[1], scale, bias, epsilon)

    return run


def _local_response_norm(node: NodeView) -> Op:
    """X / (bias + alpha / size * sum of squares over the channels around)**beta."""
    alpha, beta = node.number("alpha", 0.0001), node.number("beta", 0.75)
    bias, size = node.number("bias", 1.0), node.integer("size")

    def run(x: Tensor) -> Tensor:
        batch, channels = x.shape[:2]
        squares = (x * x).reshape(batch, 1, channels, -1)
        around = functional.pad(squares, (0, 0, (size - 1) // 2, size // 2))
        mean = functional.avg_pool2d(around, (size, 1), 1).reshape(x.shape)
        return x / (bias + alpha * mean) ** beta

    return run


def _mean_variance_norm(node: NodeView) -> Op:
    axes = list(node.integers("axes") or (0, 2, 3))

    def run(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return (x - mean) / (torch.sqrt(variance) + 1e-9)

    return run


def _lp_norm(node: NodeView) -> Op:
    """A vector without length stays zero."""
    axis, p = node.integer("axis", -1), node.integer("p", 2)
    if p not in (1, 2):
        raise node.refuse(f"attribute 'p' is {p}, not 1 or 2")

    def run(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, p, axis, keepdim=True)
        return x / torch.where(length == 0, 1, length)

    return run


NORMALIZATION: Table = {
    "BatchNormalization": batch_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response_norm,
    "LayerNormalization": layer_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance_norm,
    "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": rms_norm,
}
