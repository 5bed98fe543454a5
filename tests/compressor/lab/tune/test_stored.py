"""Weights that are stored in 8 bits and computed with as floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compressor.lab.tune import remedies, structure
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.options import FLOAT, HALF, STORED
from compressor.lab.tune.recipe import REMEDIES, Recipe, Remedy, with_recipe
from compressor.lab.tune.workbench import Workbench
from compressor.report.run import run_spec
from compressor.spec.load import load_spec
from tests.compressor.lab.tune.test_tune import found, tuned
from tests.compressor.tiny_project import Project, sample_images

QUANTIZE = {"pass": "quantize-static", "activations": {"observer": "min-max"}}


@pytest.fixture
def project(on_onnx: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setitem(REMEDIES, "quantize-static", ())
    monkeypatch.setattr(structure, "_SHARES", ())
    on_onnx.spec["passes"] = [{"pass": "fuse"}, dict(QUANTIZE)]
    np.savez(on_onnx.folder / "calib.npz", image=sample_images(2, 256))
    on_onnx.spec["data"]["calibration"]["samples"] = 64
    return on_onnx


def stored(choice: dict[str, str], **entry: Any) -> list[dict[str, Any]]:
    return Recipe(({**QUANTIZE, **entry},), 0).with_choice(choice).value()


def test_what_is_stored_comes_behind_what_is_tuned():
    static, weights = stored({"a": "8", "b": STORED, "c": FLOAT})
    skipped = [rule["match"] for rule in static["layers"] if rule.get("skip")]
    assert set(skipped) == {"*"} or set(skipped) == {"b", "c"}
    assert weights == {
        "pass": "quantize-weights",
        "bits": 8,
        "layers": [{"match": "c", "skip": True}],
    }
    assert stored({"a": STORED, "b": STORED}) == [{"pass": "quantize-weights", "bits": 8}]
    assert [entry["pass"] for entry in stored({"a": "8", "b": FLOAT})] == ["quantize-static"]


def test_what_the_user_ruled_is_not_stored():
    own = [{"match": "a", "bits": 4}, {"match": "b", "skip": True}]
    static, weights = stored({"c": STORED}, layers=own)
    assert static["layers"] == [*own, {"match": "*", "skip": True}]
    assert [rule["match"] for rule in weights["layers"]] == ["a", "b"]


def test_layers_that_low_rank_parts_keep_their_option():
    recipe = Recipe((dict(QUANTIZE),), 0).with_choice({"a": STORED, "b": FLOAT, "c": "8"})
    parts = recipe.with_parts(["a", "b", "c"])
    assert parts is not None
    assert parts.kept == ({"match": "b*", "skip": True},)
    assert recipe.with_parts(["a", "b", "bc", "c"]) is None


@pytest.mark.slow
def test_it_is_a_candidate_of_less_noise_for_the_bytes_of_8_bits(project: Project):
    result = tuned(project, "--max-size-ratio", "0.56", "--rounds", "0")
    assert result.exit_code == 0, result.stderr
    points = {p["name"]: p for p in found(project)["points"]}
    whole, weights = points["8 bits"], points["stored in 8 bits"]
    assert weights["sqnr_db"] > whole["sqnr_db"] + 1
    assert weights["bytes"] <= 1.05 * whole["bytes"]
    tuned(project, "--max-metric-drop", "30", "--rounds", "0", "--minimize", "latency")
    assert "stored in 8 bits" not in {p["name"] for p in found(project)["points"]}


@pytest.mark.slow
def test_what_is_stored_comes_before_integers_only_where_these_keep_the_limit_barely(
    project: Project,
):
    """Floats of most layers came before them: of a ResNet-20, twice the bytes of 8 bits."""
    tuned(project, "--max-metric-drop", "90", "--rounds", "0")
    result = found(project)
    assert "stored in 8 bits" not in {p["name"] for p in result["points"]}
    words = "layers stored in 8 bits: 8 bits keep the limit, and compute with integers"
    assert words in result["not_tried"]
    (bound,) = (p["bound"] for p in result["points"] if p["name"] == "8 bits")
    tuned(project, "--max-metric-drop", str(1.2 * bound), "--rounds", "2")
    points = {p["name"]: p for p in found(project)["points"]}
    stored = points.pop("stored in 8 bits")
    assert stored["sqnr_db"] > points["8 bits"]["sqnr_db"]
    assert stored["drop"] is not None  # it is the first that is proved
    assert not any("stored" in name for name in points)  # no single layer is


def test_where_integers_take_too_long_weights_are_stored_and_floats_are_tried(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    """No artifact was found, and the nearest was said to take 1.34 of the time."""

    def timed(_: Workbench, candidate: Candidate) -> Any:
        (option,) = set(candidate.choice.values())
        ratio = {STORED: 0.9, HALF: 0.8}.get(option, 1.4)
        candidate.latency = {"value": ratio, "ci95": [ratio, ratio]}
        return candidate.latency

    monkeypatch.setattr(Workbench, "timed", timed)
    limits = ("--max-metric-drop", "90", "--rounds", "0", "--max-latency-ratio")
    tuned(project, *limits, "1")
    result = found(project)
    assert result["chosen"] == "stored in 8 bits"
    tuned(project, *limits, "0.2")
    assert "the nearest: float16, fused: " in found(project)["reason"]
    assert "0.8 of the time" in found(project)["reason"]


@pytest.mark.slow
def test_the_tuned_spec_gives_the_bytes_that_were_proved(project: Project):
    result = tuned(project, "--max-size-ratio", "0.56", "--rounds", "0")
    assert result.exit_code == 0, result.stderr
    text = (project.folder / "tuned.yaml").read_text()
    assert "quantize-weights" in text
    output = project.folder / "out" / "tiny-tuned"
    proved = (output / "model.onnx").read_bytes()
    run_spec(load_spec(project.folder / "tuned.yaml", []))
    assert (output / "model.onnx").read_bytes() == proved


def test_one_file_holds_integers_stored_codes_and_floats(project: Project):
    spec = load_spec(project.path, [])
    recipe = Recipe(({"pass": "fuse"}, dict(QUANTIZE)), 1)
    mixed = recipe.with_choice({"conv1": "8", "conv2": STORED, "fc": FLOAT})
    report = run_spec(with_recipe(spec, mixed)).report
    assert report["verdict"] != "failed"


def test_stored_weights_follow_where_integers_break_the_limit_against_the_search(
    project: Project,
):
    """Of a detector of anomalies there was no answer: calibration data held none of them."""
    project.spec["metric"] = "mse"
    del project.spec["data"]["evaluation"]["target"]
    np.savez(project.folder / "test.npz", image=40 * sample_images(3, 64))
    result = tuned(project, "--max-metric-drop", "0.3", "--rounds", "0")
    answer = found(project)
    points = {p["name"]: p for p in answer["points"]}
    assert points["8 bits"]["bound"] < 0.3 < points["8 bits"]["drop"]
    assert result.exit_code == 0, result.stderr
    assert answer["chosen"] == "stored in 8 bits"
    assert answer["verdict"] == "unknown"  # it was looked at since something else had failed
    assert not [line for line in answer["not_tried"] if "stored" in line]


def test_wider_ranges_are_looked_at_before_stored_weights(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Narrow weights hid what an observer does, and 8 bits were not tried with another one."""
    wider = Remedy("observer extreme-value", {"activations": {"observer": "extreme-value"}})
    monkeypatch.setitem(REMEDIES, "quantize-static", (replace(wider, widens=True),))
    monkeypatch.setattr(remedies, "_WORTHWHILE_DB", 99.0)
    project.spec["metric"] = "mse"
    del project.spec["data"]["evaluation"]["target"]
    np.savez(project.folder / "test.npz", image=1.5 * sample_images(3, 64))
    result = tuned(project, "--max-metric-drop", "0.001", "--rounds", "0")
    answer = found(project)
    points = {p["name"]: p for p in answer["points"]}
    assert points["8 bits"]["bound"] < 0.001 < points["8 bits"]["drop"]
    assert result.exit_code == 0, result.stderr
    assert answer["chosen"] == "8 bits, observer extreme-value"
    assert answer["verdict"] == "unknown"
    assert "stored in 8 bits" not in points
