"""One layer as an ONNX graph, of every kind that can be factored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from compressor.graph.inference import infer_shapes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array

WEIGHT = "layer.weight"


def normal(seed: int, *shape: int) -> Array:
    """Return normal numbers, always the same for a seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one_layer(
    op_type: str,
    shape: Sequence[int],
    weight: Array,
    bias: Array | None = None,
    *,
    turned: bool = False,
    **attributes: Any,
) -> OnnxCarrier:
    """Return a graph of one node; ``turned`` stores the weight transposed, with a node for it."""
    held = {WEIGHT: np.ascontiguousarray(weight.T) if turned else weight}
    inputs = ["x", "turned" if turned else WEIGHT]
    nodes = [helper.make_node("Transpose", [WEIGHT], ["turned"], perm=[1, 0])] if turned else []
    if bias is not None:
        held["layer.bias"] = bias
        inputs.append("layer.bias")
    nodes.append(helper.make_node(op_type, inputs, ["y"], name="node", **attributes))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(proto)
    infer_shapes(model)
    return OnnxCarrier(model)


def output(carrier: Carrier, x: Array) -> Array:
    """Run a model with one input; its first output."""
    (name,) = (spec.name for spec in carrier.inputs)
    return next(iter(carrier.runner().run({name: x}).values()))
