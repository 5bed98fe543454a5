"""``compress init`` finds the scores of classes among several outputs, and in branches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.lab.tune.from_model import spec_of_model
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import network, node, weight

LAYERS = [
    node("MatMul", ["x", "w0"], ["h"]),
    node("Relu", ["h"], ["r"]),
    node("MatMul", ["r", "w1"], ["s"]),
]
ARRAYS = {"w0": weight(16, 32), "w1": weight(32, 10), "b": np.zeros(10, np.float32)}
INPUT = (guests.FLOAT, ["n", 16])
SCORES = ("y", (guests.FLOAT, ["n", 10]))
LABEL = ("label", (TensorProto.INT64, ["n"]))


def several(
    ends: list[onnx.NodeProto], *outputs: tuple[str, tuple[int, list[str | int]]]
) -> onnx.ModelProto:
    model = network([*LAYERS, *ends], ARRAYS, INPUT, SCORES[1])
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(n, *form) for n, form in outputs)
    return model


def label_first(opset: int) -> onnx.ModelProto:
    """As skl2onnx writes a classifier: before opset 13, softmax flattens its input."""
    ends = [
        node("Softmax", ["s"], ["p"], axis=1),
        node("Identity", ["p"], ["y"]),
        node("ArgMax", ["p"], ["label"], axis=1, keepdims=0),
    ]
    model = several(ends, LABEL, SCORES)
    model.opset_import[0].version = opset
    return model


def handed_through() -> onnx.ModelProto:
    """Beside the scores there are an input and a constant."""
    ends = [node("Identity", ["s"], ["y"]), node("Identity", ["x"], ["echo"])]
    ends.append(node("Identity", ["b"], ["constant"]))
    echo = ("echo", (guests.FLOAT, ["n", 16]))
    return several(ends, SCORES, echo, ("constant", (guests.FLOAT, [10])))


def in_branches() -> onnx.ModelProto:
    branches = {
        name: helper.make_graph(
            [node("MatMul", ["r", "w1"], [f"{name}_s"]), node("Add", [f"{name}_s", "b"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, guests.FLOAT, None)],
        )
        for name in ("then_branch", "else_branch")
    }
    ends = [
        node("ReduceMean", ["x"], ["m"], keepdims=0),
        node("Greater", ["m", "zero"], ["c"]),
        node("If", ["c"], ["y"], **branches),
    ]
    return network([*LAYERS[:2], *ends], {**ARRAYS, "zero": np.float32(0)}, INPUT, SCORES[1])


MODELS = {
    "label before probabilities": label_first(13),
    "the same of an old file": label_first(11),
    "outputs that no layer computes": handed_through(),
    "scores of branches": in_branches(),
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    onnx.save(MODELS[request.param], tmp_path / "m.onnx")
    return tmp_path


def data(folder: Path, **labels: np.ndarray) -> Path:
    rows = np.random.default_rng(0).standard_normal((640, 16)).astype(np.float32)
    np.savez(folder / "data.npz", x_train=rows, x_test=rows, **labels)
    return folder / "data.npz"


def test_labels_are_used_and_without_them_answers_compared(folder: Path) -> None:
    """Labels were ignored, and class numbers were judged by their squared error."""
    labelled = Choices(data(folder, y_test=np.arange(640) % 10))
    write_starter(folder / "m.onnx", folder / "spec.yaml", labelled)
    assert "\n    target: y_test\n" in (folder / "spec.yaml").read_text()
    plan = make_plan(load_spec(folder / "spec.yaml"))
    assert plan.metric is not None
    assert plan.metric.name == "accuracy"
    write_starter(folder / "m.onnx", folder / "other.yaml", Choices(data(folder)))
    plan = make_plan(load_spec(folder / "other.yaml"))
    assert plan.metric is not None
    assert plan.metric.name == "agreement"


def test_tune_compares_answers(folder: Path) -> None:
    """The metric was cosine, which the label's one number a sample then refused."""
    spec = spec_of_model(folder / "m.onnx", data(folder), None, folder)
    assert spec.metric == "agreement"
    assert make_plan(spec).metric is not None


def test_labels_that_are_not_used_are_named(tmp_path: Path) -> None:
    """Two heads: which of them the labels are for is not known."""
    ends = [node("Identity", ["s"], ["y"]), node("MatMul", ["r", "w1"], ["z"])]
    onnx.save(several(ends, SCORES, ("z", SCORES[1])), tmp_path / "m.onnx")
    chosen = Choices(data(tmp_path, y_test=np.arange(640) % 10))
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml", chosen)
    text = (tmp_path / "spec.yaml").read_text()
    assert "# target: y_test # CHECK: if an output has scores of these classes" in text


def test_an_autoencoder_is_judged_by_its_numbers(tmp_path: Path) -> None:
    """Which of its pixels is the largest says little of a picture."""
    nodes = [*LAYERS[:2], node("Gemm", ["r", "w0"], ["y"], transB=1)]
    onnx.save(network(nodes, ARRAYS, INPUT, (guests.FLOAT, ["n", 16])), tmp_path / "m.onnx")
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml", Choices(data(tmp_path)))
    plan = make_plan(load_spec(tmp_path / "spec.yaml"))
    assert plan.metric is not None
    assert plan.metric.name == "cosine"
    assert spec_of_model(tmp_path / "m.onnx", data(tmp_path), None, tmp_path).metric == "cosine"
