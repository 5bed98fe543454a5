"""What targets gain from zeros, as the plan says it."""

from __future__ import annotations

import pytest

from compressor.graph.sparse_kernels import sparse_notes

ZEROS = (
    "{} also multiplies zeros: they shrink a file that omits them, but make nothing faster; "
    "prune-structured does"
)
DENSE = "TensorRT has sparse kernels for 2:4 only; it computes {} densely"
USED = (
    "TensorRT uses kernels for 2:4 in float16 or int8, where they are the faster ones, with "
    "builder: gpu and sparse-weights: true"
)


@pytest.mark.parametrize(
    ("targets", "patterns", "expected"),
    [
        ({"ort-cpu"}, [""], [ZEROS.format("ONNX Runtime")]),
        ({"ort-cpu"}, ["2:4"], [ZEROS.format("ONNX Runtime")]),
        ({"openvino"}, ["2:4"], [ZEROS.format("OpenVINO")]),
        ({"tensorrt"}, ["2:4"], [USED]),
        ({"tensorrt"}, [""], [DENSE.format("single weights")]),
        ({"tensorrt"}, ["2:4", "1:4", ""], [DENSE.format("1:4, single weights"), USED]),
        ({"tensorrt", "ort-cpu"}, ["2:4"], [ZEROS.format("ONNX Runtime"), USED]),
        ({"ort-cuda", "compressed-tensors"}, ["2:4"], []),
        ({"ort-cpu", "tensorrt"}, [], []),
    ],
)
def test_each_target_has_its_facts(targets, patterns, expected):
    assert list(sparse_notes(targets, patterns)) == expected
