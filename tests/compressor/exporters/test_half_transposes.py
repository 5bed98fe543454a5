"""Transpositions of float16 in front of products, which end ONNX Runtime's process as they are."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.inference import infer_shapes
from compressor.models.onnx.ort_runner import graph_runner

OPENED = """
import sys
import onnxruntime
import onnx_ir as ir
from compressor.models.onnx.ort_runner import graph_runner
for before, written in zip(sys.argv[1::2], sys.argv[2::2]):
    onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    graph_runner(ir.load(before))
"""


def turned(order: list[int], *, cast: bool, shared: bool) -> ir.Model:
    """Return a product of a transposed input and a weight; others may read what is transposed."""
    half, shape = TensorProto.FLOAT16, [2, 4, 8, 6][-len(order) :]
    kind = TensorProto.FLOAT if cast else half
    values = np.random.default_rng(0).standard_normal((shape[order[-1]], 5))
    weight = values.astype(helper.tensor_dtype_to_np_dtype(kind))
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=order)]
    if cast:
        nodes.append(helper.make_node("Cast", ["t"], ["c"], to=kind))
    nodes.append(helper.make_node("MatMul", ["c" if cast else "t", "w"], ["y"]))
    outputs = [helper.make_tensor_value_info("y", kind, None)]
    if shared:
        nodes.append(helper.make_node("Relu", ["t"], ["z"]))
        outputs.append(helper.make_tensor_value_info("z", half, None))
    x = helper.make_tensor_value_info("x", half, shape)
    graph = helper.make_graph(nodes, "g", [x], outputs, [numpy_helper.from_array(weight, "w")])
    opsets = [helper.make_opsetid("", 21)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    infer_shapes(model)
    return model


CASES = list(product(([1, 0, 2], [1, 2, 0], [1, 2, 0, 3]), (False, True), (False, True)))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open all in one process, which would not come to its end."""
    folder, files = tmp_path_factory.mktemp("half"), list[Path]()
    for order, cast, shared in CASES:
        model = turned(order, cast=cast, shared=shared)
        for written in (model, in_form_for("ort-cpu", model, "float32")):
            files.append(folder / f"{len(files)}.onnx")
            ir.save(written, files[-1])
        onnx.checker.check_model(files[-1], full_check=True)
    subprocess.run([sys.executable, "-c", OPENED, *files], check=True)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(("order", "cast", "shared"), CASES)
def test_they_open_and_give_the_same(order: list[int], cast: bool, shared: bool) -> None:
    model = turned(order, cast=cast, shared=shared)
    formed = in_form_for("ort-cpu", model, "float32")
    assert formed is not model
    size = tuple(int(d) for d in model.graph.inputs[0].shape or ())
    batch = {"x": np.random.default_rng(1).standard_normal(size).astype(np.float16)}
    found = graph_runner(formed).run(batch)
    exact = batch["x"].transpose(order)
    expected = exact.astype(np.float32) @ model.graph.initializers["w"].const_value.numpy()
    np.testing.assert_allclose(found["y"].astype(np.float32), expected, rtol=0.01, atol=0.01)
    if shared:
        np.testing.assert_array_equal(found["z"], np.maximum(exact, 0))


@pytest.mark.parametrize("order", [[0, 2, 1], [2, 1, 0], [1, 0]])
def test_other_orders_stay(order: list[int]) -> None:
    model = turned(order, cast=False, shared=False)
    assert in_form_for("ort-cpu", model, "float32") is model
