"""Changes of the element type."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.models.executor.dtypes import TORCH_DTYPES, natural_type
from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.program import Op
from compressor.models.executor.rounding import convert

_MODES = ("up", "down", "nearest")


def _cast(node: NodeView) -> Op:
    dtype = node.element_type("to")
    if dtype is None:
        raise node.refuse("attribute 'to' is missing")
    if node.input_type(0) == ir.DataType.STRING:
        raise node.refuse("its input holds strings")
    saturate = node.flag("saturate", default=True)
    mode = node.choice("round_mode", _MODES, "up")

    def run(x: Tensor) -> Tensor:
        return convert(x, dtype, saturate, mode)

    return run


def _cast_like(node: NodeView) -> Op:
    known = node.input_type(1)
    if known is not None and known not in TORCH_DTYPES:
        raise node.refuse(f"it asks for elements of type {known.name}")
    saturate = node.flag("saturate", default=True)
    mode = node.choice("round_mode", _MODES, "up")

    def run(x: Tensor, like: Tensor) -> Tensor:
        return convert(x, known or natural_type(like.dtype), saturate, mode)

    return run


def _bit_cast(node: NodeView) -> Op:
    dtype = node.element_type("to")
    source = node.input_type(0)
    if dtype is None:
        raise node.refuse("attribute 'to' is missing")
    if dtype.bitwidth < 8 or (source is not None and source.bitwidth < 8):
        raise node.refuse("bits of elements of less than a byte cannot be reinterpreted")
    held = TORCH_DTYPES[dtype]

    def run(x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            x = x.to(torch.uint8)
        if held == torch.bool:
            return x.view(torch.uint8).to(torch.bool)
        return x.view(held)

    return run


CAST: Table = {"BitCast": _bit_cast, "Cast": _cast, "CastLike": _cast_like}
