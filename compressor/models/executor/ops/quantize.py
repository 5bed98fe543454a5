"""Quantization and dequantization by scale and zero point."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.models.executor.dtypes import INTEGER_RANGES, TORCH_DTYPES, natural_type
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op, Result
from compressor.models.executor.rounding import FLOAT_TARGETS, convert, saturated


def spread(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Shape a scale or zero point so that it broadcasts with the tensor it belongs to.

    Args:
        parameter: one value, one value for each index of the axis, or one value a block.
        x: the tensor that is quantized.
        axis: the axis of the channels or of the blocks.
        block: length of a block, 0 where there are none.
    """
    if block:
        length = x.shape[axis]
        return parameter.repeat_interleave(block, dim=axis).narrow(axis, 0, length)
    if parameter.numel() == 1:
        return parameter.reshape(())
    if parameter.dim() != 1:
        return parameter
    shape = [1] * x.dim()
    shape[axis if x.dim() > 1 else 0] = -1
    return parameter.reshape(shape)


def _quantize(node: NodeView) -> Op:
    """y = saturate(round(x / scale) + zero point), rounding half to even."""
    axis, block = node.integer("axis", 1), node.integer("block_size", 0)
    saturate = node.flag("saturate", default=True)
    target = node.element_type("output_dtype") or node.input_type(2)
    precision = node.element_type("precision")
    if target is None and not node.has_input(2):
        target = ir.DataType.UINT8
    if target is not None and target not in INTEGER_RANGES and target not in FLOAT_TARGETS:
        raise node.refuse(f"a tensor cannot be quantized to {target.name}")

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        dtype = target
        if dtype is None:
            assert zero is not None
            dtype = natural_type(zero.dtype)
        exact = TORCH_DTYPES[precision] if precision else scale.dtype
        wide = x.to(exact) / spread(scale, x, axis, block).to(exact)
        offset = None if zero is None else spread(zero.to(torch.float32), x, axis, block)
        if dtype in FLOAT_TARGETS:
            return convert(wide if offset is None else wide + offset, dtype, saturate)
        level = torch.round(wide).to(torch.float32 if exact.itemsize < 4 else exact)
        return saturated(level if offset is None else level + offset, dtype)

    return run


def _dequantize(node: NodeView) -> Op:
    """y = (x - zero point) * scale, the difference taken before it is scaled."""
    axis, block = node.integer("axis", 1), node.integer("block_size", 0)
    target = node.element_type("output_dtype")

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        if block and scale.dim() == x.dim() and x.shape[axis] == scale.shape[axis] * block:
            # Blocks as an axis of their own: scales need not be written out for each element.
            own = axis % x.dim()
            zeros = None if zero is None else zero.unsqueeze(own + 1)
            blocks = x.reshape(*x.shape[:own], -1, block, *x.shape[own + 1 :])
            result = scaled(blocks, scale.unsqueeze(own + 1), zeros, 0)
            return result.flatten(own, own + 1)
        return scaled(x, scale, zero, block)

    def scaled(x: Tensor, scale: Tensor, zero: Tensor | None, length: int) -> Tensor:
        dtype = TORCH_DTYPES[target] if target else scale.dtype
        wide = x.to(dtype)
        if zero is not None and x.is_floating_point():
            wide = wide - spread(zero.to(dtype), x, axis, length)
        elif zero is not None:
            shift = spread(zero.to(torch.int32), x, axis, length)
            wide = (x.to(torch.int32) - shift).to(dtype)
        factor = spread(scale.to(dtype), x, axis, length)
        if wide is x or factor.requires_grad:
            return wide * factor
        return wide.mul_(factor)  # nobody else has it, and memory is slower than arithmetic

    return run


def _dynamic_quantize(node: NodeView) -> Op:
    """Quantize to ``uint8`` over the range of the tensor, zero included."""
    node.wants(1)
    node.wants(2)

    def run(x: Tensor) -> Result:
        least, greatest = torch.clamp(x.min(), max=0), torch.clamp(x.max(), min=0)
        scale = (greatest - least) / 255
        scale = torch.where(scale == 0, 1, scale).to(x.dtype)
        zero = torch.clamp(torch.round(-least / scale), 0, 255)
        level = saturated(torch.round(x / scale) + zero, ir.DataType.UINT8)
        return level, scale, zero.to(torch.uint8)

    return run


QUANTIZE: Table = {
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "QuantizeLinear": _quantize,
}
