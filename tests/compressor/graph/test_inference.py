"""Types and shapes that onnx or onnx_ir leave out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import macs
from compressor.graph.values import all_nodes
from compressor.models.onnx.carrier import open_onnx

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
FLOAT = TensorProto.FLOAT
"""Element type of all inputs and outputs."""


def written(path: Path, nodes: list[onnx.NodeProto], *tensors: onnx.TensorProto) -> Path:
    x = helper.make_tensor_value_info("x", FLOAT, ["N", 3])
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], list(tensors))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def with_sequences(path: Path) -> Path:
    """Write a model whose values are sequences, one of them optional."""
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"]),
        helper.make_node("SequenceInsert", ["s", "x"], ["longer"]),
        helper.make_node("Optional", ["longer"], ["maybe"]),
        helper.make_node("OptionalGetElement", ["maybe"], ["got"]),
        helper.make_node("ConcatFromSequence", ["got"], ["y"], axis=0),
    ]
    return written(path, nodes)


def test_sequences_and_optional_values_keep_their_types(tmp_path: Path) -> None:
    carrier = open_onnx(with_sequences(tmp_path / "m.onnx"), 21)
    types = {v.name: v.type for node in all_nodes(carrier.graph().graph) for v in node.outputs}
    sequence = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    assert types["longer"] == types["got"] == sequence
    assert types["maybe"] == ir.OptionalType(sequence)
    assert carrier.runner().run({"x": ROWS})["y"].shape == (6, 3)


def test_a_sequence_that_a_loop_carries_keeps_its_type(tmp_path: Path) -> None:
    value, some = helper.make_tensor_value_info, helper.make_tensor_sequence_value_info
    turn = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("SequenceInsert", ["taken", "x"], ["given"]),
        ],
        "turn",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []),
         some("taken", FLOAT, None)],
        [value("on", TensorProto.BOOL, []), some("given", FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"]),
        helper.make_node("Loop", ["turns", "", "none"], ["s"], body=turn),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    turns = numpy_helper.from_array(np.array(3), "turns")
    carrier = open_onnx(written(tmp_path / "m.onnx", nodes, turns), 21)
    model = ir.to_proto(carrier.graph())
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    (loop,) = (node for node in carrier.graph().graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    for each in (body.inputs[2], body.outputs[1], loop.outputs[0]):
        assert each.type == ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    assert carrier.runner().run({"x": ROWS})["y"].shape == (6, 3)


@pytest.mark.parametrize("kind", ["Scaler", "Normalizer", "Imputer", "Binarizer"])
def test_shapes_go_through_classical_operators(kind: str, tmp_path: Path) -> None:
    options = {
        "Scaler": {"scale": [2.0], "offset": [1.0]},
        "Imputer": {"imputed_value_floats": [0.0]},
        "Binarizer": {"threshold": 1.0},
    }.get(kind, {})
    tables = {"w": np.ones((3, 8)), "v": np.ones((8, 4))}
    weights = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in tables.items()]
    nodes = [
        helper.make_node(kind, ["x"], ["scaled"], domain="ai.onnx.ml", **options),
        helper.make_node(kind, ["scaled"], ["again"], domain="ai.onnx.ml", **options),
        helper.make_node("MatMul", ["again", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    carrier = open_onnx(written(tmp_path / "m.onnx", nodes, *weights), 21)
    assert macs(carrier.graph()) == 3 * 8 + 8 * 4
    inner = [group for group in map_channels(carrier.graph()).groups if not group.frozen]
    assert [len(group.units) for group in inner] == [8]
