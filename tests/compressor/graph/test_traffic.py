"""Bytes that operators move, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.graph.costs import Traffic, node_traffic
from compressor.graph.plain import with_shapes
from compressor.graph.values import all_nodes
from tests.compressor.tiny_project import tiny_onnx


def traffic(model: ir.Model, shapes: dict[str, tuple[int, ...]]) -> dict[str, Traffic | None]:
    """Return the traffic of each node, by its operator and number."""
    nodes = list(all_nodes(with_shapes(model, shapes).graph))
    return {f"{node.op_type}{i}": node_traffic(node) for i, node in enumerate(nodes)}


def quantized() -> ir.Model:
    """Make Q, DQ, Conv (int8 weight), Relu, Q, DQ: what runtimes execute as one operator."""
    weights = {
        "w": np.ones((8, 1, 3, 3), np.int8),
        "s": np.ones(8, np.float32),
        "z": np.zeros(8, np.int8),
        "xs": np.float32(1),
        "xz": np.uint8(0),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "xs", "xz"], ["bq"]),
        helper.make_node("DequantizeLinear", ["bq", "xs", "xz"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    opset = helper.make_opsetid("", 21)
    return ir.from_proto(helper.make_model(graph, opset_imports=[opset], ir_version=10))


@pytest.mark.parametrize("batch", [1, 3])
def test_floats(batch: int):
    found = traffic(ir.from_proto(tiny_onnx()), {"image": (batch, 1, 8, 8)})
    conv = found["Conv0"]
    assert conv is not None
    assert (conv.weights, conv.weight_bytes) == (8 * 9 + 8, 4 * (8 * 9 + 8))
    assert (conv.activations, conv.activation_bytes) == (batch * 9 * 64, batch * 9 * 64 * 4)
    assert not conv.integer
    assert found["Relu1"] == Traffic()  # done while the convolution writes
    assert found["Flatten5"] == Traffic()  # a view
    pool = found["GlobalAveragePool4"]
    assert pool is not None
    assert pool.bytes == batch * 4 * (8 * 64 + 8)


def test_quantized_activations_count_as_they_are_stored():
    found = traffic(quantized(), {"x": (1, 1, 8, 8)})
    conv = found["Conv3"]
    assert conv is not None
    assert conv.integer
    assert conv.activation_bytes == 64 + 8 * 64
    assert conv.weight_bytes == 8 * 9 + 8 * 4 + 8
    assert found["QuantizeLinear0"] is not None
    assert found["QuantizeLinear0"].activation_bytes == 64 * 4 + 64  # of the model's input
    assert found["QuantizeLinear5"] == Traffic()


def test_of_a_table_only_what_is_read_counts():
    table = numpy_helper.from_array(np.ones((1000, 16), np.float32), "table")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "x"], ["y"])],
        "g",
        [value("x", TensorProto.INT64, ["batch", 5])],
        [value("y", TensorProto.FLOAT, None)],
        [table],
    )
    opset = helper.make_opsetid("", 21)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[opset], ir_version=10))
    found = traffic(model, {"x": (2, 5)})["Gather0"]
    assert found is not None
    assert found.weight_bytes == 2 * 5 * 16 * 4
    assert found.activation_bytes == 2 * 5 * 8 + 2 * 5 * 16 * 4
