"""Artifacts beside the models they were exported from, with outputs of any number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compressor.report.run import run_spec
from compressor.run.metrics.class_metrics import AGREEMENT
from compressor.run.metrics.metrics import COSINE, MSE
from compressor.spec.load import load_spec
from compressor.types.tensors import filled


def test_arrays_of_other_lengths_are_filled_with_zeros():
    a, b = filled(np.ones((2, 3)), np.ones((4, 1)))
    assert a.shape == b.shape == (4, 3)
    assert (a.sum(), b.sum()) == (6.0, 4.0)


def test_metrics_of_zeros_and_of_nothing():
    zeros, ones, empty = np.zeros((1, 3)), np.ones((1, 3)), np.zeros((1, 0, 3))
    values = {
        metric.name: [
            metric.per_sample({"y": ours}, {"y": theirs}, 1).tolist()
            for ours, theirs in ((zeros, ones), (zeros, zeros), (empty, empty))
        ]
        for metric in (COSINE, MSE, AGREEMENT)
    }
    assert values["cosine"] == [[0.0], [1.0], [1.0]], "a model that gives nothing is not alike"
    assert values["mse"] == [[1.0], [0.0], [0.0]]
    assert values["agreement"][2] == [1.0]


def detector(path: Path) -> None:
    """Write a detector: two convolutions, and of the boxes those that suppression leaves."""
    rng = np.random.default_rng(0)
    arrays = {
        "first": rng.standard_normal((16, 3, 3, 3)) * 0.2,
        "boxes_w": rng.standard_normal((4, 16, 1, 1)) * 0.6,
        "scores_w": rng.standard_normal((2, 16, 1, 1)) * 0.5,
        "iou": np.array([0.7]),
        "least": np.array([0.6]),
    }
    lengths = {"as_boxes": [0, 4, -1], "as_scores": [0, 2, -1], "most": [50], "axis": [1]}
    lengths |= {"zero": [0], "from": [2], "to": [3]}
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    tensors += [numpy_helper.from_array(np.array(a, np.int64), n) for n, a in lengths.items()]
    steps = [
        ("Conv", ["image", "first"], "features", {"strides": [4, 4]}),
        ("Relu", ["features"], "positive", {}),
        ("Conv", ["positive", "boxes_w"], "box_map", {}),
        ("Conv", ["positive", "scores_w"], "score_map", {}),
        ("Reshape", ["box_map", "as_boxes"], "columns", {}),
        ("Transpose", ["columns"], "boxes", {"perm": [0, 2, 1]}),
        ("Reshape", ["score_map", "as_scores"], "logits", {}),
        ("Sigmoid", ["logits"], "scores", {}),
        ("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], "kept", {}),
        ("Slice", ["kept", "from", "to", "axis"], "column", {}),
        ("Squeeze", ["column", "axis"], "places", {}),
        ("Squeeze", ["boxes", "zero"], "rows", {}),
        ("Gather", ["rows", "places"], "picked", {"axis": 0}),
    ]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], **a) for op, inputs, output, a in steps],
        "detector",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info("picked", TensorProto.FLOAT, ["count", 4])],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def test_a_detector_whose_number_of_boxes_changes_is_judged(tmp_path: Path):
    detector(tmp_path / "detector.onnx")
    rng = np.random.default_rng(1)
    for role in ("calibration", "evaluation"):
        (tmp_path / role).mkdir()
        for i in range(12):
            image = rng.standard_normal((1, 3, 32, 32)).astype(np.float32)
            np.savez(tmp_path / role / f"{i:02}.npz", image=image)
    spec = {
        "version": 1,
        "name": "detector",
        "model": {"onnx": "detector.onnx"},
        "data": {r: {"npz": r, "samples": "feeds"} for r in ("calibration", "evaluation")},
        "passes": [{"pass": "quantize-static"}],
        "exports": [{"format": "safetensors"}, {"format": "onnx"}],
        "output": "out",
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    report = run_spec(load_spec(tmp_path / "spec.yaml")).report
    for artifact in report["artifacts"]:
        assert [check["ok"] for check in artifact["checks"]] == [True, True]
        assert 0.5 < artifact["metric"]["value"] < 1.0
