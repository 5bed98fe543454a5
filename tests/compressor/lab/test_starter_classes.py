"""``compress init`` sees which networks decide for classes, and judges them by their labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.report.run import run_spec
from compressor.run.plan import Plan, make_plan
from compressor.spec.load import load_spec
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import network, node, weight

MEAN = [
    node("Conv", ["x", "conv.weight"], ["c"], pads=[1] * 4),
    node("GlobalAveragePool", ["c"], ["p"]),
    node("Flatten", ["p"], ["f"]),
]
ARRAYS = {"conv.weight": weight(16, 3, 3, 3), "w": weight(16, 10), "k": np.float32(8)}


def begun(model: onnx.ModelProto, folder: Path, **labels: np.ndarray) -> tuple[Plan, str]:
    onnx.save(model, folder / "m.onnx")
    images = np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x_train=images, x_test=images, **labels)
    write_starter(folder / "m.onnx", folder / "spec.yaml", Choices(folder / "data.npz"))
    return make_plan(load_spec(folder / "spec.yaml")), (folder / "spec.yaml").read_text()


def scores(ends: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    return network([*MEAN, *ends], ARRAYS, y=(guests.FLOAT, ["n", 10]))


@pytest.mark.parametrize(
    "ends",
    [
        [node("MatMul", ["f", "w"], ["s"]), node("Mul", ["s", "k"], ["y"])],
        [node("MatMul", ["f", "w"], ["s"]), node("Div", ["s", "k"], ["y"])],
        [
            node("MatMul", ["f", "w"], ["s"]),
            node("Exp", ["k"], ["scale"]),
            node("Mul", ["scale", "s"], ["y"]),
        ],
        [  # of cosines
            node("Transpose", ["w"], ["t"]),
            node("LpNormalization", ["t"], ["u"]),
            node("Gemm", ["f", "u"], ["s"], transB=1),
            node("Mul", ["s", "k"], ["y"]),
        ],
    ],
)
def test_scaled_scores_are_scores(tmp_path: Path, ends: list[onnx.NodeProto]) -> None:
    plan, text = begun(scores(ends), tmp_path, y_test=np.arange(40) % 10)
    assert plan.metric is not None
    assert plan.metric.name == "accuracy"
    assert "\n    target: y_test\n" in text


def test_a_gate_gives_no_scores(tmp_path: Path) -> None:
    ends = [
        node("MatMul", ["f", "w"], ["s"]),
        node("Sigmoid", ["s"], ["g"]),
        node("Mul", ["s", "g"], ["y"]),
    ]
    plan, _ = begun(scores(ends), tmp_path, y_test=np.arange(40) % 10)
    assert plan.metric is not None
    assert plan.metric.name == "cosine"


def segmentation() -> onnx.ModelProto:
    nodes = [MEAN[0], node("ArgMax", ["c"], ["y"], axis=1, keepdims=0)]
    return network(nodes, ARRAYS, y=(onnx.TensorProto.INT64, ["n", 8, 8]))


@pytest.mark.parametrize("dtype", ["int64", "uint8", None])
def test_a_map_of_classes_is_judged_by_its_labels(tmp_path: Path, dtype: str | None) -> None:
    """It was judged by the cosine of the numbers of classes, and its labels were not seen."""
    labels = {} if dtype is None else {"y_test": np.zeros((40, 8, 8), dtype)}
    plan, text = begun(segmentation(), tmp_path, **labels)
    assert plan.metric is not None
    assert plan.metric.name == ("agreement" if dtype is None else "accuracy")
    assert ("\n    target: y_test\n" in text) == (dtype is not None)
    spec = load_spec(tmp_path / "spec.yaml", ["exports=[{format: onnx}]", "limits={}"])
    report = run_spec(spec).report
    assert report["baseline"]["metric"]["unit"] == "%"


def hypernetwork() -> onnx.ModelProto:
    """A linear layer computes the weight of the next product from each sample."""
    nodes = [
        *MEAN,
        node("MatMul", ["f", "big"], ["made"]),
        node("Reshape", ["made", "square"], ["own"]),
        node("Reshape", ["c", "columns"], ["pixels"]),
        node("MatMul", ["own", "pixels"], ["mixed"]),
        node("ReduceMean", ["mixed", "last"], ["m"], keepdims=0),
        node("MatMul", ["m", "w"], ["y"]),
    ]
    arrays = {
        **ARRAYS,
        "big": weight(16, 256),
        "square": np.array([-1, 16, 16]),
        "columns": np.array([-1, 16, 64]),
        "last": np.array([2]),
    }
    return network(nodes, arrays, y=(guests.FLOAT, ["n", 10]))


def test_weights_that_a_network_computes_are_no_attention(tmp_path: Path) -> None:
    _, text = begun(hypernetwork(), tmp_path)
    assert "# For a network of convolutional and linear layers:\n" in text


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_one_number_is_no_score(tmp_path: Path, dtype: str) -> None:
    """It was judged by which of one is the largest, which plan then refused."""
    ends = [node("MatMul", ["f", "one"], ["y"])]
    arrays = {**ARRAYS, "one": weight(16, 1)}
    model = network([*MEAN, *ends], arrays, y=(guests.FLOAT, ["n", 1]))
    plan, _ = begun(model, tmp_path, y_test=np.arange(40).astype(dtype))
    assert plan.metric is not None
    assert plan.metric.name == "mse"
