"""The operators and codes of a graph's steps."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.exporters.torch_program.calls import Codes, Stored
from compressor.models.executor.ops import OPERATORS
from compressor.models.executor.program import Op, Step

_OFFSET = 128  # between codes of uint8 and of int8
GEMM, MATMUL, GELU, CLIP, RELU, PRELU, SHAPE, SIZE, QUANTIZE, DEQUANTIZE = (
    OPERATORS["", name].function
    for name in (
        "Gemm",
        "MatMul",
        "Gelu",
        "Clip",
        "Relu",
        "PRelu",
        "Shape",
        "Size",
        "QuantizeLinear",
        "DequantizeLinear",
    )
)
ALIKE = frozenset(
    OPERATORS["", name].function
    for name in ("Concat", "Relu", "MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
                 "Transpose", "Slice", "Split", "Pad", "Resize", "Identity")
)  # fmt: skip
"""What XNNPACK computes on codes only if those of the result mean the same."""


def function_of(step: Step) -> Op:
    """Return what runs a step, without its attributes."""
    function: Op = getattr(step.run, "func", step.run)
    return function


def by_tanh(step: Step) -> bool:
    """Whether a Gelu is the approximation."""
    return isinstance(step.run, partial) and step.run.keywords["approximate"] == "tanh"


def codes_of(step: Step, scale: Tensor, zero: Tensor | None) -> Codes:
    """Return how a QuantizeLinear or DequantizeLinear of activations does it, for int8."""
    assert isinstance(step.run, partial)
    if scale.numel() > 1:
        raise refusal(step, "has more than one scale, and XNNPACK wants one for an activation")
    unsigned = step.run.keywords.get("target") == ir.DataType.UINT8 or (
        zero is not None and zero.dtype == torch.uint8
    )
    offset = (0 if zero is None else int(zero.reshape(-1)[0])) - _OFFSET * unsigned
    return Codes(float(scale.reshape(-1)[0]) or 1.0, offset)


def stored_of(step: Step, array: Tensor, scale: Tensor, zero: Tensor | None) -> Stored | None:
    """Return the codes of a weight as int8, of a DequantizeLinear.

    Args:
        zero: its zero points, if they are to be looked at.

    Returns:
        ``None`` where a zero point is not in the middle, which XNNPACK's weights do not have.
    """
    assert isinstance(step.run, partial)
    middle = _OFFSET if array.dtype == torch.uint8 else 0
    if zero is not None and bool((zero.to(torch.int32) != middle).any()):
        return None
    if middle:
        array = (array.to(torch.int16) - middle).to(torch.int8)
    axis = step.run.keywords["axis"] % max(1, array.dim())
    return Stored(array, scale.to(torch.float32).reshape(-1), axis)


def refusal(step: Step, problem: str, remedy: str = "") -> SpecError:
    """Return the error that names a node."""
    return SpecError(
        step.label, f"{problem}; this format does not take that", remedy or "export onnx instead"
    )
