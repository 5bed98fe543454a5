"""The exporter ``archive``: the safetensors artifact in one small file, and everything around."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import compressor
from compressor import catalog
from compressor.cli.application import application
from compressor.errors import ArtifactError, InputError, SpecError
from compressor.exporters import ArchiveExporter, SafetensorsExporter
from compressor.exporters.archive.unpacking import ArchiveFormat
from compressor.lab.inspect.path import inspect_path
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.cluster import Cluster
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.report.pages.plan import plan_json, plan_page
from compressor.report.terminal import plain_text
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.passes import PassContext
from tests.compressor.exporters.hand_made import Builder, entry
from tests.compressor.passes.quantize.small_models import digits, images, tokens, transformer
from tests.compressor.tiny_project import onnx_project

unpack = ArchiveFormat().unpack

CONTEXT = ExportContext("test", "0" * 64)
PLAIN = PassContext()


def clustered() -> Carrier:
    return Cluster(bits=3, group_rows=16).apply(digits(), PLAIN, {}).carrier


def grouped() -> Carrier:
    step = QuantizeWeights(bits=4, group=32, symmetric=False)
    return step.apply(transformer(), PLAIN, {}).carrier


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = ArchiveExporter().write(clustered(), tmp_path_factory.mktemp("archive"), CONTEXT)
    return path


@pytest.mark.parametrize("model", [digits, clustered, transformer, grouped])
@pytest.mark.slow
def test_it_holds_what_the_safetensors_exporter_writes(model, tmp_path: Path) -> None:
    carrier = model()
    other = SafetensorsExporter(layout="graph")
    (tmp_path / "files").mkdir()
    (tmp_path / "archive").mkdir()
    files = other.write(carrier, tmp_path / "files", CONTEXT)
    exporter = ArchiveExporter()
    exporter.check(carrier)
    (path,) = exporter.write(carrier, tmp_path / "archive", CONTEXT)
    assert [p.name for p in path.parent.iterdir()] == ["model.archive"]
    found = unpack(path, tmp_path / "out")
    assert [f.name for f in found] == [f.name for f in files]
    for file in files:
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert path.stat().st_size < exporter.predict(carrier)
    batch = images() if model in (digits, clustered) else tokens()
    (wanted,) = other.open(files[0]).run(batch).values()
    (got,) = exporter.open(path).run(batch).values()
    assert np.array_equal(got, wanted)


def test_the_same_model_gives_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    (again,) = ArchiveExporter().write(clustered(), tmp_path, CONTEXT)
    assert again.read_bytes() == archive.read_bytes()


def test_compressor_loads_it(archive: Path) -> None:
    module = compressor.load(archive)
    batch = images()
    (wanted,) = clustered().runner().run(batch).values()
    (got,) = module(torch.from_numpy(batch["image"])).values()
    assert np.allclose(got.numpy(), wanted, atol=1e-4)


def test_temporary_folders_go(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner = ArchiveExporter().open(archive)
    assert len(list(tmp_path.iterdir())) == 1
    assert runner.runtime.startswith("torch")
    runner.run(images())
    del runner
    gc.collect()
    compressor.load(archive)
    inspect_path(archive)
    assert not list(tmp_path.iterdir())


def test_damage_is_named_wherever_it_is_opened(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 4
    damaged = tmp_path / "damaged.archive"
    damaged.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"tensor '.*' .*of archive .* has another checksum"):
        ArchiveExporter().open(damaged)
    for opens in (compressor.load, inspect_path):
        with pytest.raises(InputError, match=r"tensor '.*' .*of archive .* has another checksum"):
            opens(damaged)


def test_a_model_without_a_graph_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"fc.weight": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(SpecError, match="needs a graph"):
        ArchiveExporter().check(open_checkpoint(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("exporter", [ArchiveExporter(), SafetensorsExporter(layout="graph")])
def test_a_tensor_with_the_name_of_metadata_is_refused(exporter: Exporter) -> None:
    """It was written in their place, and the file then refused as damaged."""
    made = Builder()
    weight = made.constant("__metadata__", np.ones((4, 4), np.float32))
    x = entry(features=4)
    carrier = OnnxCarrier(made.model([x], made.node("MatMul", [x, weight], "y"), 4))
    with pytest.raises(SpecError, match=r"tensor '__metadata__': has the name.*; rename it"):
        exporter.check(carrier)


def test_inspection_tells_the_bytes_that_tensors_take(archive: Path) -> None:
    contents = inspect_path(archive)
    assert contents.kind == "archive"
    assert contents.files == {"model.archive": archive.stat().st_size}  # type: ignore[union-attr]
    rows = {row.name: row for row in contents.tensors}  # type: ignore[union-attr]
    row = rows["block1.conv1.weight"]
    assert row.quantization == "cluster3/rows 16"
    assert row.bytes < np.prod(row.shape) * 3 / 8
    assert sum(r.bytes for r in rows.values()) < archive.stat().st_size


def test_the_command_unpacks(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = CliRunner().invoke(application, ["unpack", str(archive), "-o", str(out), "--json"])
    assert run.exit_code == 0
    document = json.loads(run.stdout)
    assert document["folder"] == str(out)
    assert [f["name"] for f in document["files"]] == ["model.safetensors", "model.json"]
    assert {f["name"]: f["bytes"] for f in document["files"]} == {
        p.name: p.stat().st_size for p in out.iterdir()
    }
    again = CliRunner().invoke(application, ["unpack", str(archive), "-o", str(out)])
    assert again.exit_code == 2
    assert "holds files already" in again.stderr
    one = ["unpack", str(archive), "-o", str(out), "--tensor", "head.weight", "--force"]
    forced = CliRunner().invoke(application, one)
    assert forced.exit_code == 0
    assert "model.safetensors" in forced.stderr
    assert (out / "model.safetensors").stat().st_size < 2000


@pytest.mark.parametrize(("length", "code"), [(40, 3), (-5, 3)])
def test_the_command_tells_of_damage(length: int, code: int, archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.archive"
    cut.write_bytes(archive.read_bytes()[:length])
    run = CliRunner().invoke(application, ["unpack", str(cut), "-o", str(tmp_path / "out")])
    assert run.exit_code == code
    assert "is cut" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_catalog_finds_it() -> None:
    assert catalog.load("exporter", "archive") is ArchiveExporter


def test_a_run_prunes_clusters_and_packs(tmp_path: Path) -> None:
    project = onnx_project(tmp_path / "project")
    project.spec["passes"] = [
        {"pass": "prune-magnitude", "sparsity": 0.5},
        {"pass": "cluster", "bits": 4, "importance": True},
    ]
    project.spec["exports"] = [{"format": "archive"}, {"format": "onnx"}]
    plan = project.plan()
    assert "archive   at most " in plain_text(plan_page(plan))
    first, second = plan_json(plan)["exports"]
    assert first["at_most"]
    assert not second["at_most"]
    report = project.run().report
    packed, other = report["artifacts"]
    assert packed["bytes"] == (project.output / "model.archive").stat().st_size
    assert packed["bytes"] <= packed["predicted_bytes"] == first["bytes"]
    assert packed["metric"]["value"] == other["metric"]["value"]
    assert not packed["deployed"]
    rows = report["passes"][1]["layers"]
    assert {row["scheme"] for row in rows} == {"cluster4/tensor"}
    pruned = [row["sparsity"] for row in report["passes"][0]["layers"]]
    assert [row["sparsity"] for row in rows] == pytest.approx(pruned, abs=15)
    assert all(row["sparsity"] >= before for row, before in zip(rows, pruned, strict=True))
    before = project.artifacts()
    assert project.run(fresh=True).report["ok"] == report["ok"]
    assert project.artifacts() == before
