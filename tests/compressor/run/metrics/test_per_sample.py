"""What a run keeps for comparisons: results of single samples, and what they hold for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.files import file_sha256
from tests.compressor.tiny_project import Project

NUDGE = {"pass": "nudge", "factor": 0.5}
BOTH = [{"format": "safetensors"}, {"format": "onnx"}]


def stored(folder: Path) -> dict[str, Any]:
    with np.load(folder / "samples.npz", allow_pickle=False) as samples:
        return {name: samples[name] for name in samples.files}


def test_each_model_has_its_results(on_onnx: Project):
    on_onnx.spec.update(passes=[NUDGE], exports=BOTH)
    report = on_onnx.run().report
    samples = stored(on_onnx.output)
    assert set(samples) == {"float", "model.safetensors", "model.onnx"}
    for entry in report["artifacts"]:
        right = samples[entry["path"]]
        assert right.dtype == bool
        assert 100 * right.mean() == pytest.approx(entry["metric"]["value"])
    assert report["per_sample"] == {"file": "samples.npz", "factor": 100.0, "exponential": False}
    manifest = json.loads((on_onnx.output / "manifest.json").read_text())
    written = {entry["name"]: entry["sha256"] for entry in manifest["outputs"]}
    assert written["samples.npz"] == file_sha256(on_onnx.output / "samples.npz")


def test_other_metrics_are_kept_as_they_are(on_onnx: Project):
    on_onnx.spec.update(passes=[NUDGE], metric="perplexity")
    report = on_onnx.run().report
    samples = stored(on_onnx.output)["model.onnx"]
    assert samples.dtype == np.float64
    assert np.exp(samples.mean()) == pytest.approx(report["artifacts"][0]["metric"]["value"])
    assert report["per_sample"]["exponential"]


def test_the_same_run_gives_the_same_bytes(on_onnx: Project):
    on_onnx.run()
    first = (on_onnx.output / "samples.npz").read_bytes()
    on_onnx.run(fresh=True)
    assert (on_onnx.output / "samples.npz").read_bytes() == first


def test_without_a_metric_there_is_no_file(on_onnx: Project):
    on_onnx.run()
    assert (on_onnx.output / "samples.npz").is_file()
    del on_onnx.spec["data"]["evaluation"]
    report = on_onnx.run().report
    assert not (on_onnx.output / "samples.npz").exists()
    assert report["per_sample"] is None
    assert report["identity"]["data"] is None


def test_identity_follows_what_results_hold_for(on_onnx: Project):
    def identity() -> dict[str, Any]:
        found: dict[str, Any] = on_onnx.run().report["identity"]
        return found

    first = identity()
    on_onnx.spec["output"] = "elsewhere"
    assert identity() == first
    on_onnx.spec["passes"] = [NUDGE]
    second = identity()
    assert second == {**first, "spec": second["spec"]}
    assert second["spec"] != first["spec"]
    on_onnx.spec["data"]["evaluation"]["samples"] = 16
    third = identity()
    assert third["data"] != first["data"]
    assert third["model"] == first["model"]
