"""``compress bench`` as people and programs call it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from compressor.cli.application import application
from compressor.exporters.tensorrt.exporter import TensorrtExporter
from compressor.report.pages.bench import benchmark_page
from compressor.report.terminal import plain_text
from compressor.types.proofs import sealed_text
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.compressor.tiny_project import Project
from tests.compressor.voice import MODEL, voice_model

SHORT = ("--seconds", "0", "--no-cold")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(application, ["bench", *(str(a) for a in arguments)])


def document(*arguments: object) -> Any:
    result = invoke(*arguments, *SHORT, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_artifacts_of_a_run_side_by_side(on_onnx: Project, quick: None):
    on_onnx.spec["exports"] = [{"format": f} for f in ("onnx", "safetensors", "archive")]
    on_onnx.run()
    found = document(on_onnx.output, "--batch", 1, "--batch", 8)
    assert [a["format"] for a in found["artifacts"]] == ["onnx", "safetensors", "archive"]
    base, other, _ = found["artifacts"]
    assert found["base"] == base["name"] == str(on_onnx.output / "model.onnx")
    assert found["inputs"] == [{"name": "image", "shape": ["batch", 1, 8, 8], "dtype": "float32"}]
    assert [row["batch"] for row in other["latency"]] == [1, 8]
    assert [row["ratio"] for row in base["latency"]] == [None, None]
    for row in other["latency"]:
        low, high = row["ratio"]["ci95"]
        assert 0 < low <= row["ratio"]["value"] <= high
        assert row["throughput"]["value"] == pytest.approx(1e3 * row["batch"] / row["mean"])
        assert row["openings"] == 2
    assert base["runtime"].startswith("onnxruntime")
    assert "compressor.load" in other["runtime"]
    files = (on_onnx.output / "model.safetensors", on_onnx.output / "model.json")
    assert other["bytes"] == sum(file.stat().st_size for file in files)
    assert base["cold_reason"] == "--no-cold"
    assert (base["energy"] is None) == (base["energy_reason"] is not None)


def test_a_table_for_people(save: SaveOnnx, quick: None):
    path = save()
    result = invoke(path, path, *SHORT)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "inputs: x float32 batch×3; random values"
    assert lines[3].split()[:4] == ["artifact", "runtime", "size", "batch"]
    assert lines[5].endswith("base")
    assert " onnxruntime 1." in lines[5]
    assert lines[6].startswith(f"{path} (2)")
    assert " × (" in lines[6]
    assert " to " in lines[6]


def test_an_engine_without_a_gpu_is_said_to_be_one(
    save: SaveOnnx, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TensorrtExporter, "cannot_run", property(lambda _: "no GPU here"))
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"1234")
    found = document(engine, save())
    first, second = found["artifacts"]
    assert (first["latency"], first["runtime"]) == ([], None)
    assert first["reason"] == first["cold_reason"] == first["energy_reason"] == "no GPU here"
    assert found["base"] == second["name"]
    assert f"- {engine} is not run: no GPU here" in plain_text(benchmark_page(found))
    alone = invoke(engine, *SHORT)
    assert alone.exit_code == 2
    assert alone.stderr == (
        f"error: artifact {str(engine)!r}: cannot be run here: no GPU here; "
        "name an artifact that can, or run this where it can\n"
    )


def test_over_samples_where_a_model_branches(tmp_path: Path, quick: None):
    value = helper.make_tensor_value_info
    same = helper.make_node("Identity", ["x"], ["out"])
    branch = helper.make_graph([same], "b", [], [value("out", TensorProto.FLOAT, None)])
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Cast", ["most"], ["late"], to=TensorProto.BOOL),
            helper.make_node("If", ["late"], ["y"], then_branch=branch, else_branch=branch),
        ],
        "g",
        [value("x", TensorProto.FLOAT, ["n", 3])],
        [value("y", TensorProto.FLOAT, ["n", 3])],
    )
    path = tmp_path / "exits.onnx"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    np.savez(tmp_path / "x.npz", x=np.zeros((5, 3), np.float32))
    result = invoke(
        path, "--data", tmp_path / "x.npz", "--json", "--no-cold", "--seconds", 5, "--precision", 1
    )
    found = json.loads(result.stdout)
    assert found["data"] == "x.npz"
    assert found["artifacts"][0]["latency"][0]["inputs"] == 5
    assert "- times are over 5 inputs, taken in turn" in plain_text(benchmark_page(found))
    found["artifacts"][0]["latency"][0].update(waiting=0.9, load=12.5)
    busy = "other work had the processor for 90 % of the time (load average 12.5): "
    busy += "rely on the ratios, which use processor time"
    assert busy in " ".join(plain_text(benchmark_page(found)).split())


def test_a_model_with_a_scalar_input(tmp_path: Path, quick: None):
    """The batch is that of the inputs that have one."""
    onnx.save(voice_model(), tmp_path / MODEL)
    options = ("--shape", "state=2,4,64", "--batch", 4)
    (artifact,) = document(tmp_path / MODEL, *options)["artifacts"]
    assert [row["batch"] for row in artifact["latency"]] == [4]
    feed = {"input": np.zeros((4, 512), np.float32), "sr": np.array(16000)}
    np.savez(tmp_path / "feed.npz", state=np.zeros((2, 4, 64), np.float32), **feed)
    made = document(tmp_path / MODEL, *options, "--data", tmp_path / "feed.npz")
    assert made["data"] == "feed.npz"
    np.savez(tmp_path / "feed.npz", state=np.zeros((2, 5, 64), np.float32), **feed)
    refused = invoke(tmp_path / MODEL, *options, "--data", tmp_path / "feed.npz")
    assert "array 'state': shape is [2, 5, 64], the model expects state" in refused.stderr


def test_cold_starts_in_the_document_and_the_table(save: SaveOnnx, quick: None):
    result = invoke(save(), "--seconds", 0, "--json", "--threads", 1)
    found = json.loads(result.stdout)
    cold = found["artifacts"][0]["cold"]
    assert (cold["batch"], cold["rounds"]) == (1, 1)
    steps = cold["milliseconds"]
    assert list(steps) == ["import", "read_disk", "read_cache", "create", "first", "steady"]
    assert steps["import"]["median"] > steps["steady"]["median"] > 0
    if cold["memory"] is not None:
        assert 0 < cold["memory"]["peak"]["median"] < 1e9
    assert found["threads"] == 1
    text = plain_text(benchmark_page(found))
    assert "cold start, each step timed separately; medians" in text
    assert "each artifact in its own runtime, 1 thread; intervals are of 95 %" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "compress bench: got no path; name artifacts, or a run's output folder"),
        (["none.onnx"], 2, "path 'none.onnx': does not exist; check its spelling"),
        (["MODEL", "--provider", "rocm"], 2, "invalid value for '--provider': 'rocm' is not one"),
        (["MODEL", "--batch", "0"], 2, "invalid value for '--batch'"),
        (["MODEL", "--precision", "0"], 2, "invalid value for '--precision'"),
        (["MODEL", "--shape", "x=1,9"], 2, "--shape x=1,9: does not fit x float32[batch, 3]"),
        (["MODEL", "OTHER"], 2, "takes z float32[batch, 3], and"),
        (["BROKEN"], 3, "the file is truncated or of another format"),
        (["STRANGE"], 3, "does not load it"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, save: SaveOnnx, tmp_path: Path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x08garbage")
    files = {
        "MODEL": save(),
        "OTHER": save("other.onnx", takes="z"),
        "STRANGE": save("strange.onnx", operator="Unknown"),
        "BROKEN": broken,
    }
    result = invoke(*(files.get(a, a) for a in arguments), *SHORT)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_provider_that_does_not_start(save: SaveOnnx):
    from compressor.models.onnx.runtimes import usable_providers

    if "cuda" in usable_providers():
        pytest.skip("it starts here")
    result = invoke(save(), "--provider", "cuda", *SHORT)
    assert result.exit_code == 3
    assert "use the provider cpu" in result.stderr or "does not load" in result.stderr


def test_options_that_are_lists_are_read_from_a_report(on_onnx: Project, quick: None):
    """An engine's capabilities are a tuple, which JSON has as a list."""
    on_onnx.run()
    path = on_onnx.output / "report.json"
    report = json.loads(path.read_text())
    options = {"compute-capability": ["8.6", "8.9"], "batch": {"opt": 1, "max": 8}}
    engine = {**report["artifacts"][0], "path": "model.engine", "format": "tensorrt"}
    (on_onnx.output / "model.engine").write_bytes(b"x" * engine["bytes"])
    report["artifacts"].append(engine)
    on_onnx.write_report(report)
    manifest = json.loads((on_onnx.output / "manifest.json").read_text())
    del manifest["seal"]
    manifest["spec"]["exports"].append({"format": "tensorrt", **options})
    (on_onnx.output / "manifest.json").write_text(sealed_text(manifest))
    found = document(on_onnx.output)
    assert found["artifacts"][0]["latency"]
    assert "GPU" in found["artifacts"][1]["reason"]
