"""Peak memory in a run: measured when it is asked for, in processes of their own."""

from __future__ import annotations

from typing import Any

import pytest

from compressor.errors import ArtifactError
from compressor.report.page import Cell
from compressor.report.run import run_spec
from compressor.report.tables import model_table
from compressor.run import verify
from compressor.run.options import RunOptions
from compressor.run.timing import cold_rounds
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import Project


def run(project: Project, **options: Any) -> dict[str, Any]:
    return dict(run_spec(load_spec(project.path), RunOptions(**options)).report)


def entries(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [report["baseline"], *report["artifacts"]]


def test_it_is_measured_when_it_is_asked_for(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_rounds, "ROUNDS", 2)  # of each three processes
    for entry in entries(run(on_onnx)):
        assert entry["peak_memory_bytes"] is None
        assert "compress run --memory" in entry["peak_memory_bytes_reason"]
    report = run(on_onnx, memory=True)
    for entry in entries(report):
        low, high = entry["peak_memory_range"]
        assert 0 < low <= entry["peak_memory_bytes"] <= high < 500_000_000
    table = model_table(report)
    memory = [column.heading for column in table.columns].index("peak memory")
    cells = [row[memory] for row in table.rows]
    assert all(isinstance(cell, Cell) and " to " in cell.note for cell in cells)
    again = run_spec(load_spec(on_onnx.path), RunOptions(memory=True))
    assert again.cached
    assert again.report == report


def test_a_process_that_fails_is_a_reason(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArtifactError("artifact 'float'", "ends the process that starts it", "look")

    monkeypatch.setattr(verify, "cold_starts", fail)
    for entry in entries(run(on_onnx, memory=True)):
        assert entry["peak_memory_bytes"] is None
        assert "it ends the process that starts it" in entry["peak_memory_bytes_reason"]
