"""Quantization, dequantization, and products of codes.

Torch multiplies integer matrices slowly or, on a GPU, not at all. Products of eight-bit values are
exact in ``float64`` sums of any length that occurs, so that is where they are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional

from compressor.models.element_types import (
    FLOAT_TARGETS,
    INTEGER_RANGES,
    convert,
    natural_type,
    saturated,
)
from compressor.models.executor.node import Node, Operator, Read, Table, along
from compressor.models.executor.ops.windows import WINDOW, Window, convolution
from compressor.models.executor.program import Op, Result, Step

_EXACT = 4  # bytes of floats that hold each difference of eight-bit values
_NARROW = 1 << 16  # differences of codes below are exact in float32


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
    return along(parameter, axis if x.dim() > 1 else 0, x.dim())


def _target(node: Node, _: str) -> ir.DataType | None:
    """Return the type of the codes; ``None`` where that of the zero point decides at run time."""
    target: ir.DataType | None = node.read("output_dtype", "ir.DataType", node.input_type(2))
    if target is None and node.input(2) is None:
        return ir.DataType.UINT8
    if target is not None and target not in INTEGER_RANGES and target not in FLOAT_TARGETS:
        raise node.refuse(f"a tensor cannot be quantized to {target.name}")
    return target


_TARGET: Any = Read(_target)


def _quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    saturate: bool = True,
    target: ir.DataType | None = _TARGET,
    precision: torch.dtype | None = None,
) -> Tensor:
    """y = saturate(round(x / scale) + zero point), rounding half to even."""
    dtype = target
    if dtype is None:
        assert zero is not None
        dtype = natural_type(zero.dtype)
    exact = precision or scale.dtype
    wide = x.to(exact) / spread(scale, x, axis, block_size).to(exact)
    offset = None if zero is None else spread(zero.to(torch.float32), x, axis, block_size)
    if dtype in FLOAT_TARGETS:
        return convert(wide if offset is None else wide + offset, dtype, saturate)
    # In place: new memory takes longer than arithmetic.
    level = wide.round_().to(torch.float32 if exact.itemsize < 4 else exact)
    return saturated(level if offset is None else level.add_(offset), dtype)


def _dequantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = (x - zero point) * scale, the difference taken before it is scaled."""
    dtype = output_dtype or scale.dtype
    blocks = block_size and scale.dim() == x.dim()
    if not blocks or x.shape[axis] != scale.shape[axis] * block_size:
        return _scaled(x, scale, zero, dtype, (axis, block_size))
    # Blocks as an axis of their own: scales need not be written out for each element.
    over = axis % x.dim()
    zero = None if zero is None else zero.unsqueeze(over + 1)
    codes = x.reshape(*x.shape[:over], -1, block_size, *x.shape[over + 1 :])
    return _scaled(codes, scale.unsqueeze(over + 1), zero, dtype, (axis, 0)).flatten(over, over + 1)


def _scaled(
    x: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, places: tuple[int, int]
) -> Tensor:
    """Return ``(x - zero) * scale``; ``places`` are the axis and the length of a block."""
    wide = x.to(dtype)
    if zero is not None and x.is_floating_point():
        wide = wide - spread(zero.to(dtype), x, *places)
    elif zero is not None and x.itemsize == 1 and dtype.itemsize >= _EXACT:
        wide.sub_(spread(zero.to(dtype), x, *places))
    elif zero is not None:
        wide = (x.to(torch.int32) - spread(zero.to(torch.int32), x, *places)).to(dtype)
    factor = spread(scale.to(dtype), x, *places)
    if wide is x or factor.requires_grad:
        return wide * factor
    return wide.mul_(factor)  # nobody else has it, and memory is slower than arithmetic


def rounded_at_once(steps: Sequence[Step], outputs: Sequence[int]) -> list[Step]:
    """Return steps in which a value is quantized and dequantized at once, without its codes.

    Where nothing else reads the codes, a float that stays a float takes half of the time.

    Args:
        steps: of a program, in an order in which they can run.
        outputs: slots of the graph's outputs.
    """
    reads = Counter(slot for step in steps for slot in step.inputs)
    reads.update(outputs)
    makers = {step.outputs[0]: step for step in steps if _calls(step.run, _quantize)}
    joined, left_out = list[Step](), set[int]()
    for step in steps:
        maker = makers.get(step.inputs[0]) if _calls(step.run, _dequantize) else None
        if maker is not None and reads[step.inputs[0]] == 1 and _undoes(step, maker):
            left_out.add(step.inputs[0])
            run = partial(_rounded, quantize=maker.run, dequantize=step.run)
            step = replace(step, run=run, inputs=maker.inputs)
        joined.append(step)
    return [step for step in joined if step.outputs[0] not in left_out]


def _calls(run: Op, function: Op) -> bool:
    return isinstance(run, partial) and run.func is function


def _undoes(step: Step, maker: Step) -> bool:
    """Whether a step dequantizes by the scale and zero point that its input was quantized by."""
    assert isinstance(step.run, partial)
    assert isinstance(maker.run, partial)
    there, back = maker.run.keywords, step.run.keywords
    alike = all(there[key] == back[key] for key in ("axis", "block_size"))
    plain = there["precision"] is None and back["output_dtype"] is None
    same = maker.inputs[1:] == step.inputs[1:]
    return alike and plain and same and there["target"] not in FLOAT_TARGETS


def _rounded(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, quantize: Op, dequantize: Op
) -> Result:
    """y = (saturate(round(x / scale) + zero point) - zero point) * scale.

    The difference of the limits and the zero point is exact, so the result is the same.
    """
    assert isinstance(quantize, partial)
    learns = torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad)
    dtype = quantize.keywords["target"]
    if dtype is None and zero is not None:
        dtype = natural_type(zero.dtype)
    least, greatest = INTEGER_RANGES.get(dtype, (0, _NARROW))
    if learns or greatest >= _NARROW or {x.dtype, scale.dtype} != {torch.float32}:
        return dequantize(quantize(x, scale, zero), scale, zero)
    places = quantize.keywords["axis"], quantize.keywords["block_size"]
    factor = spread(scale, x, *places)
    level = (x / factor).round_()
    if zero is None or (zero.numel() == 1 and zero.is_cpu):
        at_zero = 0 if zero is None else int(zero.item())
        return level.clamp_(least - at_zero, greatest - at_zero).mul_(factor)
    offset = spread(zero.to(torch.float32), x, *places)
    return level.clamp_(least - offset, greatest - offset).mul_(factor)


def _dynamic_quantize(x: Tensor) -> Result:
    """Quantize to ``uint8`` over the range of the tensor, zero included."""
    least, greatest = torch.clamp(x.min(), max=0), torch.clamp(x.max(), min=0)
    scale = (greatest - least) / 255
    scale = torch.where(scale == 0, 1, scale).to(x.dtype)
    zero = torch.clamp(torch.round(-least / scale), 0, 255)
    level = saturated(torch.round(x / scale) + zero, ir.DataType.UINT8)
    return level, scale, zero.to(torch.uint8)


def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.to(torch.float64)
    if zero is None:
        return wide
    if x.dim() > 1 and zero.dim() == 1 and zero.numel() > 1:
        zero = spread(zero, x, axis, 0)
    return wide - (zero.reshape(()) if zero.numel() == 1 else zero).to(torch.float64)


def _matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    product = torch.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
    return product.to(torch.int64).to(torch.int32)


def _conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero: Tensor | None = None,
    w_zero: Tensor | None = None,
    *,
    window: Window = WINDOW,
    group: int = 1,
) -> Tensor:
    wide, weight = _centred(x, x_zero, 1), _centred(w, w_zero, 0)
    return convolution(wide, weight, window=window, group=group).to(torch.int64).to(torch.int32)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    """Split bytes into their values, the low bits first; the last axis grows accordingly."""
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    values = torch.bitwise_right_shift(codes.unsqueeze(-1), shifts) & ((1 << bits) - 1)
    return values.flatten(-2)


def _check_n_bits(node: Node) -> None:
    bits = node.read("bits", "int", 4)
    if bits not in (2, 4, 8):
        raise node.refuse(f"attribute 'bits' is {bits}, not 2, 4 or 8")
    if node.read("weight_prepacked", "int", 0):
        raise node.refuse("attribute 'weight_prepacked' asks for a layout of one device")
    if node.input(4) is not None:
        raise node.refuse("input 'g_idx' is not supported")


def _matmul_n_bits(
    a: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    _: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,  # noqa: N803  # ONNX Runtime's name
    N: int,  # noqa: N803
    block_size: int,
    bits: int = 4,
) -> Tensor:
    """A times the transpose of (codes - zero point) * scale, by blocks of the ``K`` columns."""
    blocks = -(-K // block_size)
    zero: Tensor | int = 1 << (bits - 1)
    if zeros is not None:
        by_row = zeros.reshape(N, -1)
        packed = by_row.dtype == torch.uint8
        zero = (_unpacked(by_row, bits) if packed else by_row)[:, :blocks, None].to(a.dtype)
    levels = _unpacked(codes.reshape(N, blocks, -1), bits).to(a.dtype)
    weight = (levels - zero) * scales.reshape(N, blocks, 1)
    return functional.linear(a, weight.reshape(N, -1)[:, :K], bias)


QUANTIZATION: Table = {
    "ConvInteger": Operator(_conv_integer, ignored=("kernel_shape",)),
    "DequantizeLinear": Operator(_dequantize),
    "DynamicQuantizeLinear": Operator(_dynamic_quantize, outputs=3),
    "MatMulInteger": Operator(_matmul_integer),
    "QuantizeLinear": Operator(_quantize),
}

CONTRIB: Table = {
    "DequantizeLinear": Operator(_dequantize),
    "MatMulNBits": Operator(_matmul_n_bits, ignored=("accuracy_level",), check=_check_n_bits),
    "QuantizeLinear": Operator(_quantize),
}
"""Those of the domain ``com.microsoft``."""
