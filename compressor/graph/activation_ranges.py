"""The range in which a graph represents an activation that it quantizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from compressor.graph.values import constant_array, is_op, maker_behind


@dataclass(frozen=True)
class CodeRange:
    """What integer codes can mean: from ``low`` to ``high`` in steps of ``step``."""

    low: float
    high: float
    step: float


def activation_range(value: ir.Value | None) -> CodeRange | Literal["dynamic"] | None:
    """Return the range that a value's codes represent.

    Args:
        value: what a layer reads: the floats behind ``DequantizeLinear``, or codes.

    Returns:
        The range; ``dynamic`` where each input gets its own; ``None`` where the value stays
        float, or its scale is not one constant for the whole tensor.
    """
    node = maker_behind(value, "DequantizeLinear", "DynamicQuantizeLinear")
    if node is None:
        return None
    if node.op_type == "DynamicQuantizeLinear":
        return "dynamic"
    scale, zero = (constant_array(v) for v in (*node.inputs[1:], None)[:2])
    codes = node.inputs[0]
    if scale is None or scale.size != 1 or codes is None or codes.dtype is None:
        return None
    step, center = float(scale.reshape(())), 0.0 if zero is None else float(zero.reshape(()))
    limits = _code_limits(codes.dtype)
    if limits is None:
        return None
    low, high = ((limit - center) * step for limit in limits)
    return CodeRange(*_clipped(codes, low, high), step)


def _code_limits(dtype: ir.DataType) -> tuple[float, float] | None:
    """Return the least and greatest code of an integer type."""
    if not dtype.is_integer():
        return None
    if dtype.is_signed():
        return float(-(1 << (dtype.bitwidth - 1))), float((1 << (dtype.bitwidth - 1)) - 1)
    return 0.0, float((1 << dtype.bitwidth) - 1)


def _clipped(codes: ir.Value, low: float, high: float) -> tuple[float, float]:
    """Narrow bounds to those of a ``Clip`` in front: codes may be kept in a wider type."""
    quantize = maker_behind(codes, "QuantizeLinear")
    if quantize is None or quantize.inputs[0] is None:
        return low, high
    clip = quantize.inputs[0].producer()
    if clip is None or not is_op(clip, "Clip"):
        return low, high
    least, most = (constant_array(v) for v in (*clip.inputs[1:], None, None)[:2])
    low = low if least is None else max(low, float(np.asarray(least).reshape(())))
    high = high if most is None else min(high, float(np.asarray(most).reshape(())))
    return low, high
