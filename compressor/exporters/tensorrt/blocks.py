"""Which weights quantized in blocks TensorRT takes."""

from __future__ import annotations

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.exporters.onnx.owners import Owners
from compressor.graph.values import all_nodes, constant_of, is_op

_LAST = 2  # dimensions along which blocks may lie, counted from the last


def check_blocks(model: ir.Model) -> None:
    """Raise where blocks of a weight lie along a dimension that TensorRT does not take.

    Those of a convolution's weight, ``[outputs, inputs, height, width]``, lie along the inputs.

    Raises:
        SpecError: naming the layer.
    """
    for node in all_nodes(model.graph):
        if not is_op(node, "DequantizeLinear") or not node.attributes.get_int("block_size", 0):
            continue
        tensor = constant_of(node.inputs[0])
        if tensor is None:
            continue
        rank = len(tensor.shape)
        axis = node.attributes.get_int("axis", 1) % rank
        if rank - axis > _LAST:
            raise SpecError(
                Owners(model).subject(node),
                f"is quantized in groups along dimension {axis} of {rank}, TensorRT takes the last "
                "two only",
                "give it 8 bits and one scale a channel, or skip it, by a rule under layers",
            )
