"""``compress tune`` on whole specs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.lab.tune import structure
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.opened import opened_bench
from compressor.lab.tune.recipe import REMEDIES, Recipe, Remedy
from compressor.lab.tune.uniform import Uniform
from compressor.lab.tune.workbench import Workbench
from compressor.passes.quantize.static import placement
from compressor.passes.quantize.static.latency_facts import VNNI, Rates
from compressor.progress import Silent
from compressor.run.evaluate import Evaluation
from compressor.run.verdicts.statistics import Difference
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import Project, sample_images

QUANTIZE = {"pass": "quantize-static", "activations": {"observer": "min-max"}}
LOOSE = ("--max-metric-drop", "30")


def tuned(project: Project, *arguments: str) -> Result:
    return CliRunner().invoke(application, ["tune", str(project.path), *arguments])


def found(project: Project) -> Any:
    return json.loads((project.folder / "tuned.json").read_text(encoding="utf-8"))


@pytest.fixture
def project(on_onnx: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Most of the calibration source is there to search on; one remedy is tried."""
    # One answer for all samples would keep limits as loose as those here.
    monkeypatch.setattr(Evaluation, "constant_drop", lambda *_: None)
    monkeypatch.setattr(Uniform, "stored", lambda *_: [])  # test_stored.py has it
    monkeypatch.setitem(REMEDIES, "quantize-static", REMEDIES["quantize-static"][:1])
    monkeypatch.setattr(structure, "_SHARES", ())  # test_structure.py has them
    on_onnx.spec["passes"] = [dict(QUANTIZE)]
    np.savez(on_onnx.folder / "calib.npz", image=sample_images(2, 256))
    on_onnx.spec["data"]["calibration"]["samples"] = 64
    return on_onnx


def test_the_tuned_spec_is_plain_and_gives_the_bytes_that_were_proved(project: Project):
    result = tuned(project, *LOOSE)
    assert result.exit_code == 0, result.stderr
    document = found(project)
    point = next(p for p in document["points"] if p["name"] == document["chosen"])
    assert (point["verdict"], document["verdict"]) == ("passed", "passed")
    assert point["ci95"][1] <= 30
    assert point["size_ratio"] < 1
    output = project.folder / "out" / "tiny-tuned"
    proved = (output / "model.onnx").read_bytes()
    assert len(proved) == point["bytes"]
    again = CliRunner().invoke(application, ["run", str(project.folder / "tuned.yaml")])
    assert again.exit_code == 0, again.stderr
    assert (output / "model.onnx").read_bytes() == proved
    entry = json.loads((output / "report.json").read_text())["artifacts"][0]
    assert entry["metric_drop"] == pytest.approx(point["drop"])
    assert "proved to lose at most 30.00 points" in result.stdout
    assert (project.folder / "tuned.md").read_text().startswith("tiny: ")


def test_a_search_that_was_stopped_goes_on_and_the_best_so_far_is_there(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    prove = Workbench.proved

    def stopped(bench: Workbench, candidate: Candidate) -> Difference:
        if bench.evaluations:
            raise KeyboardInterrupt
        return prove(bench, candidate)

    with monkeypatch.context() as patch:
        patch.setattr(Workbench, "proved", stopped)
        assert tuned(project, *LOOSE).exit_code == 130
    spec = project.folder / "tuned.yaml"
    first = spec.read_text()
    assert (project.folder / "out" / "tiny-tuned" / "model.onnx").is_file()
    assert tuned(project, *LOOSE).exit_code == 0
    resumed = spec.read_text()
    assert resumed != first  # a smaller one was proved since
    document = found(project)
    assert tuned(project, *LOOSE, "-o", str(project.folder / "other.yaml")).exit_code == 0
    assert (project.folder / "other.yaml").read_text() == resumed.replace("-tuned", "-other")
    both = [project.folder / "out" / f"tiny-{name}" / "model.onnx" for name in ("tuned", "other")]
    assert both[0].read_bytes() == both[1].read_bytes()
    assert json.loads((project.folder / "other.json").read_text()) == document


@pytest.mark.slow
def test_what_trains_is_tried_on_two_candidates_at_most(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    remedy = Remedy("training", {"weights": {"rounding": "gptq"}}, trains=True, below=8)
    monkeypatch.setitem(REMEDIES, "quantize-static", (remedy,))
    project.spec["passes"] = [{**QUANTIZE, "weights": {"rounding": "nearest"}}]
    made, make = dict[str, bool](), Workbench.candidate

    def noted(bench: Workbench, name: str, recipe: Recipe, choice: Any) -> Candidate:
        made[name] = recipe.has(remedy)
        return make(bench, name, recipe, choice)

    monkeypatch.setattr(Workbench, "candidate", noted)
    tuned(project, "--max-metric-drop", "1", "--rounds", "2")
    assert not any(made.values())
    lost = "4 bits, training: it may lose more than training wins back"
    assert lost in found(project)["not_tried"]
    assert "float16, as it is" in made  # what nothing else may keep the limit without
    assert any("more samples could prove " in line for line in found(project)["path"])
    tuned(project, "--max-metric-drop", "5", "--rounds", "2")
    assert made["4 bits, training"]
    trained = [name for name, trains in made.items() if trains]
    assert len(trained) <= 2
    assert all(name.endswith(", training") for name in trained)


def test_what_is_narrow_enough_for_a_remedy():
    remedy = Remedy("training", {}, below=8)
    recipe = Recipe(({"pass": "quantize-static"},), 0)
    assert recipe.feels(Remedy("any", {}), {"a": "8"})
    assert recipe.feels(remedy, {"a": "8", "b": "4"})
    assert not recipe.feels(remedy, {"a": "8", "b": "float"})
    few = {"pass": "quantize-static", "activations": {"bits": 4}}
    assert Recipe((few,), 0).feels(remedy, {"a": "8"})
    ruled = {"pass": "quantize-static", "layers": [{"match": "b", "bits": 4}]}
    assert Recipe((ruled,), 0).feels(remedy, {"a": "8"})


def test_what_cannot_be_reached_is_an_answer_with_the_nearest(project: Project):
    result = tuned(project, *LOOSE, "--max-size-ratio", "0.05", "--rounds", "1")
    assert result.exit_code == 1
    assert "no artifact was found that loses at most 30.00 points and takes at most 0.05" in (
        result.stdout
    )
    nearest = result.stdout.partition("the nearest: ")[2]
    assert "of the bytes" in nearest.splitlines()[0]
    kept = [p for p in found(project)["points"] if p["bound"] <= 30]
    least = min(p["bytes"] for p in kept)
    assert any(p["ci95"] is not None for p in kept if p["bytes"] == least)
    assert found(project)["chosen"] is None
    assert not (project.folder / "tuned.yaml").exists()


@pytest.mark.slow
def test_what_few_samples_cannot_prove_is_an_answer_that_is_called_so(project: Project):
    with np.load(project.folder / "test.npz") as data:
        few = {name: array[:24] for name, array in data.items()}
    np.savez(project.folder / "test.npz", **few)  # type: ignore[arg-type]
    strict = ("--max-metric-drop", "5", "--rounds", "1", "--strict")
    result = tuned(project, *strict)
    assert result.exit_code == 1, result.stdout
    document = found(project)
    assert document["verdict"] == "unknown"
    point = next(p for p in document["points"] if p["name"] == document["chosen"])
    assert point["verdict"] == "unknown"
    assert point["drop"] <= 5 < point["ci95"][1]
    assert "as measured, but is not proved to lose at most 5.00 points" in result.stdout
    assert any("more samples could prove " in line for line in document["path"])
    judged = [p for p in document["points"] if p["verdict"] is not None]
    assert point["bytes"] == min(p["bytes"] for p in judged if p["drop"] <= 5)
    again = tuned(project, *strict[:-1])
    assert again.exit_code == 0
    assert (project.folder / "out" / "tiny-tuned" / "model.onnx").stat().st_size == point["bytes"]
    run = CliRunner().invoke(application, ["run", str(project.folder / "tuned.yaml")])
    assert run.exit_code == 0
    assert "unknown" in run.output.lower()


def test_what_computes_as_the_float_model_does_is_proved_by_few_samples(project: Project):
    with np.load(project.folder / "test.npz") as data:
        few = {name: array[:24] for name, array in data.items()}
    np.savez(project.folder / "test.npz", **few)  # type: ignore[arg-type]
    project.spec["passes"] = [{"pass": "fuse"}, dict(QUANTIZE)]
    tuned(project, "--max-metric-drop", "0.5", "--minimize", "latency", "--rounds", "0")
    document = found(project)
    judged = {p["name"]: p for p in document["points"] if p["verdict"] is not None}
    assert judged["float, fused"]["verdict"] == "passed"
    assert judged["float, fused"]["ci95"][1] > 0.5
    assert document["verdict"] == "passed"


@pytest.mark.slow
def test_a_size_alone_is_kept_at_the_least_loss(project: Project):
    result = tuned(project, "--max-size-ratio", "0.98", "--rounds", "1")
    assert result.exit_code == 0, result.stderr
    document = found(project)
    point = next(p for p in document["points"] if p["name"] == document["chosen"])
    assert point["size_ratio"] <= 0.98
    assert point["verdict"] is None
    assert point["drop"] is not None


@pytest.mark.parametrize(
    ("own", "asked", "kept"), [(None, 0.3, 0.3), (0.9, 0.3, 0.3), (0.9, None, 0.9)]
)
def test_a_size_that_is_asked_for_holds_beside_the_limits_of_the_spec(
    project: Project, own: float | None, asked: float | None, kept: float
):
    """With ``--minimize latency`` the size of the spec took its place, or none."""
    project.spec["limits"] = {"metric-drop": 5.0, **({} if own is None else {"size-ratio": own})}
    goal = Goal(size_ratio=asked, minimize="latency")
    _, whole = opened_bench(load_spec(project.path), goal, Silent())
    assert (whole.metric_drop, whole.size_ratio) == (5.0, kept)


@pytest.mark.slow
def test_a_rule_of_the_users_own_stays(project: Project):
    project.spec["passes"][0]["layers"] = [{"match": "fc", "skip": True}]
    assert tuned(project, *LOOSE, "--rounds", "0").exit_code == 0
    text = (project.folder / "tuned.yaml").read_text()
    assert text.index("match: fc") < text.index("match: '*'")


@pytest.mark.slow
def test_few_calibration_data_are_parted(project: Project):
    project.spec["data"]["calibration"] = {
        "npz": "calib.npz",
        "inputs": {"image": "image"},
        "samples": 192,
        "batch": 16,
    }
    assert tuned(project, *LOOSE, "--rounds", "0").exit_code == 0
    assert found(project)["search"].startswith("the last 48 of 192 calibration samples")
    assert "samples: 144" in (project.folder / "tuned.yaml").read_text()


@pytest.mark.slow
def test_search_data_of_the_spec_are_used_and_no_result_depends_on_them(project: Project):
    project.spec["data"]["search"] = {
        "npz": "test.npz",
        "inputs": {"image": "image"},
        "target": "label",
        "batch": 16,
    }
    assert tuned(project, *LOOSE, "--rounds", "0").exit_code == 0
    assert found(project)["search"] == "data.search"
    assert "search" not in (project.folder / "tuned.yaml").read_text()


@pytest.mark.slow
def test_the_fastest_is_found_with_floats_among_the_candidates(project: Project):
    project.spec["passes"] = [{"pass": "fuse"}, dict(QUANTIZE)]
    result = tuned(project, *LOOSE, "--minimize", "latency")
    assert result.exit_code == 0, result.stderr
    document = found(project)
    points = {p["name"]: p for p in document["points"]}
    assert "float, fused" in points
    timed = {n: p["latency_ratio"] for n, p in points.items() if p["latency_ratio"] is not None}
    proved = {n for n, p in points.items() if p["verdict"] == "passed"}
    assert len(timed) > 1
    assert timed[document["chosen"]] == min(timed[n] for n in proved)
    again = CliRunner().invoke(application, ["run", str(project.folder / "tuned.yaml")])
    assert again.exit_code == 0, again.stderr


@pytest.mark.slow
def test_a_layer_without_a_time_of_its_own_takes_the_same_in_floats(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    """Those of an LSTM have none, and the search ended with an internal error."""
    entries = Workbench.float_entries
    monkeypatch.setattr(
        Workbench, "float_entries", lambda *given: dict([*entries(*given).items()][1:])
    )
    result = tuned(project, *LOOSE, "--minimize", "latency", "--rounds", "1")
    assert result.exit_code == 0, result.stderr
    assert any(p["name"].startswith("float") for p in found(project)["points"])


@pytest.mark.parametrize("faster", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_the_pass_leaves_in_floats_is_a_candidate(
    project: Project, monkeypatch: pytest.MonkeyPatch, faster: bool
):
    """A rule for all layers bound them, and a detector's 8 bits took 1.1 of the fused floats."""
    slow = [name for name in VNNI.rates if name.startswith("integer") is faster]
    rates = {**VNNI.rates, **dict.fromkeys(slow, Rates(call=1e9, mac=1.0))}
    profile = replace(placement.ORT_CPU, latencies=(replace(VNNI, rates=rates),))
    monkeypatch.setitem(placement.PROFILES, "ort-cpu", profile)  # type: ignore[arg-type]
    project.spec["exports"] = [{"format": "onnx", "target": "ort-cpu"}]
    result = tuned(project, *LOOSE, "--minimize", "latency", "--rounds", "0")
    assert result.exit_code == 0, result.stderr
    points = {p["name"]: p for p in found(project)["points"]}
    name = "8 bits, floats where faster"
    assert (name in points) is faster
    if faster:
        assert points[name]["sqnr_db"] > points["8 bits"]["sqnr_db"]
        assert "skip" not in (project.folder / "tuned.yaml").read_text()


@pytest.mark.slow
def test_no_time_at_all_is_an_answer(project: Project):
    result = tuned(project, *LOOSE, "--max-latency-ratio", "0.001", "--rounds", "0")
    assert result.exit_code == 1
    assert "takes at most 0.001 of the time" in result.stdout
    assert "of the bytes and" in result.stdout.partition("the nearest: ")[2]


@pytest.mark.slow
def test_a_model_of_one_layer_and_one_where_nothing_helps(project: Project):
    # Of one layer, and with no width that makes the file smaller, 8 bits are all there is.
    project.spec["passes"][0]["layers"] = [{"match": "conv*", "skip": True}]
    assert tuned(project, *LOOSE).exit_code in (0, 1)
    document = found(project)
    assert document["points"]
    assert document["evaluations"] <= 3


def wrong(project: Project, *arguments: str) -> str:
    result = tuned(project, *arguments)
    assert result.exit_code == 2
    return result.stderr


def test_what_cannot_be_tuned_says_so(project: Project, tmp_path: Path):
    elsewhere = str(tmp_path / "elsewhere.yaml")
    assert "from which the spec's paths start" in wrong(project, "-o", elsewhere)
    evaluation = project.spec["data"]["evaluation"]
    target = evaluation.pop("target")
    project.spec["metric"] = "cosine"
    assert "the default for cosine is a share of what the float model will have" in wrong(project)
    far = wrong(project, "--max-metric-drop", "500")
    assert "option --max-metric-drop: is 500, and cosine can lose 2 at most" in far
    del project.spec["metric"]
    evaluation["target"] = target
    project.spec["passes"] = [{"pass": "fuse"}]
    assert "have none to tune (fuse)" in wrong(project, *LOOSE)
    project.spec["passes"] = [dict(QUANTIZE)]
    ruled = {**QUANTIZE, "layers": [{"match": "*", "bits": 4}]}
    project.spec["passes"] = [ruled]
    assert "rules of the spec decide about all layers" in wrong(project, *LOOSE)
    project.spec["passes"] = [dict(QUANTIZE)]
    project.spec["data"]["search"] = dict(evaluation)
    shared = "data.search: reads samples of data.evaluation, on which the answer is proved"
    assert shared in wrong(project, *LOOSE)
    project.spec["data"].pop("search")
    del project.spec["data"]["evaluation"]
    assert "tune proves its answer on it" in wrong(project, *LOOSE)
