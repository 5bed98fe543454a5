"""The counts and ranges that the report draws, and the bytes of layers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compressor.report.run import RunResult
from compressor.run.noise.histograms import BINS, counted
from tests.compressor.tiny_project import Project

STATIC = {
    "pass": "quantize-static",
    "layers": [{"match": "*"}],
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}
FLOATS = arrays.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(-1e6, 1e6, width=32),
)


@given(FLOATS)
def test_every_value_is_counted_once(values: np.ndarray):
    found = counted(values)
    assert len(found["counts"]) == BINS
    assert sum(found["counts"]) == values.size
    assert found["low"] <= values.min()
    assert found["high"] >= values.max()
    assert found["low"] < found["high"]


def test_what_lies_outside_given_bounds_is_not_counted():
    found = counted(np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), (-1.0, 1.0))
    assert (found["low"], found["high"], sum(found["counts"])) == (-1.0, 1.0, 3)


@pytest.fixture
def result(on_onnx: Project) -> RunResult:
    on_onnx.spec.update(passes=[{"pass": "fuse"}, STATIC], exports=[{"format": "onnx"}])
    on_onnx.spec["limits"] = {"metric-drop": 50, "size-ratio": 3, "latency-ratio": 100}
    return on_onnx.run()


def test_the_worst_layers_come_first_with_weights_inputs_and_ranges(result: RunResult):
    fuse, static = result.report["passes"]
    assert fuse["histograms"] == []
    sqnr = {row["name"]: row["sqnr_db"] for row in static["layers"]}
    names = [item["name"] for item in static["histograms"]]
    assert names == sorted(sqnr, key=lambda name: sqnr[name])
    for item in static["histograms"]:
        weight, entered = item["weight"], item["input"]
        assert sum(weight["counts"]) == elements(static, item["name"])
        assert weight["range"] == pytest.approx([weight["low"], weight["high"]], rel=0.05)
        assert weight["range_reason"] is None
        assert entered["samples"] > 0
        low, high = entered["range"]
        assert low <= entered["low"] + 0.01
        assert high >= 0.9 * entered["high"]
        assert 0 <= entered["outside"] < 5


def elements(entry: dict[str, Any], name: str) -> int:
    shape = next(row["shape"] for row in entry["layers"] if row["name"] == name)
    return int(np.prod(shape))


def test_a_narrow_range_cuts_values_off(on_onnx: Project):
    observer = {"observer": "percentile", "percentile": 90}
    on_onnx.spec.update(passes=[{**STATIC, "activations": observer}], exports=[{"format": "onnx"}])
    on_onnx.spec["limits"] = {"metric-drop": None, "size-ratio": 3, "latency-ratio": 100}
    (static,) = on_onnx.run().report["passes"]
    outside = [item["input"]["outside"] for item in static["histograms"]]
    assert max(outside) > 5


def test_weights_alone_have_a_range_and_inputs_a_reason(on_onnx: Project):
    on_onnx.spec.update(
        passes=[{"pass": "quantize-weights", "bits": 8}],
        exports=[{"format": "onnx"}],
    )
    on_onnx.spec["limits"] = {"metric-drop": None, "size-ratio": 3, "latency-ratio": 100}
    (entry,) = on_onnx.run().report["passes"]
    assert entry["histograms"]
    for item in entry["histograms"]:
        assert item["weight"]["range"] is not None
        assert item["input"]["range"] is None
        assert item["input"]["range_reason"] == "it stays float"


def test_ranges_of_each_input_are_called_that(on_onnx: Project):
    on_onnx.spec.update(passes=[{"pass": "quantize-dynamic"}], exports=[{"format": "onnx"}])
    on_onnx.spec["limits"] = {"metric-drop": None, "size-ratio": 3, "latency-ratio": 100}
    (entry,) = on_onnx.run().report["passes"]
    (item,) = entry["histograms"]
    assert item["weight"]["range_reason"] == "it stays codes while the model runs"
    assert item["input"]["range_reason"] == "it is determined for each input"


def test_layers_have_bytes_before_and_after(result: RunResult):
    fuse, static = result.report["passes"]
    before = {row["name"]: row["bytes_before"] for row in static["layers"]}
    assert before == {row["name"]: row["bytes_before"] for row in fuse["layers"]}
    assert 0 < sum(before.values()) <= result.report["baseline"]["bytes"]
    for row in static["layers"]:
        assert 0 < row["bytes"] < row["bytes_before"]
    assert sum(row["bytes"] for row in static["layers"]) <= static["bytes"]
    assert "bytes_before_reason" not in static["layers"][0]


def test_a_layer_that_the_float_model_does_not_have_says_so(on_onnx: Project):
    on_onnx.spec.update(
        passes=[{"pass": "low-rank", "rank": 1, "layers": [{"match": "conv*", "skip": True}]}],
        exports=[{"format": "onnx"}],
    )
    on_onnx.spec["limits"] = {"metric-drop": None, "size-ratio": 3, "latency-ratio": 100}
    (entry,) = on_onnx.run().report["passes"]
    rows = {row["name"]: row for row in entry["layers"]}
    assert rows["fc.down"]["bytes_before"] is None
    assert rows["fc.down"]["bytes_before_reason"] == "the float model has no such layer"
