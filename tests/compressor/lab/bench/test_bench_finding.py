"""What lies at a path, and how it is told."""

import json
from pathlib import Path

import pytest

from compressor.errors import CompressorError, ExitCode
from compressor.lab.bench.finding import find_artifacts
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.compressor.tiny_project import Project


def found(*paths: Path) -> list[tuple[str, str, list[str]]]:
    return [(a.name, a.format, [f.name for f in a.files]) for a in find_artifacts(paths)]


def refusal(*paths: Path) -> CompressorError:
    with pytest.raises(CompressorError) as caught:
        find_artifacts(paths)
    return caught.value


def test_files_are_known_by_their_names(tmp_path: Path, save: SaveOnnx):
    model, engine, archive = save(), tmp_path / "model.engine", tmp_path / "model.archive"
    engine.write_bytes(b"1234")
    archive.write_bytes(b"123")
    assert found(model, engine, archive) == [
        (str(model), "onnx", ["model.onnx"]),
        (str(engine), "tensorrt", ["model.engine"]),
        (str(archive), "archive", ["model.archive"]),
    ]
    assert find_artifacts([engine])[0].bytes == 4


def test_the_manifest_of_another_program_says_nothing(tmp_path: Path, save: SaveOnnx):
    (tmp_path / "manifest.json").write_text('{"icons": []}')
    assert found(save())


def test_the_same_file_twice_has_two_names(save: SaveOnnx):
    model = save()
    assert [name for name, _, _ in found(model, model)] == [str(model), f"{model} (2)"]


def test_a_run_is_all_that_it_exported(on_onnx: Project):
    on_onnx.spec["exports"] = [
        {"format": "onnx", "target": "openvino"},
        {"format": "safetensors", "sparse": "never"},
    ]
    on_onnx.run()
    output = on_onnx.output
    assert found(output) == [
        (str(output / "model.onnx"), "onnx", ["model.onnx"]),
        (str(output / "model.safetensors"), "safetensors", ["model.safetensors", "model.json"]),
    ]
    options = find_artifacts([output])[1].options
    assert options["sparse"] == "never"
    for path in (output / "model.json", output / "model.safetensors"):
        assert found(path) == [(str(path), "safetensors", ["model.json", "model.safetensors"])]
    report = json.loads((output / "report.json").read_text())
    on_onnx.write_report({**report, "artifacts": [{}]})
    assert "has a report or manifest this version cannot read" in str(refusal(output))
    on_onnx.write_report(report)
    whole = (output / "model.onnx").read_bytes()
    (output / "model.onnx").write_bytes(whole + b"\0")
    for path in (output, output / "model.onnx"):
        assert "model.onnx does not match manifest.json: it was edited" in str(refusal(path))
    (output / "model.onnx").write_bytes(whole)
    weights = (output / "model.safetensors").read_bytes()
    (output / "model.safetensors").write_bytes(weights[:-1] + b"\1")
    for path in (output / "model.json", output / "model.safetensors"):
        assert "model.safetensors does not match manifest.json" in str(refusal(path))
    assert found(output / "model.onnx")
    (output / "model.safetensors").write_bytes(weights)
    (output / "model.onnx").unlink()
    assert "lacks 'model.onnx'; run its spec again" in str(refusal(output))
    (output / "report.json").unlink()
    assert found(output) == [(str(output), "safetensors", ["model.json", "model.safetensors"])]


def test_what_is_no_artifact(tmp_path: Path):
    (tmp_path / "model.bin").write_bytes(b"1")
    (tmp_path / "report.json").write_text("{")
    messages = {
        tmp_path / "none.onnx": "does not exist; check its spelling",
        tmp_path / "model.bin": "is not recognized as an artifact by its name; formats are",
        tmp_path: "cannot be read",
        tmp_path / "report.json": "is not recognized as an artifact by its name",
    }
    for path, message in messages.items():
        assert message in str(refusal(path)), path
    (tmp_path / "report.json").unlink()
    assert "is a folder without report.json and without model.json or config.json" in str(
        refusal(tmp_path)
    )
    assert refusal().exit_code == ExitCode.BAD_SPEC
    assert "got no path; name artifacts, or a run's output folder" in str(refusal())


def test_a_cut_onnx_file(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x08garbage")
    error = refusal(path)
    assert error.exit_code == ExitCode.BAD_INPUT
    assert "the file is truncated or of another format" in str(error)
