"""Complex values, which are pairs of real numbers in a last axis of a graph.

Llama 4 and DeepSeek-V2 turn positions by complex numbers; networks with Fourier transforms (Li et
al. 2021, arXiv:2010.08895) cut spectra, weight them, and write them into zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Any
"""A tensor or a length of the graph that is being written."""
ZEROS = frozenset({torch.zeros, torch.zeros_like, torch.Tensor.new_zeros})
"""Functions that the exporter knows for real numbers alone."""


@cache
def add_complex() -> None:
    """Add what the exporter lacks for complex values.

    It takes no functions for these with a module, only in the table of all operators.
    """
    from onnxscript.function_libs.torch_lib.registration import torch_op

    added: Mapping[str, Callable[..., Value]] = {
        "unsqueeze": _unsqueeze,
        "select.int": _select,
        "slice_scatter": _slice_scatter,
        "constant_pad_nd": _padded,
        "pad": _pad,
        "copy": _copy,
    }
    for name, function in added.items():
        torch_op(f"aten::{name}", complex=True, trace_only=True)(function)


def einsum(equation: str, left: Tensor, right: Tensor) -> Tensor:
    """Return what :func:`torch.einsum` does of two complex tensors."""
    real = torch.einsum(equation, left.real, right.real)
    imaginary = torch.einsum(equation, left.real, right.imag)
    return torch.complex(
        real - torch.einsum(equation, left.imag, right.imag),
        imaginary + torch.einsum(equation, left.imag, right.real),
    )


def zeros(made: Tensor) -> Tensor:
    """Return complex zeros of two real parts."""
    part = torch.zeros(made.shape, dtype=made.real.dtype, device=made.device)
    return torch.complex(part, part)


def _opset() -> Any:
    import onnxscript

    return onnxscript.opset18


def _place(axis: int) -> int:
    return axis if axis >= 0 else axis - 1


def _unsqueeze(self: Value, dim: int) -> Value:
    return _opset().Unsqueeze(self, [_place(dim)])


def _select(self: Value, dim: int, index: int) -> Value:
    op = _opset()
    return op.Gather(self, op.Constant(value_int=index), axis=_place(dim))


def _slice_scatter(
    self: Value,
    src: Value,
    dim: int = 0,
    start: Value | None = None,
    end: Value | None = None,
    step: int = 1,
) -> Value:
    from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter

    return aten_slice_scatter(self, src, _place(dim), start, end, step)


def _padded(self: Value, pad: Sequence[Value], value: float = 0.0) -> Value:
    from onnxscript.function_libs.torch_lib.ops.core import aten_constant_pad_nd

    return aten_constant_pad_nd(self, [0, 0, *pad], value)


def _pad(
    self: Value, pad: Sequence[Value], mode: str = "constant", value: float | None = None
) -> Value:
    if mode != "constant":
        raise NotImplementedError(f"padding of complex values in mode {mode!r}")
    return _padded(self, pad, value or 0.0)


def _copy(self: Value, src: Value, non_blocking: bool = False) -> Value:
    del non_blocking
    op = _opset()
    return op.Expand(src, op.Shape(self))
