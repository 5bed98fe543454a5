"""Cold starts in processes of their own."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from compressor.errors import ArtifactError
from compressor.run.artifact_file import ArtifactFile, Machinery
from compressor.run.timing import cold_rounds
from compressor.run.timing.cold_rounds import cold_starts, summarized
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.paths import ROOT

BATCH = {"x": np.zeros((1, 3), np.float32)}


def test_what_an_artifact_dies_of_is_said(save: SaveOnnx, monkeypatch: pytest.MonkeyPatch):
    path = save(operator="Unknown")
    artifact = ArtifactFile("one", path, "onnx", (path,))
    with pytest.raises(ArtifactError, match=r"artifact 'one'.* does not load it"):
        cold_starts([artifact], Machinery(), BATCH, 0.0, lambda _: None)
    monkeypatch.setattr(cold_rounds.sys, "executable", "/bin/false")
    with pytest.raises(ArtifactError, match=r"ends the process that starts it, with 1"):
        cold_starts([artifact], Machinery(), BATCH, 0.0, lambda _: None)


def test_an_onnx_file_starts_without_pytorch(
    save: SaveOnnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(cold_rounds, "ROUNDS", 1)
    path = save()
    artifact = ArtifactFile("one", path, "onnx", (path,))
    (found,) = cold_starts([artifact], Machinery(), BATCH, 0.0, lambda _: None)
    assert found["rounds"] == 1
    (tmp_path / "onnxruntime.py").write_text("import torch", encoding="utf-8")
    with pytest.raises(ArtifactError, match="PyTorch was imported"):  # the file would be seen
        cold_starts([artifact], Machinery(), BATCH, 0.0, lambda _: None)


@pytest.mark.parametrize("name", ["file", "allow_pickle", "x"])
def test_an_input_may_have_any_name(
    save: SaveOnnx, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One with the name of an argument of ``numpy.savez`` ended in an internal error."""
    monkeypatch.setattr(cold_rounds, "ROUNDS", 1)
    path = save()
    model = onnx.load(path)
    model.graph.input[0].name = name
    for node in model.graph.node:
        node.input[:] = [name if value == "x" else value for value in node.input]
    onnx.save(model, path)
    artifact = ArtifactFile("one", path, "onnx", (path,))
    (found,) = cold_starts([artifact], Machinery(), {name: BATCH["x"]}, 0.0, lambda _: None)
    assert found["rounds"] == 1


def test_medians_and_what_could_not_be_measured():
    steps = {"import": 2.0, "read_cache": 0.1, "create": 1.0, "first": 0.5, "steady": 0.001}
    starts = [
        {"seconds": {**steps, "create": s}, "memory": {"peak": 10 * s, "anonymous": s}}
        for s in (1, 2, 9)
    ]
    found = summarized(starts)
    assert found["milliseconds"]["create"] == {"median": 2000, "least": 1000, "most": 9000}
    assert found["milliseconds"]["read_disk"] is None
    assert found["memory"]["peak"] == {"median": 20, "least": 10, "most": 90}
    assert summarized([{**starts[0], "memory": None}])["memory"] is None
