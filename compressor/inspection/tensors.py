"""Measure single tensors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.types.tensors import Array

_CHUNK = 1 << 22  # elements looked at together, so that memory does not grow with the tensor


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
    return int(np.count_nonzero(array == zero_point))


def count_not_finite(tensor: ir.TensorProtocol) -> int:
    """Count the elements that are NaN or infinite."""
    if not tensor.dtype.is_floating_point():
        return 0
    flat = np.asarray(tensor.numpy()).reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    return sum(int(np.count_nonzero(~np.isfinite(chunk))) for chunk in chunks)


def percent(part: int, whole: int) -> float | None:
    """Return a share in percent; ``None`` of nothing."""
    return 100.0 * part / whole if whole else None


def not_finite_note(name: str, count: int) -> str:
    """Say that a tensor is damaged."""
    return f"{name!r} holds {count:,} values that are NaN or infinite"
