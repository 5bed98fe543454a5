"""``compress compare`` and ``compress gate``, on runs made by hand and on real ones."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.report.gate_files import SUMMARY
from tests.compressor.lab.compare.made_runs import made_run, results
from tests.compressor.tiny_project import Project

STATIC = {
    "pass": "quantize-static",
    "weights": {"bits": 4},
    "activations": {"observer": "min-max"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(SUMMARY, raising=False)
    made_run(tmp_path / "base", results(5))
    made_run(tmp_path / "worse", results(25))
    made_run(tmp_path / "noise", results(6))
    with chdir(tmp_path):
        yield tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(application, arguments)


def test_compare_shows_both_and_exits_with_0(here: Path) -> None:
    result = invoke("compare", "base", "worse", "--no-timing")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        "base/model.onnx",
        "worse/model.onnx",
        "change",
        "95",
        "%",
        "interval",
    ]
    assert lines[2].split()[:7] == ["accuracy", "99.50", "%", "97.50", "%", "−2.00", "points"]
    assert "McNemar's test, mid-p: 20 of 1,000 samples lost, 0 won" in result.stdout


@pytest.mark.parametrize("option", ["--junit", "--markdown", "--history"])
def test_a_folder_in_place_of_a_file_is_refused(here: Path, option: str) -> None:
    """It was named after the model was judged, as a temporary file, with exit code 3."""
    result = invoke("gate", "base", "noise", option, "worse")
    assert result.exit_code == 2
    assert f"invalid value for '{option}': File 'worse' is a directory" in result.stderr


def test_a_folder_in_place_of_the_summary_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUMMARY, "worse")
    result = invoke("gate", "base", "noise", "--junit", "j.xml")
    assert result.exit_code == 2
    assert f"error: {SUMMARY} 'worse': is a folder; name a file, or unset it" in result.stderr
    assert not Path("j.xml").exists()


def test_a_full_disk_says_nothing_of_passes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run none said that those which were finished are kept."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    result = invoke("gate", "base", "noise", "--junit", "j.xml")
    assert result.exit_code == 3
    assert result.stderr.endswith("; free some space and run the same command again\n")


def test_gate_exit_codes(here: Path) -> None:
    assert invoke("gate", "base", "worse").exit_code == 1
    assert invoke("gate", "base", "noise").exit_code == 0
    assert invoke("gate", "base", "worse", "--max-metric-drop", "3").exit_code == 0
    assert invoke("gate", "base", "noise", "--max-metric-drop", "0.2", "--strict").exit_code == 1
    assert invoke("gate", "base", "worse", "--max-size-ratio", "0.5").exit_code == 1
    assert invoke("gate", "base", "noise", "--alpha", "0.5").exit_code == 1
    assert invoke("gate", "base", "noise", "--strict").exit_code == 0
    assert invoke("gate", "base", "nothing").exit_code == 2
    assert invoke("gate", "base", "noise", "--alpha", "0.9").exit_code == 2
    for option in ("--max-metric-drop", "--max-size-ratio", "--max-latency-ratio", "--alpha"):
        for value in ("nan", "inf"):
            assert invoke("gate", "base", "noise", option, value).exit_code == 2, (option, value)
    (here / "noise" / "samples.npz").write_bytes(b"")
    refused = invoke("gate", "base", "noise")
    assert refused.exit_code == 3
    assert refused.stderr.startswith("error: run 'noise': samples.npz does not match manifest.json")
    assert refused.stderr.count("\n") == 1


def test_gate_says_what_failed(here: Path) -> None:
    result = invoke("gate", "base", "worse", "--max-metric-drop", "0.5")
    assert result.stdout.endswith(": fails the limit 0.5\ngate: failed\n")
    assert "metric-drop: failed; worse by 2.00 points, 95 % interval " in result.stdout
    quiet = invoke("gate", "base", "worse", "--max-metric-drop", "0.5", "--quiet")
    assert quiet.stdout == ""
    assert quiet.stderr.startswith("metric-drop: failed; worse by 2.00 points, 95 % interval ")
    assert quiet.stderr.count("\n") == 1
    assert invoke("gate", "base", "noise", "--quiet").stderr == ""


def test_gate_prints_json_alone(here: Path) -> None:
    result = invoke("gate", "base", "worse", "--json", "--history", "h.jsonl", "--label", "abc")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"]) == (1, False)
    assert document["metric"]["drop"] == pytest.approx(2.0)
    assert document["metric"]["lost"] == 20
    assert document["checks"][0]["verdict"] == "failed"
    assert document["trend"]["points"][0]["label"] == "abc"


def test_history_is_written_by_the_gate_and_read_by_compare(here: Path) -> None:
    missing = invoke("compare", "base", "worse", "--no-timing", "--history", "h.jsonl")
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    for label, run in (("one", "base"), ("two", "noise")):
        invoke("gate", "base", run, "--history", "h.jsonl", "--label", label)
    shown = invoke("compare", "base", "worse", "--no-timing", "--history", "h.jsonl").stdout
    assert "accuracy stepped down at run 3, 'this run': worse by 1.95 points" in shown


def test_every_difference_is_a_line(here: Path) -> None:
    changes = {"identity/data": "e" * 64, "identity/model": "f" * 64}
    made_run(here / "other", results(5), changes=changes)
    result = invoke("gate", "base", "other")
    assert result.exit_code == 2
    assert [line.split("(")[0] for line in result.stderr.splitlines()] == [
        "error: 'base' and 'other': differ in the float model ",
        "error: 'base' and 'other': differ in the evaluation data ",
    ]


def test_real_runs_from_end_to_end(on_onnx: Project) -> None:
    """Two runs of one model, timed beside each other, and the candidate against its float model."""
    on_onnx.spec.update(passes=[{"pass": "fuse"}], output="base")
    on_onnx.run()
    on_onnx.spec.update(passes=[{"pass": "fuse"}, STATIC], output="candidate")
    on_onnx.run()
    with chdir(on_onnx.folder):
        result = invoke("gate", "base", "candidate", "--max-latency-ratio", "1000", "--json")
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        assert document["latency"]["source"] == "both run in turn here, on random inputs"
        low, high = document["latency"]["ci95"]
        assert 0 < low <= document["latency"]["ratio"] <= high
        report = json.loads(Path("candidate/report.json").read_text())
        drop = report["artifacts"][0]["metric_drop"]
        against = ("--base-artifact", "float", "--no-timing", "--json")
        alone = json.loads(invoke("compare", "candidate", "candidate", *against).stdout)
        assert alone["metric"]["drop"] == pytest.approx(drop)
        assert alone["latency"]["source"] == "as their run timed both"
        with np.load("candidate/samples.npz") as stored:
            assert set(stored.files) == {"float", "model.onnx"}
            assert stored["model.onnx"].dtype == bool
