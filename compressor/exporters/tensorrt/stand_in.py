"""A model of the same graph without its weights: to ask TensorRT about it before they are known."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import DataType

from compressor.graph.as_json import Skeleton
from compressor.graph.blocks import all_initializers

_ARGUMENT = 64  # elements: longer constants are weights, not sizes, axes or pads
_LARGEST = {DataType.INT8: 127, DataType.INT4: 7}


def stand_in(parts: Skeleton) -> bytes:
    """Return a serialized model with made-up weights; none of the model's is evaluated.

    Args:
        parts: the model; not changed. Small constants that are known keep their values, because
            shapes depend on them.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(parts.proto)
    for index, tensor in enumerate(all_initializers(proto.graph)):
        value = parts.tensors[tensor.name]
        if value.dtype == DataType.STRING:
            tensor.string_data.extend(ir.serde.serialize_tensor(value).string_data)
            continue
        shape = tuple(int(d) for d in value.shape.numpy())
        known = prod(shape) <= _ARGUMENT and not isinstance(value, ir.LazyTensor)
        made = value if known else _made_up(value.dtype, shape, index)
        tensor.raw_data = made.tobytes()
    return bytes(proto.SerializeToString(deterministic=True))


def weight_bytes(parts: Skeleton) -> int:
    """Return the bytes of all initializers."""
    return sum(tensor.nbytes for tensor in parts.tensors.values())


def _made_up(dtype: DataType, shape: tuple[int, ...], seed: int) -> ir.TensorProtocol:
    """Return numbers that all differ: TensorRT stores a tensor of equal ones as one.

    Floats are positive, as scales and variances must be, and indices are 0, which always exists.
    """
    random = np.random.default_rng(seed)
    if dtype in _LARGEST:
        values = random.integers(-_LARGEST[dtype], _LARGEST[dtype] + 1, shape).astype(np.int8)
        return ir.Tensor(values.astype(dtype.numpy()), dtype=dtype)
    if dtype.is_floating_point():
        values = random.uniform(0.25, 1.0, shape).astype(np.float32)
        return ir.Tensor(values.astype(dtype.numpy()), dtype=dtype)
    return ir.Tensor(np.zeros(shape, np.int8).astype(dtype.numpy()), dtype=dtype)
