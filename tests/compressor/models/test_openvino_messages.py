"""What is said of models that OpenVINO does not take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import ModelError
from compressor.models.onnx.runtimes import OpenVinoRunner, openvino_reason

HEAD = """Exception from src/inference/src/cpp/core.cpp:84:
FrontEnd API failed with OpConversionFailure:
Model wasn't fully converted.{log}
Summary:
-- {summary}
"""
LOG = """ Failed operations detailed log:
-- GridSample-20 with a message:
While validating ONNX node '<Node(GridSample): y>':
GridSample is only supported for 4D input tensors. Got rank: 5
"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            HEAD.format(log=LOG, summary="Conversion is failed for: GridSample-20"),
            "GridSample-20: GridSample is only supported for 4D input tensors. Got rank: 5",
        ),
        (
            HEAD.format(log="", summary="No conversion rule found for operations: Det-18"),
            "No conversion rule found for operations: Det-18",
        ),
        ("Exception from src/core.cpp:84:\nCannot compile\n", "Cannot compile"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_stands_beside_the_operator(message: str, said: str):
    """The last line names the operator alone."""
    assert openvino_reason(RuntimeError(message)) == said


def test_of_a_long_line_whole_words_are_left():
    said = openvino_reason(RuntimeError("some words " * 50))
    assert len(said) <= 301
    assert said.endswith("words …")


def test_openvino_says_it_so(tmp_path: Path):
    pytest.importorskip("openvino")
    values = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.ones((4, 5), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs, outputs = [values("x", TensorProto.FLOAT, [2, 3])], [values("y", 1, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"\(MatMul-\d+: .*dimension"):
        OpenVinoRunner(tmp_path / "m.onnx", "model")
