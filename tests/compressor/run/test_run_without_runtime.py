"""Models that cannot be run are compressed all the same, and the report says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from compressor.errors import SpecError
from tests.compressor.models import wild_models
from tests.compressor.tiny_project import Project


@pytest.fixture
def foreign(tmp_path: Path) -> Project:
    """A project around an ONNX file with an operator that only its makers' runtime has."""
    onnx.save(wild_models.foreign().model, tmp_path / "foreign.onnx")
    project = Project(tmp_path, {"onnx": "foreign.onnx"})
    project.spec["data"] = {}
    project.spec["passes"] = [{"pass": "quantize-weights", "bits": 8, "range": "mse"}]
    return project


def test_an_operator_that_no_runtime_here_knows(foreign: Project):
    result = foreign.run()
    assert result.exit_code == 0
    report = json.loads((foreign.output / "report.json").read_text())
    reason = "it has operators that ONNX Runtime does not know and cannot be run"
    assert report["baseline"]["metric_reason"] == reason
    assert report["baseline"]["latency_ms"] is None
    artifact = report["artifacts"][0]
    assert artifact["latency_ms_reason"] == reason
    assert [check["ok"] for check in artifact["checks"]] == [True]
    assert artifact["size_ratio"] < 0.5
    layers = report["passes"][0]["layers"]
    assert [layer["scheme"] for layer in layers] == ["int8/channel"] * 2
    assert all(layer["weight_sqnr_db"] > 30 for layer in layers)
    written = onnx.load(foreign.output / "model.onnx")
    assert "Swirl" in {node.op_type for node in written.graph.node}
    for name in ("report.md", "report.html"):
        assert "cannot be run" in (foreign.output / name).read_text()


def test_what_needs_a_run_is_refused(foreign: Project):
    foreign.spec["passes"] = [{"pass": "quantize-static"}]
    remedy = (
        "; leave data out and use passes that run nothing, such as fuse, cast and quantize-weights "
        "with method rtn, or export the model without that operator"
    )
    with pytest.raises(SpecError) as refused:
        foreign.run()
    problem = "pass 'quantize-static': needs run, and ONNX Runtime has no operator com.acme.Swirl"
    assert str(refused.value).endswith(problem + remedy)
    assert not foreign.output.exists()


def test_data_are_of_no_use_without_a_run(foreign: Project):
    np.savez(foreign.folder / "some.npz", x=np.zeros((2, 8), np.float32))
    foreign.spec["data"] = {"evaluation": {"npz": "some.npz"}}
    with pytest.raises(
        SpecError, match=r"cannot be used: ONNX Runtime has no operator com\.acme\.Swirl"
    ):
        foreign.plan()
