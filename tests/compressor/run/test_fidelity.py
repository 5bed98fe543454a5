"""When an artifact agrees with the model it was exported from, and when nobody can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.report.run import run_spec
from compressor.run.fidelity import agreement
from compressor.run.metrics import AGREEMENT, COSINE, MSE
from compressor.spec.load import load_spec
from compressor.types.tensors import filled


def verdict(entry: dict[str, Any]) -> str:
    return entry.get("verdict", "passed") if entry["ok"] else "failed"


def judged(
    samples: int, *, worse_db: float, source_db: float = 11.0, written_db: float = 11.5
) -> dict[str, Any]:
    """Judge an artifact whose error beside the float model is larger by so many dB."""
    ours = np.linspace(1.0, 2.0, samples)
    errors = np.stack([ours * 10 ** (worse_db / 10), ours], axis=1)
    return agreement(written_db, source_db, errors)


@pytest.mark.parametrize(
    ("written", "compressed", "expected"),
    [
        (None, 10.0, "passed"),  # equal
        (40.0, 90.0, "passed"),
        (39.9, 90.0, "failed"),
        (26.0, 20.0, "passed"),  # 6 dB nearer to its source than that is to the float model
        (25.9, 20.0, "failed"),
        (39.9, None, "failed"),  # the source is the float model
    ],
)
def test_beside_its_source(written: float | None, compressed: float | None, expected: str):
    errors = np.stack([np.full(64, 20.0), np.full(64, 1.0)], axis=1) * np.arange(1, 65)[:, None]
    if compressed is None:
        errors[:, 1] = 0.0
    assert verdict(agreement(written, compressed, errors)) == expected


@pytest.mark.parametrize(
    ("samples", "worse_db", "expected"),
    [
        (64, 0.4, "passed"),
        (64, -3.0, "passed"),  # nearer to the float model than its source
        (64, 0.6, "failed"),  # in every one of 64 samples
        (10, 0.6, "failed"),  # 1 of 1,024 by chance
        (9, 0.6, "unknown"),
        (1, 9.9, "unknown"),
        (1, 10.1, "failed"),  # no rounding does that
    ],
)
def test_beside_the_float_model(samples: int, worse_db: float, expected: str):
    entry = judged(samples, worse_db=worse_db)
    assert verdict(entry) == expected
    farther = f"or 10.5 dB beside the float model: {11.0 - worse_db:.1f} dB"
    assert farther in entry["detail"]
    assert ("evaluate more" in entry["detail"]) == (expected == "unknown")


def test_as_near_to_the_float_model_as_the_source_but_far_from_that_is_no_rounding():
    """An error that points away from the source's shows in the distance between the two."""
    assert verdict(judged(64, worse_db=0.0, written_db=10.4)) == "unknown"
    assert verdict(judged(64, worse_db=0.0, written_db=10.6)) == "passed"


def test_a_sample_that_fills_a_fixed_batch_counts_once():
    one = np.array([[2.0, 1.0]])
    assert verdict(agreement(11.5, 11.0, np.repeat(one, 64, axis=0))) == "unknown"


@pytest.mark.parametrize("samples", [1, 2, 4, 8, 16, 64])
def test_another_way_of_rounding_is_never_called_broken(samples: int):
    """Errors of two runtimes that were measured on a recognizer of text differ by 2.3 dB a sample.

    Neither is the right one: which is called the source is chance.
    """
    rng = np.random.default_rng(samples)
    verdicts = []
    for _ in range(500):
        difficulty = rng.lognormal(0.0, 1.0, (samples, 1))
        errors = difficulty * 10 ** (rng.normal(0.0, 2.3 / np.sqrt(2), (samples, 2)) / 10)
        verdicts.append(verdict(agreement(11.5, 11.0, errors)))
    assert "failed" not in verdicts
    assert verdicts.count("passed") > 200


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
