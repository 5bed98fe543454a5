"""Channels removed and training, behind the widths of layers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.lab.tune import structure
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.recipe import REMEDIES, Recipe
from compressor.lab.tune.structure import with_qat
from compressor.lab.tune.uniform import Uniform
from compressor.lab.tune.workbench import Workbench
from compressor.run.evaluate import Evaluation
from tests.compressor.tiny_project import Project, sample_images

QUANTIZE = {"pass": "quantize-static", "activations": {"observer": "min-max"}}
LOOSE = ("--max-metric-drop", "60", "--rounds", "2")


def tuned(project: Project, *arguments: str) -> Result:
    return CliRunner().invoke(application, ["tune", str(project.path), *arguments])


def found(project: Project) -> Any:
    return json.loads((project.folder / "tuned.json").read_text(encoding="utf-8"))


def prepared(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    # One answer for all samples would keep limits as loose as those here.
    monkeypatch.setattr(Evaluation, "constant_drop", lambda *_: None)
    monkeypatch.setitem(REMEDIES, "quantize-static", ())
    monkeypatch.setattr(Uniform, "stored", lambda *_: [])  # test_stored.py has it
    project.spec["passes"] = [dict(QUANTIZE)]
    np.savez(project.folder / "calib.npz", image=sample_images(2, 256))
    project.spec["data"]["calibration"]["samples"] = 64
    return project


@pytest.mark.slow
def test_channels_are_removed_on_top_of_the_widths(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    project = prepared(on_onnx, monkeypatch)
    result = tuned(project, *LOOSE)
    assert result.exit_code == 0, result.stderr
    document = found(project)
    (pruned,) = (p for p in document["points"] if p["name"].startswith("50% of the weights, "))
    larger = "80% of the weights by low rank, 4 bits: the file is not smaller"
    assert any(why.startswith(larger) for why in document["not_tried"])
    assert pruned["bytes"] < min(p["bytes"] for p in document["points"] if p is not pruned)
    assert document["chosen"] == pruned["name"]
    text = (project.folder / "tuned.yaml").read_text()
    assert text.index("pass: prune-structured") < text.index("pass: quantize-static")
    assert "2:4 weights: ort-cpu has no kernels for them" in document["not_tried"]
    assert "training (distill, qat): it was not asked for (--train)" in document["not_tried"]
    page = (project.folder / "tuned.html").read_text()
    assert pruned["name"] in page
    assert "compress run tuned.yaml" in page


def test_what_is_noisier_by_itself_than_a_smaller_recipe_is_not_quantized(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    project = prepared(on_onnx, monkeypatch)
    behind = Workbench.sqnr_behind
    asked = dict[str, float | None]()

    def noisy(bench: Workbench, name: str, entry: Any) -> float | None:
        asked[name] = behind(bench, name, entry)
        return -1.0

    monkeypatch.setattr(Workbench, "sqnr_behind", noisy)
    # Of the same bytes, so that one of them is smaller than what is planned.
    monkeypatch.setattr(Candidate, "bytes", 1)
    monkeypatch.setattr(structure, "_SMALLER", 1e9)
    tuned(project, *LOOSE)
    document = found(project)
    (share,) = (name for name in asked if name.endswith("% of the weights"))
    assert asked[share] is not None
    assert not any(share in p["name"] for p in document["points"])
    words = f"{share}, 8 bits: it alone is noisier than 8 bits, which is smaller"
    assert words in document["not_tried"]


@pytest.mark.slow
def test_a_spec_that_removes_weights_itself_keeps_its_structure(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    project = prepared(on_onnx, monkeypatch)
    removal = {"pass": "prune-structured", "target": {"parameters": 0.8}}
    project.spec["passes"].insert(0, removal)
    assert tuned(project, "--max-metric-drop", "60", "--rounds", "0").exit_code == 0
    assert "fewer channels: the spec removes weights itself" in found(project)["not_tried"]


def test_training_needs_a_module_and_data(
    on_onnx: Project, on_torch: Project, monkeypatch: pytest.MonkeyPatch
):
    for project, why in (
        (on_onnx, "needs a PyTorch module"),
        (on_torch, "has nothing to train on"),
    ):
        result = tuned(prepared(project, monkeypatch), *LOOSE, "--train")
        assert result.exit_code == 2
        assert why in result.stderr


def test_a_recipe_with_qat_keeps_widths_and_what_qat_knows():
    tuned = {
        "pass": "quantize-static",
        "weights": {"rounding": "reconstruct", "symmetric": True},
        "activations": {"observer": "auto", "bits": 8},
    }
    recipe = Recipe(({"pass": "equalize"}, {"pass": "fuse"}, tuned), 2)
    chosen = recipe.with_choice({"a": "4", "b": "8", "c": "8"})
    trained = with_qat(chosen, {"clip": 1.0}, {"alpha": 0.0})
    assert trained is not None
    before, entry = trained.value()
    assert before == {"pass": "equalize"}
    assert entry == {
        "pass": "qat",
        "clip": 1.0,
        "distill": {"alpha": 0.0},
        "weights": {"symmetric": True},
        "activations": {"bits": 8},
        "layers": [{"match": "a", "bits": 4}, {"match": "*", "bits": 8}],
    }
    weights = Recipe(({"pass": "quantize-weights"},), 0)
    assert with_qat(weights, {}, {}) is None


def test_rules_of_layers_hold_for_their_parts():
    recipe = Recipe(({"pass": "quantize-static"},), 0)
    mixed = recipe.with_choice({"a": "4", "b": "8", "b.c": "8"})
    parts = mixed.with_parts(("a", "b", "b.c"))
    assert parts is not None
    assert parts.layers == ({"match": "a*", "bits": 4}, {"match": "*", "bits": 8})
    assert (
        recipe.with_choice({"b": "4", "a": "8", "b.c": "8"}).with_parts(("a", "b", "b.c")) is None
    )
    assert recipe.with_parts(("a",)) == recipe


@pytest.mark.slow
def test_with_training_data_candidates_are_trained(
    on_torch: Project, monkeypatch: pytest.MonkeyPatch
):
    project = prepared(on_torch, monkeypatch)
    project.spec["data"]["training"] = {
        **project.spec["data"]["evaluation"],
        "npz": "test.npz",
    }
    result = tuned(project, *LOOSE, "--train")
    assert result.exit_code == 0, result.stderr
    names = [p["name"] for p in found(project)["points"]]
    assert any("distill" in name for name in names)
    again = CliRunner().invoke(application, ["run", str(project.folder / "tuned.yaml")])
    assert again.exit_code == 0, again.stderr
