"""``compress plan``, ``run``, ``inspect`` and ``init`` on a tiny network, from end to end."""

import json
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from compressor.cli.application import application

MODULE = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )

def flipped(batch):
    return {name: array[..., ::-1].copy() for name, array in batch.items()}
"""
SPEC = """
version: 1
name: tiny
model:
  factory: tiny_cli_model:build
  checkpoint: tiny.pt
  inputs: {image: {shape: [batch, 1, 8, 8]}}
data:
  calibration: {npz: data.npz, inputs: {image: image}, transform: tiny_cli_model:flipped}
  evaluation: {npz: data.npz, inputs: {image: image}}
passes:
  - {pass: fuse}
  - {pass: quantize-static, layers: [{match: "*"}]}
exports:
  - {format: safetensors}
  - {format: onnx}
limits: {size-ratio: null, latency-ratio: null}
output: out
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the spec has been run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny_cli_model.py").write_text(MODULE)
    (folder / "spec.yaml").write_text(SPEC)
    names: dict[str, Any] = {}
    exec(MODULE, names)
    torch.save(names["build"]().state_dict(), folder / "tiny.pt")
    images = np.random.default_rng(0).normal(size=(48, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", image=images)
    with chdir(folder):
        result = invoke("run", "spec.yaml", "--json")
    assert result.exit_code == 0, result.stderr
    (folder / "first.json").write_text(result.stdout)
    (folder / "first.err").write_text(result.stderr)
    return folder


@pytest.fixture(autouse=True)
def folder(finished: Path) -> Iterator[Path]:
    with chdir(finished):
        yield finished


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(application, arguments)


def test_json_is_the_report_and_nothing_else(folder: Path) -> None:
    report = json.loads((folder / "first.json").read_text())
    assert (folder / "first.err").read_text() == ""
    assert report == json.loads((folder / "out" / "report.json").read_text())
    assert [entry["cached"] for entry in report["passes"]] == [False, False]


def test_a_second_run_resumes_and_prints_a_table_on_stderr() -> None:
    before = Path("out/model.onnx").read_bytes()
    result = invoke("run", "spec.yaml")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "\nmodel.onnx: " in result.stderr
    assert result.stderr.endswith(f"\nReport: {Path('out/report.html')}\n")
    report = json.loads(Path("out/report.json").read_text())
    assert [entry["cached"] for entry in report["passes"]] == [True, True]
    assert Path("out/model.onnx").read_bytes() == before


def test_quiet_prints_nothing() -> None:
    result = invoke("run", "spec.yaml", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_missed_limit_is_exit_code_1() -> None:
    result = invoke("run", "spec.yaml", "--set", "limits.size-ratio=0.001", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    report = json.loads(result.stdout)
    assert not report["ok"]
    verdicts = {limit["name"]: limit["verdict"] for limit in report["limits"]}
    assert verdicts["size-ratio"] == "failed"
    assert report["verdict"] == "failed"


def test_a_damaged_checkpoint_is_exit_code_3(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(Path("tiny.pt").read_bytes()[:500])
    for command in ("plan", "run"):
        result = invoke(command, "spec.yaml", "--set", f"model.checkpoint={damaged}")
        assert (result.exit_code, result.stdout) == (3, "")
        setting = f"--set model.checkpoint={damaged}"
        assert result.stderr.startswith(f"error: {setting}: checkpoint {str(damaged)!r}: ")


def test_plan_for_people_and_programs() -> None:
    text = invoke("plan", "spec.yaml")
    assert (text.exit_code, text.stderr) == (0, "")
    assert text.stdout.startswith("tiny: ")
    assert "Predicted peak memory: " in text.stdout
    assert text.stdout.splitlines()[2].split() == ["layers", "kind", "count", "before", "after"]
    listed = invoke("plan", "spec.yaml", "--layers").stdout
    assert listed.splitlines()[2].split()[:3] == ["layer", "kind", "shape"]
    document = json.loads(invoke("plan", "spec.yaml", "--json").stdout)
    assert [layer["kind"] for layer in document["layers"]] == ["Conv", "Gemm"]


def test_plan_refuses_the_folder_that_run_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    output = ("--set", f"output={tmp_path}")
    results = [invoke(command, "spec.yaml", *output) for command in ("plan", "run")]
    assert {(result.exit_code, result.stdout) for result in results} == {(2, "")}
    assert results[0].stderr == results[1].stderr
    assert "holds files that no run of compressor made" in results[0].stderr
    assert invoke("plan", "spec.yaml", *output, "--force").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_inspect_an_output_folder() -> None:
    result = invoke("inspect", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("run tiny in out\n")
    assert result.stdout.count("unchanged") >= 6
    document = json.loads(invoke("inspect", "out", "--json").stdout)
    assert document["intact"] is True
    assert document["report"]["name"] == "tiny"


def test_inspect_finds_what_was_changed_since_the_run(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree("out", copy)
    (copy / "model.onnx").write_bytes(b"")
    (copy / "report.json").unlink()
    result = invoke("inspect", str(copy))
    assert (result.exit_code, result.stderr) == (4, "")
    states = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines() if line}
    assert (states["model.onnx"], states["report.json"]) == ("changed", "missing")
    assert states["model.safetensors"] == "unchanged"
    assert "report.json is not what the run wrote" in result.stdout


@pytest.mark.parametrize("path", ["out/model.onnx", "out/model.safetensors", "out/model.json"])
def test_inspect_an_artifact(path: str) -> None:
    result = invoke("inspect", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "inputs: image float32[batch, 1, 8, 8]" in result.stdout
    document = json.loads(invoke("inspect", path, "--json").stdout)
    rows = {row["name"]: row for row in document["tensors"]}
    weight = next(row for row in rows.values() if row["shape"] == [8, 1, 3, 3])
    assert (weight["dtype"], weight["quantization"]) == ("int8", "int8/channel")
    assert weight["macs"] == 8 * 9 * 36
    assert document["graph"]["operators"]["Conv"] == 1
    assert document["parameters"] == 8 * 9 + 8 + 288 * 4 + 4


def test_inspect_a_checkpoint() -> None:
    result = invoke("inspect", "tiny.pt")
    assert (result.exit_code, result.stderr) == (0, "")
    last = result.stdout.splitlines()[-1]
    assert last.startswith("Total: 4 tensors, 1,236 parameters (0.00 % zeros), 4.94 kB (float32 ")


@pytest.mark.parametrize(
    ("path", "code"), [("gone", 2), ("spec.yaml", 2), ("data.npz", 2), ("cut.onnx", 3)]
)
def test_inspect_what_is_not_a_model(path: str, code: int) -> None:
    Path("cut.onnx").write_bytes(Path("out/model.onnx").read_bytes()[:100])
    result = invoke("inspect", path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (code, "", 1)


def test_init_writes_a_spec_once(tmp_path: Path) -> None:
    target = tmp_path / "new.yaml"
    result = invoke("init", "out/model.onnx", "-o", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote {target}; fill it in, then: compress plan {target}\n"
    text = target.read_text()
    again = invoke("init", "out/model.onnx", "-o", str(target))
    assert again.exit_code == 2
    assert again.stderr == (
        f"error: spec {str(target)!r}: exists already; name another file with -o, or remove it\n"
    )
    assert target.read_text() == text
