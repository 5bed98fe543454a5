"""A candidate's latency over the base's, from what two runs measured beside the float model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compressor.errors import SpecError
from compressor.lab.compare import compare
from compressor.lab.compare.compare import CompareOptions, compare_runs
from compressor.run.artifact_file import Machinery
from compressor.run.timing.timing import Latencies
from tests.compressor.lab.compare.made_runs import made_run, results

STORED = CompareOptions(timing=False)
RATIO = "artifacts/0/latency/0/ratio"


def runs(folder: Path, base: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[Path, Path]:
    return (
        made_run(folder / "a", results(5), changes=base),
        made_run(folder / "b", results(5), changes=candidate),
    )


def ratio(value: float, low: float, high: float) -> dict[str, Any]:
    return {RATIO: {"value": value, "ci95": [low, high]}}


def test_relative_errors_of_two_ratios_add_in_squares(tmp_path: Path) -> None:
    """Each end has that of the candidate on its side, and that of the base on the other."""
    changes = ratio(0.5, 0.5 / 1.03, 0.5 * 1.06), ratio(0.8, 0.8 / 1.04, 0.8 * 1.08)
    found = compare_runs(*runs(tmp_path, *changes), STORED).latency
    assert found.value == pytest.approx(1.6)
    low, high = (math.log(end / 1.6) for end in found.ci95 or ())
    assert low == pytest.approx(-math.hypot(math.log(1.04), math.log(1.06)))
    assert high == pytest.approx(math.hypot(math.log(1.08), math.log(1.03)))


def test_who_is_compared_with_the_float_model_keeps_the_interval(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", results(5), changes=ratio(0.6, 0.55, 0.7))
    found = compare_runs(run, run, CompareOptions("model.onnx", "float", timing=False)).latency
    assert (found.value, found.ci95) == (pytest.approx(0.6), pytest.approx((0.55, 0.7)))
    assert found.p50 == (2.0, 1.0)
    assert found.source == "as their run timed both"


def test_the_smallest_batch_that_both_have_is_taken(tmp_path: Path) -> None:
    def rows(*batches: int) -> dict[str, Any]:
        made = {"value": 0.5, "ci95": [0.4, 0.6]}
        return {
            "artifacts/0/latency": [
                {"batch": b, "ratio": made, "artifact": {"p50": float(b)}} for b in batches
            ]
        }

    found = compare_runs(*runs(tmp_path, rows(1, 4, 8), rows(8, 4, 2)), STORED).latency
    assert (found.batch, found.p50, found.value) == (4, (4.0, 4.0), pytest.approx(1.0))
    found = compare_runs(*runs(tmp_path / "two", rows(1), rows(2)), STORED).latency
    assert (found.value, found.ci95, found.batch, found.p50) == (None, None, None, (None, None))
    assert found.source == "the two runs timed no common batch size"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment/cores": 64}, "the two runs were timed on different machines"),
        ({"environment/processor": "another"}, "the two runs were timed on different machines"),
        ({"environment/system": "another"}, "the two runs were timed on different machines"),
        (
            {"artifacts/0/deployed": False},
            "model.onnx is not judged by its latency: a storage format",
        ),
        (
            {"artifacts/0/deployed": False, "artifacts/0/latency_ratio_reason": "no device"},
            "model.onnx is not judged by its latency: no device",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_two_times_that_are_no_pair_are_shown_without_a_ratio(
    tmp_path: Path, changes: Mapping[str, Any], words: str, first: bool
) -> None:
    both = runs(tmp_path, *((changes, {}) if first else ({}, changes)))
    found = compare_runs(*both, STORED).latency
    assert (found.value, found.ci95, found.source) == (None, None, words)
    assert (found.batch, found.p50) == (1, (1.0, 1.0))


def test_two_float_models_have_no_ratio(tmp_path: Path) -> None:
    both = runs(tmp_path, {}, {"identity/model": "e" * 64})
    options = CompareOptions(timing=False, allowed=frozenset({"model"}))
    found = compare_runs(*both, options).latency
    assert (found.value, found.source) == (None, "the two runs have different float models")


def test_libraries_of_other_versions_are_noted(tmp_path: Path) -> None:
    versions = {"compressor": "0.1.0", "torch": "2.14.0", "onnx": "1.0"}
    both = runs(tmp_path, {}, {"environment/versions": versions})
    notes = compare_runs(*both, STORED).notes
    assert notes == ("torch: 2.13.0 in the base, 2.14.0 in the candidate",)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands for the two files that are timed: their declarations, and their times."""
    made = SimpleNamespace(cannot_run="", inputs="specs", branches=False, given=None, opened=[])

    def artifact(side: Any) -> Any:
        return SimpleNamespace(path=side.run.path, cannot_run=made.cannot_run)

    def declared(of: Any) -> Any:
        made.opened.append(of.path)
        return SimpleNamespace(branches=made.branches, inputs=made.inputs)

    def in_turn(sides: Any, machinery: Machinery, batch: Any) -> Latencies:
        assert machinery == Machinery()
        made.given = list(sides), batch
        ones = np.ones((2, 7, 1, 5))
        return Latencies(3, {"base": [ones * 2e-3] * 7, "candidate": [ones * 3e-3] * 7})

    monkeypatch.setattr(compare, "_artifact", artifact)
    monkeypatch.setattr(compare, "declared", declared)
    monkeypatch.setattr(compare, "agreed", lambda inputs: set(inputs.values()))
    monkeypatch.setattr(compare, "fixed_shapes", lambda specs, sizes: [*specs, dict(sizes)])
    monkeypatch.setattr(compare, "batch_sizes", lambda specs, sizes: [3, 5, *specs, *sizes])
    monkeypatch.setattr(compare, "random_inputs", lambda specs, size: (*specs, size))
    monkeypatch.setattr(compare, "in_turn", in_turn)
    return made


def test_both_are_run_in_turn_where_they_can_be(tmp_path: Path, here: Any) -> None:
    both = runs(tmp_path, {}, {})
    found = compare_runs(*both, CompareOptions()).latency
    assert here.opened == [str(run) for run in both]
    assert (found.value, found.ci95) == (pytest.approx(1.5), pytest.approx((1.5, 1.5)))
    assert (found.batch, found.p50) == (3, pytest.approx((2.0, 3.0)))
    assert found.source == "both run in turn here, on random inputs"
    assert here.given == (["base", "candidate"], ("specs", {}, 3))  # what both take, one batch


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cannot_run": "no such runtime"}, "no such runtime"),
        ({"branches": True}, "their times depend on what is in the inputs"),
        ({"inputs": None}, "neither says what it takes"),
    ],
)
def test_what_cannot_be_run_here_has_the_stored_times(
    tmp_path: Path, here: Any, changes: Mapping[str, Any], why: str
) -> None:
    vars(here).update(changes)
    found = compare_runs(*runs(tmp_path, {}, ratio(0.6, 0.59, 0.61)), CompareOptions()).latency
    assert found.value == pytest.approx(1.2)
    assert found.source == (
        f"from two runs, each timed beside the float model (not timed beside each other: {why})"
    )


def test_inputs_that_do_not_agree_have_the_stored_times(
    tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(inputs: Any) -> Any:
        raise SpecError("input 'x'", "has two shapes", "give one")

    monkeypatch.setattr(compare, "agreed", refused)
    found = compare_runs(*runs(tmp_path, {}, {}), CompareOptions()).latency
    assert found.source.endswith("(not timed beside each other: input 'x' has two shapes)")


def test_the_float_model_and_files_that_are_gone_are_not_run(tmp_path: Path, here: Any) -> None:
    base, candidate = runs(tmp_path, {}, {})
    found = compare_runs(base, candidate, CompareOptions("model.onnx", "float")).latency
    assert found.source.endswith(": the float model is not an artifact of its run)")
    (candidate / "model.onnx").unlink()
    found = compare_runs(base, candidate, CompareOptions()).latency
    assert found.source.endswith(f": {candidate} has no model.onnx)")
    assert here.given is None


def test_what_is_not_judged_by_its_latency_is_not_run(tmp_path: Path, here: Any) -> None:
    both = runs(tmp_path, {"artifacts/0/deployed": False}, {})
    assert compare_runs(*both, CompareOptions()).latency.value is None
    assert here.given is None


def test_a_comparison_as_json_is_what_documents_say(tmp_path: Path) -> None:
    base, candidate = runs(tmp_path, {}, {"environment/versions/torch": "2.14.0"})
    found = compare_runs(base, candidate, STORED)
    side = {
        "run": str(base),
        "name": "made",
        "artifact": "model.onnx",
        "sha256": "d" * 64,
        "metric": found.base.metric,
        "bytes": 1_000_000,
        "latency_ms": {"batch": 1, "p50": 1.0, "p90": 2.2, "p99": 2.5},
    }
    assert found.difference is not None
    assert found.as_json() == {
        "schema": 1,
        "base": side,
        "candidate": {**side, "run": str(candidate)},
        "metric": found.difference.as_json(),
        "metric_reason": None,
        "size_ratio": 1.0,
        "latency": {
            "ratio": found.latency.value,
            "ci95": found.latency.ci95,
            "batch": 1,
            "p50": (1.0, 1.0),
            "source": "from two runs, each timed beside the float model",
        },
        "notes": ["torch: 2.13.0 in the base, 2.14.0 in the candidate"],
    }
    unmeasured = made_run(tmp_path / "c", None)
    written = compare_runs(unmeasured, unmeasured, STORED).as_json()
    assert written["metric"] is None
    assert written["metric_reason"] == "model.onnx: the spec has no data.evaluation"
