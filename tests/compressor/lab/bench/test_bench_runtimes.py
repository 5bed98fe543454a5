"""In which runtime ``compress bench`` runs an ONNX file: in that of the run's report."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.lab.bench.finding import find_artifacts
from compressor.models.onnx import runtimes as onnx_runtimes
from compressor.report.pages.bench import benchmark_page
from compressor.report.terminal import plain_text
from compressor.types import exporter
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.compressor.tiny_project import Project


@pytest.fixture
def for_openvino(on_onnx: Project) -> Project:
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "openvino"}]
    return on_onnx


def document(*arguments: object) -> Any:
    command = ["bench", *(str(a) for a in arguments), "--seconds", "0", "--json"]
    result = CliRunner().invoke(application, command)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def runtimes(*arguments: object) -> list[str]:
    return [a["runtime"] for a in document(*arguments, "--no-cold")["artifacts"]]


def test_a_file_for_openvino_runs_there(for_openvino: Project, tmp_path: Path, quick: None):
    for_openvino.run()
    report = json.loads((for_openvino.output / "report.json").read_text())
    (said,) = (a["runtime"] for a in report["artifacts"])
    assert said.startswith("openvino 20")
    alone = tmp_path / "elsewhere.onnx"
    shutil.copy(for_openvino.output / "model.onnx", alone)
    other = shutil.copytree(for_openvino.output, tmp_path / "other")
    assert runtimes(for_openvino.output, other, alone) == [said] * 3
    found = document(alone, "--threads", 1)
    assert found["provider"] is found["artifacts"][0]["runtime_reason"] is None
    cold = found["artifacts"][0]["cold"]["milliseconds"]
    assert cold["create"]["median"] > cold["steady"]["median"] > 0


def test_a_provider_is_one_of_onnx_runtime(for_openvino: Project, quick: None):
    for_openvino.run()
    found = document(for_openvino.output, "--provider", "cpu", "--no-cold")
    (artifact,) = found["artifacts"]
    assert found["provider"] == "cpu"
    assert artifact["runtime"].startswith("onnxruntime")
    assert artifact["runtime"].endswith("(CPU)")
    assert artifact["runtime_reason"] is None
    assert "provider cpu, " in plain_text(benchmark_page(found))


def test_without_openvino_onnx_runtime_steps_in(
    for_openvino: Project, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(onnx_runtimes, "find_spec", lambda _: None)
    for_openvino.run()
    found = document(for_openvino.output)
    (artifact,) = found["artifacts"]
    report = json.loads((for_openvino.output / "report.json").read_text())
    assert artifact["runtime"] == report["artifacts"][0]["runtime"]
    assert artifact["runtime"].startswith("onnxruntime")
    assert artifact["runtime_reason"] == "meant for OpenVINO, which is not installed"
    note = f"- {artifact['name']} is meant for OpenVINO, which is not installed: timed in onnxr"
    assert note in plain_text(benchmark_page(found))
    assert artifact["cold"]["rounds"] == 1


@pytest.mark.parametrize("suffix", ["xml", "tflite", "pte", "gguf"])
def test_an_artifact_whose_runtime_is_missing_has_a_reason(
    suffix: str, save: SaveOnnx, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exporter, "find_spec", lambda _: None)
    base, artifact = save(), tmp_path / f"model.{suffix}"
    artifact.write_bytes(b"0")
    called = ["bench", str(artifact), "--seconds", "0", "--no-cold", "--json"]
    result = CliRunner().invoke(application, [*called, str(base)])
    assert result.exit_code == 0, result.stderr
    missing, timed = json.loads(result.stdout)["artifacts"]
    assert "which is not installed; run pip install" in missing["reason"]
    assert timed["latency"][0]["p50"] > 0
    alone = CliRunner().invoke(application, called)
    assert alone.exit_code == 2
    assert f"artifact {artifact.name!r}: needs the package" in alone.stderr


def test_a_run_with_openvino_takes_no_numbers_of_one_without(
    for_openvino: Project, quick: None, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as hidden:
        hidden.setattr(onnx_runtimes, "find_spec", lambda _: None)
        for_openvino.run()
    for_openvino.run()
    report = json.loads((for_openvino.output / "report.json").read_text())
    (artifact,) = report["artifacts"]
    assert artifact["runtime"].startswith("openvino")
    assert artifact["deployed"]


@pytest.mark.slow
def test_bfloat16_is_timed_in_pytorch(on_onnx: Project, quick: None):
    on_onnx.spec["passes"] = [{"pass": "cast", "dtype": "bf16"}]
    on_onnx.spec["exports"] = [{"format": "onnx", "target": "tensorrt", "opset": 22}]
    on_onnx.run()
    (artifact,) = document(on_onnx.output / "model.onnx")["artifacts"]
    assert artifact["runtime"].startswith("torch ")
    assert artifact["runtime_reason"] == "meant for TensorRT"
    assert artifact["cold"]["milliseconds"]["import"]["median"] > 0


def test_what_others_wrote_says_nothing_of_a_target(save: SaveOnnx, tmp_path: Path):
    path = save()
    model = onnx.load(path)
    model.metadata_props.add(key="compressor.target", value="openvino")
    onnx.save(model, path)
    assert find_artifacts([path])[0].options == {}
    model.producer_name = "compressor"
    onnx.save(model, path)
    assert find_artifacts([path])[0].options == {"target": "openvino"}


def test_an_artifact_that_does_not_load_has_a_reason(save: SaveOnnx, quick: None):
    paths = [save("strange.onnx", operator="Unknown"), save(), save("again.onnx")]
    result = CliRunner().invoke(
        application, ["bench", *map(str, paths), "--seconds", "0", "--no-cold", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    strange, base, other = json.loads(result.stdout)["artifacts"]
    assert "does not load it" in strange["reason"]
    assert (strange["runtime"], strange["latency"], strange["cold_reason"]) == (
        None,
        [],
        strange["reason"],
    )
    assert base["latency"][0]["ratio"] is None
    assert other["latency"][0]["ratio"]["value"] > 0
