"""ONNX tensors as torch tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch.utils.dlpack import from_dlpack

from compressor.errors import ModelError
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.types.tensors import Array

_NARROW = {
    ir.DataType.INT2: np.int8,
    ir.DataType.INT4: np.int8,
    ir.DataType.UINT2: np.uint8,
    ir.DataType.UINT4: np.uint8,
    ir.DataType.FLOAT4E2M1: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT6E2M3: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT6E3M2: ml_dtypes.float8_e4m3fn,
}

_VIEWED = {
    torch.bfloat16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
}


def from_numpy(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return an ONNX tensor as a torch tensor on the CPU.

    The memory is shared wherever the element type allows it, so a tensor in an external data file
    stays on disk until it is read; do not write to the result. Elements of less than eight bits
    are unpacked (see `compressor.models.executor.dtypes`).

    Raises:
        ModelError: the tensor holds strings.
    """
    held = TORCH_DTYPES.get(tensor.dtype)
    if held is None:
        raise ModelError(
            f"tensor '{tensor.name}'",
            f"its element type {tensor.dtype.name} has no counterpart in torch",
            "remove the strings from the model, or run it in ONNX Runtime",
        )
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor) and raw.dtype == held:
        return raw.detach()
    array = tensor.numpy()
    narrow = _NARROW.get(tensor.dtype)
    if narrow is not None:
        array = array.astype(narrow)
    viewed = _VIEWED.get(held)
    if viewed is None:
        return _shared(array)
    return _shared(array.view(viewed)).view(held)


def _shared(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.flags.writeable:
        return torch.from_numpy(array)
    return from_dlpack(array)  # from_numpy warns of every array that is read-only
