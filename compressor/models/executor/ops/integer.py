"""Products of quantized tensors, accumulated exactly.

Torch multiplies integer matrices slowly or, on a GPU, not at all. Products of eight-bit values are
exact in ``float64`` sums of any length that occurs, so that is where they are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.models.executor.dtypes import INTEGER_RANGES, natural_type
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.convolution import convolution
from compressor.models.executor.ops.quantize import spread
from compressor.models.executor.program import Op
from compressor.models.executor.rounding import saturated


def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    if x.dim() > 1 and zero.dim() == 1 and zero.numel() > 1:
        zero = spread(zero, x, axis, 0)
    return wide - (zero.reshape(()) if zero.numel() == 1 else zero).to(torch.float64)


def _matmul_integer(_: NodeView) -> Op:
    def run(
        a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
    ) -> Tensor:
        product = torch.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
        return product.to(torch.int64).to(torch.int32)

    return run


def _conv_integer(node: NodeView) -> Op:
    convolve = convolution(node)

    def run(
        x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
    ) -> Tensor:
        product = convolve(_centred(x, x_zero, 1), _centred(w, w_zero, 0), None)
        return product.to(torch.int64).to(torch.int32)

    return run


def _requantized(accumulated: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Scale in ``float32``, as the scales are, and round half to even."""
    dtype = natural_type(zero.dtype)
    assert dtype in INTEGER_RANGES
    level = torch.round(accumulated.to(torch.float32) * scale.to(torch.float32))
    return saturated(level + zero.to(torch.float32), dtype)


def _qlinear_matmul(_: NodeView) -> Op:
    def run(*inputs: Tensor) -> Tensor:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
        product = torch.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
        factor = _scale(a_scale, a, -2).to(torch.float32) * _scale(b_scale, b, -1)
        return _requantized(product, factor / y_scale, y_zero)

    return run


def _scale(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    return spread(scale, x, axis, 0)


def _qlinear_conv(node: NodeView) -> Op:
    convolve = convolution(node)

    def run(*inputs: Tensor) -> Tensor:
        x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *rest = inputs
        bias = rest[0].to(torch.float64) if rest else None
        product = convolve(_centred(x, x_zero, 1), _centred(w, w_zero, 0), bias)
        factor = x_scale.reshape(()) * w_scale / y_scale.reshape(())
        return _requantized(product, spread(factor, product, 1, 0), y_zero)

    return run


INTEGER: Table = {
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
