"""A whole run on a machine without a GPU: engines are built, and the report says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.errors import SpecError
from compressor.lab.inspect.path import inspect_path
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.exporters.tensorrt.engines import addresses_can_be_fixed, needs_rtx
from tests.compressor.tiny_project import Project, onnx_project
from tests.paths import ROOT

pytestmark = [needs_rtx, pytest.mark.usefixtures("no_gpu")]

REASON = "TensorRT engines run on NVIDIA GPUs only, and this machine has none"
ENGINE = {
    "format": "tensorrt",
    "compute-capability": ["8.6"],
    "batch": {"opt": 8, "max": 16},
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = onnx_project(tmp_path)
    made.spec["passes"] = [{"pass": "quantize-static"}]
    made.spec["exports"] = [dict(ENGINE)]
    return made


def test_an_engine_alone(project: Project) -> None:
    planned = project.plan()
    assert planned.warnings == (f"tensorrt: only its size is judged: {REASON}",)
    assert project.run().exit_code == 0
    report = project.report()
    (artifact,) = report["artifacts"]
    assert [f["name"] for f in artifact["files"]] == ["model.engine", "model.engine.json"]
    for key in ("metric", "latency_ms", "latency_ratio"):
        assert artifact[key] is None
        assert artifact[f"{key}_reason"] == REASON
    assert artifact["metric_drop"] is None
    assert report["baseline"]["metric"]["value"] == 100.0
    assert report["baseline"]["latency_ms"] is None
    assert report["baseline"]["latency_ms_reason"].endswith(f"none is run: {REASON}")
    (check,) = artifact["checks"]
    assert check["ok"]
    assert check["detail"].endswith("TensorRT reports all 3 quantized layers in int8")
    (export,) = planned.exports
    assert export.estimate
    assert export.size_ratio is None  # it would take the float engine
    assert export.bytes == pytest.approx(artifact["bytes"], rel=0.02)
    for name in ("report.md", "report.html"):
        assert REASON in (project.output / name).read_text(encoding="utf-8")
    assert [(e["name"], e["verdict"], e["reason"]) for e in report["limits"]] == [
        ("metric-drop", "unknown", REASON),
    ]
    before = project.artifacts()
    assert project.run().cached
    assert project.run(fresh=True).exit_code == 0
    if addresses_can_be_fixed():
        assert project.artifacts() == before


@pytest.mark.slow
def test_beside_an_export_that_runs(project: Project) -> None:
    project.spec["exports"] = [ENGINE, {"format": "onnx", "target": "tensorrt"}]
    project.spec["limits"] = {"metric-drop": 50.0, "size-ratio": 1000.0, "latency-ratio": 9.0}
    assert project.run().exit_code == 0
    report = project.report()
    judged = [(e["name"], e["artifact"], e["verdict"]) for e in report["limits"]]
    assert judged == [
        ("metric-drop", "model.engine", "unknown"),
        ("size-ratio", "model.engine", "passed"),
        ("latency-ratio", "model.engine", "unknown"),
        ("metric-drop", "model.onnx", "unknown"),  # one answer for all would keep 50 points
        ("size-ratio", "model.onnx", "passed"),  # its latency is the engine's to be judged
    ]
    assert report["baseline"]["latency_ms"]["p50"] > 0  # timed beside the ONNX file


def test_a_limit_that_nothing_can_be_judged_by(project: Project) -> None:
    project.spec["limits"]["metric-drop"] = 1.0
    message = rf"spec\.yaml:\d+: limits\.metric-drop: cannot be judged here: {REASON}; add an expo"
    with pytest.raises(SpecError, match=message):
        project.plan()


def test_the_place_in_the_spec_is_named(project: Project) -> None:
    del project.spec["exports"][0]["batch"]  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match=r"spec\.yaml:\d+: export tensorrt: input 'image': has dyn"):
        project.plan()
    assert not project.output.exists()


def test_the_sample_plans_an_engine() -> None:
    plan = make_plan(load_spec(ROOT / "samples/digits/tensorrt.yaml"))
    assert [export.format for export in plan.exports] == ["tensorrt", "onnx"]
    assert plan.warnings == (
        f"tensorrt: only its size is judged: {REASON}",
        "onnx: its latency is not judged: meant for TensorRT, timed in ONNX Runtime on the CPU",
    )


def test_inspecting_an_engine(project: Project) -> None:
    project.run()
    path = project.output / "model.engine"
    result = CliRunner().invoke(application, ["inspect", str(path)])
    assert result.exit_code == 0
    for text in ("built by: rtx (tensorrt-rtx", "profile of image: min 1×1×8×8", "correlation"):
        assert text in result.stdout
    assert "3 of 3 quantized layers computed with codes" in result.stdout
    document: dict[str, Any] = json.loads(
        CliRunner().invoke(application, ["inspect", "--json", f"{path}.json"]).stdout
    )
    assert document["kind"] == "TensorRT engine"
    assert document["manifest"]["builder"] == "rtx"
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content.tobytes())
    assert CliRunner().invoke(application, ["inspect", str(path)]).exit_code == 4
    assert not inspect_path(path).intact
