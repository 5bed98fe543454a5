"""Small graphs that tests of the executor run or have refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper


def linear_graph(opset: int = 21, shape: tuple[int, int] = (3, 4)) -> ir.Model:
    """Return Relu(x w + b), whose weight has a name that no attribute could have."""
    rng = np.random.default_rng(0)
    return graph_of(
        [
            helper.make_node("MatMul", ["x", "block.0/w"], ["h"], name="product"),
            helper.make_node("Add", ["h", "block.0"], ["s"], name="sum"),
            helper.make_node("Relu", ["s"], ["y"], name="activation"),
        ],
        {
            "block.0/w": rng.standard_normal(shape).astype(np.float32),
            "block.0": rng.standard_normal(shape[1]).astype(np.float32),
        },
        opset,
    )


def graph_of(
    nodes: list[Any], weights: dict[str, Any], opset: int = 21, dtype: int = TensorProto.FLOAT
) -> ir.Model:
    """Return a graph with an input of three features and one output."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", dtype, ["batch", 3])],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
