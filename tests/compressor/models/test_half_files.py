"""Files of float16 that end ONNX Runtime's process where they are opened as others are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compressor.models.onnx.ort_session import merges_halves
from compressor.models.onnx.runtimes import runtime_for

OPEN = """
import sys, pathlib, numpy
from compressor.models.onnx.runtimes import runtime_for
path = pathlib.Path(sys.argv[1])
runner = runtime_for("ort-cpu", path).open(path, "model")
print(*runner.run({"x": numpy.ones((2, 3, 4), numpy.float16)})["y"].shape)
"""


def turned(path: Path, dtype: type = np.float16, order: tuple[int, ...] = (1, 0, 2)) -> Path:
    """Write a product behind a transposition."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    width = 3 if order[-1] == 1 else 4
    weight = numpy_helper.from_array(np.ones((width, 5), dtype), "w")
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=order),
        helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", kind, ["batch", 3, 4])]
    outputs = [helper.make_tensor_value_info("y", kind, [None, None, 5])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def test_a_file_of_halves_is_opened_without_the_optimizer_that_ends_the_process(tmp_path: Path):
    """The states of a GRU, with the steps behind the samples: evaluation and timing open it."""
    path = turned(tmp_path / "m.onnx")
    command = [sys.executable, "-c", OPEN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3 2 5\n"), done.stderr


@pytest.mark.parametrize(
    ("dtype", "order", "told"),
    [
        (np.float16, (1, 0, 2), True),
        (np.float32, (1, 0, 2), False),
        (np.float16, (0, 2, 1), False),
    ],
)
def test_other_files_keep_the_optimizer(
    tmp_path: Path, dtype: type, order: tuple[int, ...], told: bool
):
    path = turned(tmp_path / "m.onnx", dtype, order)
    assert merges_halves(path) == told
    assert runtime_for("ort-cpu", path).merge != told


def test_what_is_no_model_is_the_runtimes_to_refuse(tmp_path: Path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    assert not merges_halves(tmp_path / "m.onnx")
