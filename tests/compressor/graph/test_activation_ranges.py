"""The range of an activation, read from the nodes that quantize it."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from compressor.run.noise.histograms import CodeRange, activation_range


def read(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    value: str = "out",
    codes: int = onnx.TensorProto.UINT8,
) -> ir.Value:
    """Build a graph that computes ``value`` from ``x`` and return that value.

    Args:
        nodes: of the graph.
        constants: by name.
        value: what is returned.
        codes: element type of the values ``codes`` and ``moved``.
    """
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4])],
        [onnx.ValueInfoProto(name=value)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
        value_info=[helper.make_tensor_value_info(n, codes, [2, 4]) for n in ("codes", "moved")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    return next(v for node in model.graph for v in node.outputs if v.name == value)


def quantized(source: str = "x", moved: bool = False) -> list[onnx.NodeProto]:
    last = "moved" if moved else "codes"
    nodes = [helper.make_node("QuantizeLinear", [source, "scale", "zero"], ["codes"])]
    if moved:
        nodes.append(helper.make_node("Flatten", ["codes"], ["moved"]))
    return [*nodes, helper.make_node("DequantizeLinear", [last, "scale", "zero"], ["out"])]


def step(zero: int, dtype: type = np.uint8) -> dict[str, np.ndarray]:
    return {"scale": np.array(0.5, np.float32), "zero": np.array(zero, dtype)}


@pytest.mark.parametrize("moved", [False, True])
def test_codes_have_a_range(moved: bool):
    nodes = quantized(moved=moved)
    assert activation_range(read(nodes, step(0))) == CodeRange(0.0, 127.5, 0.5)
    assert activation_range(read(nodes, step(128))) == CodeRange(-64.0, 63.5, 0.5)
    signed = read(nodes, step(0, np.int8), codes=onnx.TensorProto.INT8)
    assert activation_range(signed) == CodeRange(-64.0, 63.5, 0.5)


def test_codes_kept_in_a_wider_type_are_clipped_before():
    nodes = [helper.make_node("Clip", ["x", "least", "most"], ["clipped"]), *quantized("clipped")]
    limits = {"least": np.array(1, np.float32), "most": np.array(3.5, np.float32)}
    assert activation_range(read(nodes, {**step(0), **limits})) == CodeRange(1.0, 3.5, 0.5)


def test_what_moves_floats_behind_the_codes_is_seen_through():
    nodes = [*quantized(), helper.make_node("Identity", ["out"], ["later"])]
    assert activation_range(read(nodes, step(0), "later")) == CodeRange(0.0, 127.5, 0.5)


def test_a_float_has_no_range():
    assert activation_range(read([helper.make_node("Relu", ["x"], ["out"])], {})) is None
    assert activation_range(None) is None


def test_a_scale_for_each_channel_is_no_range():
    constants = {"scale": np.ones(4, np.float32), "zero": np.zeros(4, np.uint8)}
    assert activation_range(read(quantized(), constants)) is None


def test_a_range_of_each_input_is_dynamic():
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["out", "s", "z"])
    assert activation_range(read([node], {})) == "dynamic"
