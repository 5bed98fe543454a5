"""Shapes in bodies of ``Loop``: of values whose shape no turn changes, and of no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compressor.graph.costs import macs
from compressor.graph.inference import infer_shapes
from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.path import inspect_path
from compressor.models.onnx.file import read_onnx
from tests.compressor.passes.quantize.guests import network, node, weight


def looped(turn: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Three turns of nodes that make ``given`` of ``taken``, with a product behind them."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [*turn, node("Identity", ["go"], ["on"])],
        "turn",
        [
            value("i", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("taken", TensorProto.FLOAT, None),
        ],
        [value("on", TensorProto.BOOL, []), value("given", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("MatMul", ["x", "w0"], ["h"]),
        node("Loop", ["trips", "", "h"], ["l"], body=body),
        node("ReduceMax", ["l", "last"], ["m"]),
        node("MatMul", ["m", "w2"], ["y"]),
    ]
    arrays = {"w0": weight(16, 8), "w1": weight(8, 8), "w2": weight(1, 4)}
    arrays |= {"trips": np.array(3), "last": np.array([1])}
    ends = ((TensorProto.FLOAT, ["n", width]) for width in (16, 4))
    return network(nodes, arrays, *ends)


SAME = [node("MatMul", ["taken", "w1"], ["s"]), node("Relu", ["s"], ["given"])]
WIDER = [node("Concat", ["taken", "taken"], ["given"], axis=1)]


@pytest.mark.parametrize(("turn", "known"), [(SAME, ["n", 8]), (WIDER, None)])
def test_what_a_loop_carries_has_a_shape_if_no_turn_changes_it(
    tmp_path: Path, turn: list[onnx.NodeProto], known: list[object] | None
) -> None:
    onnx.save(looped(turn), tmp_path / "m.onnx")
    model = read_onnx(tmp_path / "m.onnx")
    infer_shapes(model)
    (loop,) = (each for each in model.graph if each.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    for value in (body.inputs[2], body.outputs[1], loop.outputs[0]):
        shape = None if value.shape is None else [getattr(d, "value", d) for d in value.shape]
        assert shape == known or (known is None and shape != ["n", 8])
    if known:
        assert macs(model) == 16 * 8 + 3 * 8 * 8 + 4


def test_layers_of_unknown_shapes_have_no_count(tmp_path: Path) -> None:
    """They showed 0, as if they cost nothing."""
    model = looped(SAME)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "m.onnx")
    contents = inspect_path(tmp_path / "m.onnx")
    assert isinstance(contents, ModelContents)
    assert {row.name: row.macs for row in contents.tensors if row.name[0] == "w"}["w0"] is None
    assert any("w0" in note and "are not counted" in note for note in contents.notes)
