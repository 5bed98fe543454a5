"""Layers that are left alone are stored in float16 where the size counts."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.lab.tune import structure
from compressor.lab.tune.options import FLOAT, HALF, STORED
from compressor.lab.tune.recipe import Recipe
from compressor.report.run import run_spec
from compressor.spec.load import load_spec
from tests.compressor.lab.tune.test_stored import QUANTIZE, project  # noqa: F401  # a fixture
from tests.compressor.lab.tune.test_tune import found, tuned
from tests.compressor.tiny_project import Project

HALVE = {"pass": "cast", "weights-only": True}


def halved(choice: dict[str, str], **entry: Any) -> list[dict[str, Any]]:
    return Recipe(({**QUANTIZE, **entry},), 0).with_choice(choice).value()


def test_what_is_halved_comes_behind_all_others():
    static, weights, half = halved({"a": "8", "b": STORED, "c": HALF})
    assert static["pass"] == "quantize-static"
    assert weights["layers"] == [{"match": "c", "skip": True}]
    assert half == HALVE
    assert halved({"a": HALF, "b": HALF}) == [HALVE]
    assert "cast" not in [entry["pass"] for entry in halved({"a": "8", "b": FLOAT})]


def test_what_the_user_ruled_is_not_halved():
    own = [{"match": "a", "bits": 4}, {"match": "b", "skip": True}]
    *_, half = halved({"c": HALF}, layers=own)
    assert half["layers"] == [{"match": "a", "skip": True}, {"match": "b", "skip": True}]


def test_parts_of_layers_are_left_alone_as_those_were():
    own = [{"match": "b", "skip": True}]
    recipe = Recipe(({**QUANTIZE, "layers": own},), 0).with_choice({"a": "8", "c": HALF})
    parts = recipe.with_parts(["a", "b", "c"])
    assert parts is not None
    assert parts.unhalved == ({"match": "b*", "skip": True},)
    assert recipe.is_like(recipe.with_choice({"a": HALF, "c": "8"}))
    assert recipe.without_rules("8") == Recipe(({**QUANTIZE, "layers": own, **WIDE},), 0)


WIDE = {"weights": {"bits": 8}}


def test_half_of_the_bytes_lose_less_than_8_bits_of_them(
    project: Project,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """Floats of 16 bits were not tried: the answer was 8 bits and some floats."""
    monkeypatch.setattr(structure, "_SHARES", ())
    result = tuned(project, "--max-size-ratio", "0.75", "--rounds", "1")
    assert result.exit_code == 0, result.stderr
    answer = found(project)
    assert answer["chosen"] == "round 1: all layers float16"
    (point,) = (p for p in answer["points"] if p["name"] == answer["chosen"])
    assert point["sqnr_db"] > 60
    output = project.folder / "out" / "tiny-tuned"
    proved = (output / "model.onnx").read_bytes()
    run_spec(load_spec(project.folder / "tuned.yaml", []))
    assert (output / "model.onnx").read_bytes() == proved


def test_where_nothing_of_8_bits_keeps_the_limit_float16_is_the_answer(
    project: Project,  # noqa: F811
):
    project.spec["metric"] = "mse"
    del project.spec["data"]["evaluation"]["target"]
    result = tuned(project, "--max-metric-drop", "1e-7", "--rounds", "0")
    assert result.exit_code == 0, result.stderr
    assert found(project)["chosen"] == "float16, fused"


def test_what_casts_itself_and_what_is_to_be_fast_stays_float(project: Project):  # noqa: F811
    tuned(project, "--max-metric-drop", "90", "--rounds", "0", "--minimize", "latency")
    assert "float, fused" in {p["name"] for p in found(project)["points"]}
    project.spec["passes"].append({"pass": "cast", "weights-only": True})
    tuned(project, "--max-size-ratio", "0.75", "--rounds", "1")
    assert not any("float16" in p["name"] for p in found(project)["points"])
