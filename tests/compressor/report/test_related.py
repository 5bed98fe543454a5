"""Which other runs belong to the trade-off plot, and which points are beaten."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.report.html import html_report
from compressor.report.past_runs import NONE, Point, Related, points, related_runs

Report = dict[str, Any]


def run_folder(parent: Path, name: str, report: object) -> Path:
    folder = parent / name
    folder.mkdir()
    text = report if isinstance(report, str) else json.dumps(report)
    (folder / "report.json").write_text(text, encoding="utf-8")
    return folder


def test_runs_of_the_same_model_data_and_metric_are_found(tmp_path: Path, passed_report: Report):
    own = run_folder(tmp_path, "own", passed_report)
    for name in ("b", "a"):
        run_folder(tmp_path, name, passed_report)
    for key in ("model", "data", "metric_code"):
        other = copy.deepcopy(passed_report)
        other["identity"][key] = "4e" * 32
        run_folder(tmp_path, key, other)
    renamed = copy.deepcopy(passed_report)
    renamed["baseline"]["metric"]["name"] = "top5"
    run_folder(tmp_path, "renamed", renamed)
    (tmp_path / "no run").mkdir()
    found = related_runs(own, passed_report)
    assert list(found.reports) == ["a", "b"]
    assert found.notes == ("Left out: 4 runs of another model, data or metric.",)


@pytest.mark.parametrize(
    "broken",
    ["{", "[]", "null", '{"identity": 3}', "{}", "\ud7ff", '{"a":' * 100_000],
    ids=["cut", "list", "null", "number", "empty", "no json", "deep"],
)
def test_a_broken_report_is_left_out_with_a_word(
    tmp_path: Path, passed_report: Report, broken: str
):
    own = run_folder(tmp_path, "own", passed_report)
    run_folder(tmp_path, "bad", broken)
    found = related_runs(own, passed_report)
    why = "its report.json is damaged, or of another version"
    assert found == Related({}, (f"Run 'bad' is left out: {why}.",))
    assert why in html_report(passed_report, found)


def test_a_report_without_what_the_plot_needs_is_left_out(tmp_path: Path, passed_report: Report):
    own = run_folder(tmp_path, "own", passed_report)
    odd = copy.deepcopy(passed_report)
    odd["artifacts"][1]["metric"]["ci95"] = [1.0]
    run_folder(tmp_path, "odd", odd)
    assert related_runs(own, passed_report).notes[0].startswith("Run 'odd' is left out")


def test_a_folder_in_place_of_a_report_is_left_out(tmp_path: Path, passed_report: Report):
    own = run_folder(tmp_path, "own", passed_report)
    (tmp_path / "odd" / "report.json").mkdir(parents=True)
    why = "its report.json cannot be read (Is a directory)"
    assert related_runs(own, passed_report).notes == (f"Run 'odd' is left out: {why}.",)


def test_without_a_metric_nothing_is_read(tmp_path: Path, blind_report: Report):
    own = run_folder(tmp_path, "own", blind_report)
    run_folder(tmp_path, "bad", "{")
    assert related_runs(own, blind_report) is NONE


def test_own_artifacts_come_first_and_storage_has_no_latency(passed_report: Report):
    found = points(passed_report, Related({"other": copy.deepcopy(passed_report)}))
    assert [(p.run, p.artifact, p.own) for p in found] == [
        ("resnet20-edge", "model.safetensors", True),
        ("resnet20-edge", "model.onnx", True),
        ("other", "model.safetensors", False),
        ("other", "model.onnx", False),
    ]
    assert [p.latency_ratio is None for p in found] == [True, False, True, False]
    # Equal points do not beat each other; the ONNX file is larger for the same accuracy.
    assert [p.beaten_in_size for p in found] == [False, True, False, True]
    assert not any(p.beaten_in_latency for p in found)


NUMBERS = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5])


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), st.booleans())
def test_a_point_is_beaten_by_what_is_as_good_in_both_and_better_in_one(
    pairs: list[tuple[float, float]], higher: bool
):
    found = points(made_report(pairs, higher), NONE)
    for own in found:
        beaten = any(beats(other, own, higher) for other in found)
        assert own.beaten_in_size == beaten
    assert not all(p.beaten_in_size for p in found)


def beats(other: Point, own: Point, higher: bool) -> bool:
    as_good = other.metric >= own.metric if higher else other.metric <= own.metric
    equal = (other.metric, other.size_ratio) == (own.metric, own.size_ratio)
    return as_good and other.size_ratio <= own.size_ratio and not equal


def made_report(pairs: list[tuple[float, float]], higher: bool) -> Report:
    artifacts = [
        {
            "path": f"{i}.onnx",
            "metric": {"value": metric, "ci95": [metric, metric]},
            "size_ratio": size,
            "latency_ratio": None,
            "checks": [],
        }
        for i, (size, metric) in enumerate(pairs)
    ]
    baseline = {"metric": {"higher_is_better": higher}}
    return {"name": "made", "artifacts": artifacts, "limits": [], "baseline": baseline}
