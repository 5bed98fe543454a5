"""What a run leaves: its files, their hashes, the keys of the report, and equal bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import save_file

import compressor
from compressor.errors import ExitCode
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.files import file_sha256
from compressor.passes.fuse.fuse import Fuse
from compressor.report.run import RunResult
from compressor.run import workspace
from compressor.run.evaluate import evaluate
from compressor.run.workspace import Workspace
from compressor.types.carrier import Carrier, Runner
from compressor.types.passes import Outcome
from tests.compressor.conftest import spine_of_tests
from tests.compressor.tiny_project import (
    ONNX,
    REPORTS,
    Project,
    onnx_project,
    sample_images,
    tiny_module,
)

STATIC = {
    "pass": "quantize-static",
    "weights": {"rounding": "nearest"},
    "activations": {"observer": "min-max"},
}
BOTH = [{"format": "safetensors"}, {"format": "onnx"}]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, RunResult]:
    """A project that was run; tests look at what is there."""
    project = onnx_project(tmp_path_factory.mktemp("quantized") / "project")
    project.spec.update(passes=[{"pass": "fuse"}, STATIC], exports=BOTH)
    project.spec["limits"] = {"metric-drop": 50, "size-ratio": 3, "latency-ratio": 100}
    with spine_of_tests():
        return project, project.run()


def test_all_files_are_there_and_no_other(quantized: tuple[Project, RunResult]):
    project, result = quantized
    assert result.exit_code is ExitCode.DONE
    assert result.output == project.output
    assert {p.name for p in project.output.iterdir()} == {
        "model.safetensors",
        "model.json",
        "model.onnx",
        "manifest.json",
        "samples.npz",
        *REPORTS,
    }
    assert not list(project.output.rglob(".staging-*"))
    assert {p.name for p in project.folder.iterdir()} == {
        "spec.yaml",
        ONNX,
        "calib.npz",
        "test.npz",
        "out",
    }


def test_the_report_has_the_agreed_keys(quantized: tuple[Project, RunResult]):
    project, result = quantized
    report = project.report()
    assert report == result.report
    assert set(report) >= {"schema", "name", "ok", "baseline", "artifacts", "passes", "limits"}
    assert (report["schema"], report["name"], report["ok"]) == (1, "tiny", True)
    baseline = report["baseline"]
    assert set(baseline) >= {"metric", "bytes", "parameters", "macs", "latency_ms"}
    assert set(baseline["metric"]) >= {"name", "value", "samples", "ci95"}
    assert set(baseline["latency_ms"]) >= {"p50", "p90", "p99"}
    for artifact in report["artifacts"]:
        assert set(artifact) >= {
            "format",
            "path",
            "bytes",
            "sha256",
            "runtime",
            "metric",
            "metric_drop",
            "size_ratio",
            "latency_ms",
            "latency_ratio",
            "max_abs_diff",
            "checks",
        }
        assert all(check["ok"] for check in artifact["checks"])
        assert artifact["latency_ms"]["p50"] <= artifact["latency_ms"]["p99"]
    for entry in report["passes"]:
        assert set(entry) >= {"pass", "seconds", "cached", "metric", "bytes", "layers"}
        for layer in entry["layers"]:
            assert set(layer) >= {"name", "scheme", "sparsity", "sqnr_db"}
    assert {e["name"] for e in report["limits"]} == {"metric-drop", "size-ratio", "latency-ratio"}
    assert all(set(e) >= {"name", "limit", "measured", "ok"} for e in report["limits"])


def test_the_report_says_what_is_true(quantized: tuple[Project, RunResult]):
    project, result = quantized
    report = result.report
    assert report["baseline"]["metric"]["value"] == 100  # labels are the float model's own
    assert report["baseline"]["metric"]["samples"] == 48
    assert (report["baseline"]["bytes"], report["baseline"]["parameters"]) == (2800, 700)
    fuse, static = report["passes"]
    assert [layer["name"] for layer in static["layers"]] == ["conv1", "conv2", "fc"]
    assert {layer["scheme"] for layer in static["layers"]} == {"int8/channel"}
    assert all(15 < layer["sqnr_db"] < 60 for layer in static["layers"])
    assert static["weakest"]["sqnr_db"] == min(layer["sqnr_db"] for layer in static["layers"])
    assert static["bytes"] < fuse["bytes"]

    safetensors, written = report["artifacts"]
    assert (safetensors["deployed"], safetensors["latency_ratio"]) == (False, None)
    assert written["path"] == "model.onnx"
    assert written["sha256"] == file_sha256(project.output / "model.onnx")
    own = (project.folder / ONNX).stat().st_size
    assert (written["float_file"], written["float_bytes"]) == (ONNX, own)
    assert written["size_ratio"] == written["bytes"] / own
    drop = 100 - written["metric"]["value"]
    assert written["metric_drop"] == pytest.approx(drop)


def test_the_artifact_is_what_was_evaluated(quantized: tuple[Project, RunResult]):
    project, result = quantized
    images = sample_images(1)
    session = ort.InferenceSession(
        project.output / "model.onnx", providers=["CPUExecutionProvider"]
    )
    logits = session.run(None, {"image": images})[0]
    labels = np.load(project.folder / "test.npz")["label"]
    (written,) = [a for a in result.report["artifacts"] if a["format"] == "onnx"]
    assert written["metric"]["value"] == pytest.approx(100 * (logits.argmax(1) == labels).mean())
    original = ort.InferenceSession(project.folder / ONNX, providers=["CPUExecutionProvider"])
    difference = np.abs(original.run(None, {"image": images})[0] - logits).max()
    assert written["max_abs_diff"] == pytest.approx(float(difference), rel=1e-5)

    loaded = compressor.load(project.output)
    with torch.inference_mode():
        again = loaded(image=torch.from_numpy(images))
    (outputs,) = again.values() if isinstance(again, dict) else (again,)
    assert np.abs(outputs.numpy() - logits).max() < 0.1 * logits.std()


@pytest.mark.parametrize(("off", "times"), [(0.0, 2), (1e-6, 2), (1e-3, 3)])
def test_a_file_that_gives_the_same_is_evaluated_for_the_model_too(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch, off: float, times: int
):
    counted = Mock(wraps=evaluate)
    monkeypatch.setattr(workspace, "evaluate", counted)
    written = OnnxExporter._in_form

    def coarse(self: OnnxExporter, carrier: Carrier) -> ir.Model:
        model = written(self, carrier).clone()
        bias = model.graph.initializers["fc.bias"]
        assert bias.const_value is not None
        bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(off), name="fc.bias")
        return model

    monkeypatch.setattr(OnnxExporter, "_in_form", coarse)
    on_onnx.spec.update(passes=[{"pass": "nudge"}], exports=[{"format": "onnx"}])
    report = on_onnx.run().report
    assert counted.call_count == times
    (artifact,), (step,) = report["artifacts"], report["passes"]
    assert (artifact["sqnr_db"] == step["sqnr_db"]) == (times == 2)
    assert artifact["checks"][1]["detail"].startswith("equal") == (off == 0.0)


def test_samples_that_files_are_compared_on_are_not_run_again(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    opened: list[Carrier] = []
    usual = Workspace.opened

    def noted(self: Workspace, carrier: Carrier) -> Runner:
        opened.append(carrier)
        return usual(self, carrier)

    monkeypatch.setattr(Workspace, "opened", noted)
    on_onnx.spec.update(passes=[{"pass": "nudge"}], exports=BOTH)
    on_onnx.run()
    assert len(opened) == 1, "the float model, for its evaluation"


@pytest.mark.parametrize(("off", "times"), [(1e-6, 2), (1e-3, 3)])
def test_a_fused_model_that_gives_the_same_is_not_evaluated_anew(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch, off: float, times: int
):
    counted = Mock(wraps=evaluate)
    monkeypatch.setattr(workspace, "evaluate", counted)
    apply = Fuse.apply

    def coarse(self: Fuse, carrier: Carrier, *others: Any) -> Outcome:
        outcome = apply(self, carrier, *others)
        bias = outcome.carrier.tensors()["fc.bias"].read() + off
        return replace(outcome, carrier=outcome.carrier.with_weights({"fc.bias": bias}))

    monkeypatch.setattr(Fuse, "apply", coarse)
    on_onnx.spec.update(passes=[{"pass": "fuse"}, {"pass": "nudge"}], exports=[{"format": "onnx"}])
    report = on_onnx.run().report
    assert counted.call_count == times
    fuse = report["passes"][0]
    assert (fuse["sqnr_db"] > 100) == (times == 2)
    assert fuse["metric"] == report["baseline"]["metric"]
    assert on_onnx.run().report["passes"][0] == {**fuse, "cached": True}


def test_the_manifest_hashes_every_input_and_output(quantized: tuple[Project, RunResult]):
    project, _ = quantized
    manifest = json.loads((project.output / "manifest.json").read_text())
    assert {e["name"] for e in manifest["inputs"]} == {"spec.yaml", ONNX}
    for entry in manifest["inputs"]:
        assert entry["sha256"] == file_sha256(project.folder / entry["name"])
    assert [e["role"] for e in manifest["data"]] == ["calibration", "evaluation"]
    assert {e["name"] for e in manifest["outputs"]} == {
        p.name for p in project.output.iterdir() if p.is_file() and p.name != "manifest.json"
    }
    for entry in manifest["outputs"]:
        path = project.output / entry["name"]
        assert (entry["sha256"], entry["bytes"]) == (file_sha256(path), path.stat().st_size)
    assert (manifest["seed"], manifest["spec"]["name"]) == (0, "tiny")
    assert manifest["spec"]["passes"][0]["pass"] == "fuse"
    assert {"python", "torch", "onnx", "compressor"} <= set(manifest["versions"])
    assert manifest["processor"]["threads"] == 1  # as in all tests of runs
    assert manifest["processor"]["kernels"] == torch.backends.cpu.get_cpu_capability()


def test_no_path_of_the_machine_goes_into_a_file(quantized: tuple[Project, RunResult]):
    project, _ = quantized
    for path in project.output.iterdir():
        if path.is_file():
            assert str(project.folder).encode() not in path.read_bytes(), path.name


def test_the_same_spec_gives_the_same_bytes(
    quantized: tuple[Project, RunResult], tmp_path: Path, spine: None
):
    project, _ = quantized
    first = project.artifacts()
    elsewhere = onnx_project(tmp_path / "elsewhere")
    elsewhere.spec = project.spec
    elsewhere.run()
    assert elsewhere.artifacts() == first
    elsewhere.run(fresh=True)
    assert elsewhere.artifacts() == first


def test_a_module_and_its_onnx_file_agree(on_torch: Project, tmp_path: Path):
    """The same network as a module, from a sharded checkpoint, gives what the plan said."""
    shards = on_torch.folder / "shards"
    shards.mkdir()
    tensors = tiny_module().state_dict()
    names = sorted(tensors)
    for index, part in enumerate((names[:4], names[4:])):
        save_file({n: tensors[n] for n in part}, shards / f"part-{index}.safetensors")
    on_torch.spec["model"]["checkpoint"] = "shards"
    on_torch.spec.update(passes=[{"pass": "nudge", "factor": 2.0}, {"pass": "fuse"}], exports=BOTH)
    result = on_torch.run()
    assert result.exit_code is ExitCode.DONE
    inputs = json.loads((on_torch.output / "manifest.json").read_text())["inputs"]
    assert [e["name"] for e in inputs] == [
        "spec.yaml",
        "shards/part-0.safetensors",
        "shards/part-1.safetensors",
    ]
    module = tiny_module()
    with torch.inference_mode():
        for layer in (module.conv1, module.conv2, module.fc):
            layer.weight *= 2
        wanted = module(torch.from_numpy(sample_images(1))).numpy()
    session = ort.InferenceSession(
        on_torch.output / "model.onnx", providers=["CPUExecutionProvider"]
    )
    logits = session.run(None, {"image": sample_images(1)})[0]
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-4)


def test_without_data_nothing_is_guessed(on_onnx: Project):
    del on_onnx.spec["data"]
    result = on_onnx.run()
    assert result.exit_code is ExitCode.DONE
    baseline, (artifact,) = result.report["baseline"], result.report["artifacts"]
    for entry in (baseline, artifact):
        assert entry["metric"] is None
        assert entry["metric_reason"] == "the spec has no data.evaluation"
    assert artifact["metric_drop"] is None
    assert artifact["max_abs_diff"] == 0
    assert (on_onnx.output / "report.md").read_text()


def test_external_data_of_the_input_is_named_in_the_manifest(on_onnx: Project):
    path = on_onnx.folder / ONNX
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="tiny.data", size_threshold=0)
    on_onnx.run()
    inputs = json.loads((on_onnx.output / "manifest.json").read_text())["inputs"]
    assert [e["name"] for e in inputs] == ["spec.yaml", ONNX, "tiny.data"]


def test_external_data_of_an_artifact_can_be_read_by_onnx(on_onnx: Project):
    """It refuses files that have a second name, as those in the store's folder would."""
    on_onnx.spec["exports"] = [{"format": "onnx", "external-data": "always"}]
    on_onnx.run()
    path = on_onnx.output / "model.onnx"
    (data,) = on_onnx.output.glob("model.onnx.*")
    assert data.stat().st_nlink == 1
    onnx.checker.check_model(path)
    assert onnx.load(path).graph.initializer
