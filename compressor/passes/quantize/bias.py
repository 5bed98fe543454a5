"""Integer biases: int32 codes at the scale of the integer kernel's accumulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from compressor.types.quantized import QuantizedTensor
from compressor.types.tensors import Array

_MOST = 2.0**30  # codes of a bias stay below, so that the accumulator does not overflow


def least_weight_scale(bias: ir.Value, input_scale: float) -> Callable[[], torch.Tensor]:
    """Return a function giving each row's least weight scale at which the bias fits int32.

    Args:
        bias: a float initializer ``[rows]``.
        input_scale: scale of the layer's input.

    Returns:
        A function that returns ``[rows, 1]``.
    """
    tensor = bias.const_value
    assert tensor is not None

    def least() -> torch.Tensor:
        size = np.abs(tensor.numpy().astype(np.float64)) / (input_scale * _MOST)
        return torch.from_numpy(size.astype(np.float32))[:, None]

    return least


def attach_bias_codes(
    graph: ir.Graph, bias: ir.Value, input_scale: float, weight: Callable[[], QuantizedTensor]
) -> ir.Value:
    """Replace a float bias by int32 codes and return the dequantized value.

    The bias' scale is the product of the input's and the weight's, as the integer product has it
    (Jacob et al. 2017, section 2.4).

    Args:
        graph: the graph; the bias must have no other reader.
        bias: a float initializer ``[rows]``.
        input_scale: scale of the layer's input.
        weight: the quantized weight.
    """
    name = bias.name or ""
    values = bias.const_value
    assert values is not None
    rows = int(values.shape.numpy()[0])

    def scale() -> Array:
        spread = np.broadcast_to(weight().scale[:, 0].numpy().astype(np.float64), (rows,))
        return np.asarray((spread * input_scale).astype(np.float32))

    def codes() -> Array:
        levels = np.rint(values.numpy().astype(np.float64) / scale().astype(np.float64))
        return np.asarray(np.clip(levels, -_MOST, _MOST).astype(np.int32))

    del graph.initializers[name]
    coded = _lazy(graph, name, codes, ir.DataType.INT32, rows)
    scales = _lazy(graph, f"{name}_scale", scale, ir.DataType.FLOAT, rows)
    output = ir.Value(
        name=f"{name}_dequantized", shape=ir.Shape((rows,)), type=ir.TensorType(ir.DataType.FLOAT)
    )
    node = ir.Node(
        "",
        "DequantizeLinear",
        [coded, scales],
        attributes=[ir.AttrInt64("axis", 0)],
        outputs=[output],
        name=f"{name}_dequantize",
    )
    graph.insert_before(graph[0], node)
    return output


def _lazy(
    graph: ir.Graph, name: str, make: Callable[[], Array], dtype: ir.DataType, rows: int
) -> ir.Value:
    shape = ir.Shape((rows,))
    tensor = ir.LazyTensor(
        lambda: ir.tensor(make(), name=name, dtype=dtype),
        dtype=dtype,
        shape=shape,
        name=name,
        cache=True,
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
