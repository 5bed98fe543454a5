"""Measure single tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from compressor.types.tensors import Array

_CHUNK = 1 << 22  # elements looked at together, so that memory does not grow with the tensor

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def count_zeros(tensor: ir.TensorProtocol, zero_point: Array | None = None) -> int | None:
    """Count the elements that stand for zero; ``None`` for text.

    Args:
        tensor: the elements.
        zero_point: the code of zero, in a shape that broadcasts to the tensor's; 0 without one.
    """
    if tensor.dtype == ir.DataType.STRING:
        return None
    array = np.asarray(tensor.numpy())
    if zero_point is None or not np.any(zero_point):
        flat = array.reshape(-1)
        chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
        return flat.size - sum(int(np.count_nonzero(chunk)) for chunk in chunks)
    return int(np.count_nonzero(array.astype(zero_point.dtype, copy=False) == zero_point))


def count_not_finite(tensor: ir.TensorProtocol) -> int:
    """Count the elements that are NaN or infinite."""
    if not tensor.dtype.is_floating_point():
        return 0
    flat = np.asarray(tensor.numpy()).reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    return sum(int(np.count_nonzero(~np.isfinite(chunk))) for chunk in chunks)


@dataclass(frozen=True)
class Counts:
    """Elements of some kinds; those of parts of a tensor can be added."""

    zeros: int = 0
    not_finite: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of two parts together."""
        return Counts(self.zeros + other.zeros, self.not_finite + other.not_finite)


def count_elements(values: torch.Tensor, *, pairs: bool = False) -> Counts:
    """Count zeros, and values that are NaN or infinite.

    Args:
        values: elements of any type.
        pairs: they are bytes that each hold two floats of four bits.
    """
    if pairs:
        low, high = (int(((values & half) == 0).sum()) for half in (0x07, 0x70))
        return Counts(low + high)
    if values.dtype in _SIGNED:
        values = values.view(_SIGNED[values.dtype])
    if values.dtype == torch.float4_e2m1fn_x2:
        return count_elements(values.view(torch.uint8), pairs=True)
    if values.is_floating_point() and values.itemsize == 1:
        values = values.to(torch.float32)  # nothing is counted in 8-bit floats
    zeros = values.numel() - int(torch.count_nonzero(values))
    # A sum is not finite if a summand is not. One of large numbers may overflow as well.
    suspect = values.is_floating_point() and not bool(values.sum(dtype=torch.float32).isfinite())
    return Counts(zeros, int((~values.isfinite()).sum()) if suspect else 0)


def percent(part: int, whole: int) -> float | None:
    """Return a share in percent; ``None`` of nothing."""
    return 100.0 * part / whole if whole else None


def not_finite_note(name: str, count: int) -> str:
    """Say that a tensor is damaged."""
    return f"{name!r} holds {count:,} values that are NaN or infinite"
