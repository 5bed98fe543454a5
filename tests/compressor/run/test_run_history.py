"""A run that is added to a history: its report draws the runs before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.errors import CompressorError, InputError, SpecError
from compressor.lab.compare.history import read_history
from compressor.lab.compare.runs import open_run
from compressor.progress import Silent
from compressor.report.run import run_spec
from compressor.run.options import RunOptions
from compressor.spec.load import load_spec
from compressor.spec.user_code import importable
from tests.compressor.tiny_project import Project


def run(project: Project, history: Path, label: str) -> str:
    with importable([project.folder]):
        run_spec(load_spec(project.path), RunOptions(history=history, label=label))
    return (project.output / "report.html").read_text(encoding="utf-8")


def test_the_report_draws_the_runs_before_it(on_onnx: Project, tmp_path: Path) -> None:
    history = tmp_path / "kept" / "history.jsonl"
    assert "first-commit" in run(on_onnx, history, "first-commit")
    on_onnx.spec["passes"] = [{"pass": "quantize-dynamic", "convolutions": True}]
    page = run(on_onnx, history, "second-commit")
    assert [entry.label for entry in read_history(history)] == ["first-commit", "second-commit"]
    assert page.index("first-commit") < page.index("second-commit")
    assert "has no step in 2 runs" in page
    open_run(on_onnx.output, Silent())  # the manifest is that of the page with the history
    on_onnx.run()
    assert "first-commit" not in (on_onnx.output / "report.html").read_text(encoding="utf-8")


def test_a_history_of_something_else_is_refused(on_onnx: Project, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    run(on_onnx, history, "")
    on_onnx.spec["name"] = "other"
    on_onnx.spec["output"] = "out/other"
    with pytest.raises(SpecError, match="another name than this run"):
        run(on_onnx, history, "")
    assert len(read_history(history)) == 1


def test_a_damaged_history_shows_before_any_work(on_onnx: Project, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    history.write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match="is not a line that a run wrote"):
        run(on_onnx, history, "")
    assert not on_onnx.output.exists()


def test_a_run_without_a_metric_has_no_place_in_a_history(on_onnx: Project, tmp_path: Path) -> None:
    del on_onnx.spec["data"]["evaluation"]
    with pytest.raises(CompressorError, match="has no metric to keep in a history"):
        run(on_onnx, tmp_path / "history.jsonl", "")
    assert not (tmp_path / "history.jsonl").exists()
