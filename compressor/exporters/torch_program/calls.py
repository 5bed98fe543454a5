"""Calls of PyTorch operators that a module repeats, for PyTorch to export it.

Quantized values are written in the words that PyTorch's own tools know, with int8 codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed
from torch.utils._python_dispatch import _disable_current_modes

from compressor.exporters.device_exporter import kernel_multiplies
from compressor.models.executor.program import Op

_LEAST, _GREATEST = -128, 127
_CUBIC = 0.044715
_WORDS = torch.ops.quantized_decomposed
assert _decomposed.quantized_decomposed_lib  # the import registers them


class Known(Tensor):
    """A tensor whose values are read while a module is exported, which only sees them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function outside of whatever records."""
        with _disable_current_modes():
            return super().__torch_function__(  # type: ignore[no-untyped-call]
                func, types, args, kwargs or {}
            )


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        run: what is called.
        arguments: numbers of values, names of buffers, tensors that are known, or nothing.
        results: numbers of what it returns; 0 is dropped.
    """

    run: Op
    arguments: tuple[int | str | Tensor | None, ...]
    results: tuple[int, ...]


class Recorded(nn.Module):
    """A module that repeats calls."""

    def __init__(self, buffers: Mapping[str, Tensor], inputs: Sequence[int]):
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.calls: list[Call] = []
        self.inputs, self.outputs = tuple(inputs), ()  # type: tuple[int, ...], tuple[int, ...]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the graph's outputs, in order."""
        values: dict[int, Any] = dict(zip(self.inputs, inputs, strict=True))
        for call in self.calls:
            given = (
                values[x] if isinstance(x, int) else getattr(self, x) if isinstance(x, str) else x
                for x in call.arguments
            )
            made = call.run(*given)
            values.update(
                zip(call.results, made if isinstance(made, tuple) else (made,), strict=False)
            )
        return tuple(values[x] for x in self.outputs)


@dataclass(frozen=True)
class Codes:
    """How an activation is quantized."""

    scale: float
    zero: int

    def implies(self, low: float | None, high: float | None) -> bool:
        """Whether no code is beyond limits by more than half a step."""
        least = self.scale * (_LEAST - self.zero - 0.5)
        greatest = self.scale * (_GREATEST - self.zero + 0.5)
        return (low is None or low <= least + self.scale) and (
            high is None or high >= greatest - self.scale
        )


@dataclass(frozen=True)
class Stored:
    """Codes of a weight: int8, with a scale for all or one for each position along an axis."""

    codes: Tensor
    scale: Tensor
    axis: int

    @property
    def floats(self) -> Tensor:
        """Its values."""
        shape = [1] * self.codes.dim()
        if self.scale.numel() > 1:
            shape[self.axis] = -1
        return self.codes.to(torch.float32) * self.scale.reshape(shape)

    def multiplies(self, read: Codes, written: Codes) -> bool:
        """Whether a kernel computes codes of a result from codes of an input with it."""
        return kernel_multiplies(read.scale, float(self.scale.max()), written.scale)

    def transposed(self) -> Stored:
        """Return the transposed matrix."""
        return Stored(self.codes.t().contiguous(), self.scale, 1 - self.axis % 2)


def to_codes(how: Codes) -> Op:
    """Return what quantizes an activation."""
    return partial(quantized, how)


def quantized(how: Codes, x: Tensor) -> Tensor:
    """Quantize with one scale."""
    made: Tensor = _WORDS.quantize_per_tensor(x, how.scale, how.zero, _LEAST, _GREATEST, torch.int8)
    return made


def from_codes(scale: float, zero: int, codes: Tensor) -> Tensor:
    """Dequantize with one scale."""
    made: Tensor = _WORDS.dequantize_per_tensor(codes, scale, zero, _LEAST, _GREATEST, torch.int8)
    return made


def from_channel_codes(axis: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Dequantize with a scale for each position along an axis."""
    made: Tensor = _WORDS.dequantize_per_channel(
        codes, scales, zeros, axis, _LEAST, _GREATEST, torch.int8
    )
    return made


def bounded(low: float | None, high: float | None, x: Tensor) -> Tensor:
    """Limit elements by numbers."""
    return x if low is None and high is None else torch.clamp(x, low, high)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Return the approximation of GELU as a formula; XNNPACK's GELU is always the exact one."""
    inner = math.sqrt(2 / math.pi) * (x + _CUBIC * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def prelu_of_halves(x: Tensor, slope: Tensor) -> Tensor:
    """Return PReLU as a formula; XNNPACK's has the wrong order of axes between codes."""
    return torch.relu(x) - torch.relu(-x) * slope
