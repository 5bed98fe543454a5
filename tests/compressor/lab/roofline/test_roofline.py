"""Rooflines of small models, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.lab.roofline import measuring
from tests.compressor.tiny_project import Project, tiny_onnx

LAYERS = ["conv1", "conv2", "fc"]

STATIC = {"pass": "quantize-static", "layers": [{"match": "*"}]}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine and the model in a moment."""
    monkeypatch.setattr(measuring, "_PEAK_SECONDS", 0.01)
    monkeypatch.setattr(measuring, "_SIDE", 64)
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)


def inspected(*arguments: str) -> Result:
    return CliRunner().invoke(application, ["inspect", "--roofline", "--threads", "1", *arguments])


def document(*arguments: str) -> Any:
    result = inspected("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.onnx"
    onnx.save(tiny_onnx(), path)
    return str(path)


@pytest.mark.parametrize("batch", [1, 4])
def test_layers_have_work_and_time(model: str, batch: int):
    found = document(model, "--batch", str(batch))
    assert found["batch"] == batch
    assert found["inputs"] == {"image": [batch, 1, 8, 8]}
    rows = {row["name"]: row for row in found["operators"] if row["layer"]}
    assert list(rows) == LAYERS
    macs = {"conv1": 64 * 8 * 9, "conv2": 64 * 8 * 72, "fc": 4 * 8}
    for name, row in rows.items():
        assert row["flops"] == 2 * batch * macs[name]
        assert row["seconds"] > 0
        assert row["bound"] in ("memory", "compute")
    assert found["flops"] == 2 * batch * sum(macs.values())
    shares = sum(row["time_share"] for row in found["operators"])
    outside = 100 * found["outside_seconds"] / found["seconds"]
    assert shares + outside == pytest.approx(100, abs=1e-6)
    assert all(p["best_speedup"] >= 1 for p in found["prospects"])


def test_layers_have_the_names_of_a_plan(tmp_path: Path):
    """PyTorch's exporters leave the weights of most linear layers nameless."""
    proto = tiny_onnx()
    (stored,) = (t for t in proto.graph.initializer if t.name == "fc.weight")
    (node,) = (n for n in proto.graph.node if "fc.weight" in n.input)
    stored.name = "val_7"
    node.input[list(node.input).index("fc.weight")] = "val_7"
    scopes = "['', 'head.fc', 'linear']"
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    onnx.save(proto, tmp_path / "net.onnx")
    rows = document(str(tmp_path / "net.onnx"))["operators"]
    named = {row["name"]: row["seconds"] for row in rows if row["layer"]}
    assert list(named) == ["conv1", "conv2", "head.fc"]
    assert all(named.values())


def test_a_quantized_run_and_its_float_model(on_torch: Project, monkeypatch: pytest.MonkeyPatch):
    on_torch.spec["passes"] = [
        {"pass": "fuse"},
        {"pass": "quantize-static", "layers": [{"match": "*"}]},
    ]
    on_torch.run()
    monkeypatch.chdir(on_torch.folder)
    done = {row["name"]: row for row in document(str(on_torch.output))["operators"]}
    plain = {row["name"]: row for row in document(str(on_torch.path))["operators"]}
    for name in LAYERS:
        assert done[name]["type"] == "int8"
        assert plain[name]["type"] == "float32"
        assert done[name]["flops"] == plain[name]["flops"] > 0
        assert done[name]["weight_bytes"] < 0.6 * plain[name]["weight_bytes"]
        assert done[name]["seconds"] is not None
        assert plain[name]["seconds"] is not None


def test_the_page_names_layers_kinds_and_assumptions(model: str):
    result = inspected(model)
    assert result.exit_code == 0
    for text in (*LAYERS, "total", "outside operators", "FLOP/s", "int4 weights only", "Amdahl"):
        assert text in result.stdout


def test_what_has_no_graph_is_refused(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    spec = tmp_path / "spec.yaml"
    exports = "exports: [{format: safetensors}]\n"
    spec.write_text(f"version: 1\nname: n\nmodel: {{checkpoint: w.safetensors}}\n{exports}")
    for path, text in (
        (tmp_path / "w.safetensors", "has no graph that says how its weights are used; name an"),
        (spec, "spec.yaml:3: spec '"),
        (tmp_path / "missing", "does not exist; check its spelling"),
    ):
        result = inspected(str(path))
        assert result.exit_code == 2, path
        assert text in result.stderr
        assert "Traceback" not in result.stderr


def test_options_that_do_not_fit(tmp_path: Path, model: str):
    fixed = tmp_path / "fixed.onnx"
    onnx.save(tiny_onnx(batch=2), fixed)
    result = inspected(str(fixed), "--batch", "3")
    assert (result.exit_code, "--batch: is 3, and the model takes 2" in result.stderr) == (2, True)
    assert document(str(fixed))["batch"] == 2
    result = CliRunner().invoke(application, ["inspect", model, "--batch", "3"])
    assert (result.exit_code, "add --roofline" in result.stderr) == (2, True)


def test_a_run_that_was_changed_is_refused(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "onnx", "external-data": "always"}]
    on_onnx.run()
    data = on_onnx.output / "model.onnx.data"
    data.write_bytes(b"\1" + data.read_bytes()[1:])
    for path in (on_onnx.output, on_onnx.output / "model.onnx"):
        result = inspected(str(path))
        assert result.exit_code == 3
        assert "model.onnx.data does not match manifest.json: it was edited" in result.stderr


def test_a_run_without_an_onnx_file(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": "safetensors"}]
    on_onnx.run()
    result = inspected(str(on_onnx.output))
    assert result.exit_code == 2
    assert "holds no ONNX file" in result.stderr
    assert "add the export onnx to the spec" in result.stderr
