"""Lengths that ONNX's inference leaves open are noted, and no dynamic one is."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.graph.costs import macs
from compressor.graph.inference import infer_shapes
from compressor.graph.plain import note_static_lengths

FLOAT = TensorProto.FLOAT


def graph(
    nodes: list[onnx.NodeProto],
    constants: dict[str, list[int]],
    shape: list[int | str],
) -> ir.Model:
    """Make a model of one input ``x``; its shapes are inferred."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in constants.items()]
        + [numpy_helper.from_array(np.ones(6, np.float32), "ones")],
    )
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def lengths(model: ir.Model, name: str) -> list[int | None]:
    """Return the noted lengths of a value, ``None`` for open ones."""
    value = next(v for node in model.graph for v in node.outputs if v.name == name)
    assert value.shape is not None
    return [d if isinstance(d, int) else None for d in value.shape]


SHAPE = helper.make_node("Shape", ["x"], ["lengths"])
FIRST = helper.make_node("Slice", ["lengths", "zero", "two"], ["outer"])
HEADS = [
    SHAPE,
    FIRST,
    helper.make_node("Concat", ["outer", "split"], ["parts"], axis=0),
    helper.make_node("Reshape", ["x", "parts"], ["heads"]),
    helper.make_node("Transpose", ["heads"], ["keys"], perm=[0, 2, 3, 1]),
    helper.make_node("Transpose", ["heads"], ["queries"], perm=[0, 2, 1, 3]),
    helper.make_node("MatMul", ["queries", "keys"], ["y"]),
]
ENDS = {"zero": [0], "two": [2], "split": [-1, 8]}


def test_heads_behind_a_reshape_are_counted() -> None:
    model = graph(HEADS, ENDS, ["batch", "time", 32])
    assert lengths(model, "heads") == [None, None, None, 8]
    note_static_lengths(model)
    assert lengths(model, "heads") == [None, None, 4, 8]
    assert lengths(model, "y") == [None, 4, None, None]
    assert macs(model) == 4 * 8


def test_an_operator_without_inference_passes_lengths_on() -> None:
    nodes = [
        helper.make_node("GroupNormalization", ["x", "ones", "ones"], ["normed"], num_groups=2),
        helper.make_node("Relu", ["normed"], ["y"]),
    ]
    model = graph(nodes, {}, ["batch", 6, 5, 5])
    note_static_lengths(model)
    assert lengths(model, "y") == [None, 6, 5, 5]


@pytest.mark.parametrize("multiple", [2, 16, 64])
def test_a_length_that_is_rounded_up_stays_open(multiple: int) -> None:
    """Shorter inputs than the multiple have all the same length afterwards."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=0, end=1),
        helper.make_node("Mod", ["length", "multiple"], ["over"]),
        helper.make_node("Sub", ["multiple", "over"], ["missing"]),
        helper.make_node("Concat", ["zero", "zero", "missing", "zero"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("Relu", ["padded"], ["y"]),
    ]
    model = graph(nodes, {"multiple": [multiple], "zero": [0]}, ["time", 6])
    note_static_lengths(model)
    assert lengths(model, "y") == [None, 6]


def test_the_length_of_an_example_that_was_left_noted_is_taken_back() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    model = graph(nodes, {}, ["batch", "time", 6])
    model.graph[0].outputs[0].shape = ir.Shape(["batch", 5, 6])
    note_static_lengths(model)
    assert lengths(model, "a") == [None, None, 6]


def test_names_of_dynamic_lengths_stay() -> None:
    model = graph([helper.make_node("Relu", ["x"], ["y"])], {}, ["batch", 6])
    note_static_lengths(model)
    assert str(model.graph[0].outputs[0].shape) == "[batch,6]"
