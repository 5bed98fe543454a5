"""Every kind of artifact proves itself; whatever is changed in it is noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.errors import InputError, ModelError, SpecError
from compressor.exporters.archive import unpacking
from compressor.exporters.archive.index import read_index
from compressor.files import file_sha256
from compressor.lab.verify.files import checked_name
from compressor.lab.verify.verify import verify
from compressor.models.codec.headers import read_header
from compressor.models.codec.load import load
from compressor.models.onnx.checksums import onnx_checksums
from compressor.report.pages.inspect import proof_page
from compressor.report.terminal import plain_text
from compressor.run.store import Store
from compressor.types.proofs import is_sealed, sealed_text
from tests.compressor.lab.verify.proved import (
    BUILDERS,
    Flip,
    complaint,
    exported,
    files_of,
    flipped,
    hit,
    pair,
    random_flips,
)
from tests.compressor.tiny_project import onnx_project, tiny_onnx

SEED = 20261122
FEW, MANY = 12, 200
RUN_FILES = 10  # of the run below, manifest.json included


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(onnx_project(tmp_path_factory.mktemp("run")))


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """The output folder of a run, to be spoiled."""
    return shutil.copytree(template, tmp_path / "run")


def check_flips(path: Path, files: list[Path], count: int) -> None:
    hits = 0
    for flip in random_flips(files, count, SEED):
        tensor = hit(flip)
        with flipped(flip):
            said = complaint(path)
            assert flip.path.name in said or "model.json" in said, flip
            assert not tensor or repr(tensor) in said, (flip, said)
            hits += bool(tensor)
    assert verify(path).ok
    assert hits or not any(file.suffix == ".safetensors" for file in files)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_flipped_bit_is_noticed(kind: str, tmp_path: Path) -> None:
    path = BUILDERS[kind](tmp_path / kind)
    assert verify(path).ok
    check_flips(path, files_of(path), FEW)


def test_a_flipped_bit_in_a_run_is_noticed(run: Path) -> None:
    folder = run
    files = files_of(folder)
    assert len(files) == RUN_FILES
    check_flips(folder, files, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILDERS)
def test_many_flipped_bits_are_noticed(kind: str, tmp_path: Path) -> None:
    path = BUILDERS[kind](tmp_path / kind)
    for file in files_of(path):
        check_flips(path, [file], MANY)


@pytest.mark.slow
def test_many_flipped_bits_in_a_run_are_noticed(run: Path) -> None:
    folder = run
    for file in files_of(folder):
        check_flips(folder, [file], MANY)


def flips_in_the_store(folder: Path, count: int) -> None:
    store = Store(folder / ".compressor")
    with store.write("ab" * 32) as (staged, result):
        (staged / "weights.bin").write_bytes(bytes(range(200)))
        result["value"] = 3
    entry = store.folder("ab" * 32)
    for flip in random_flips([p for p in sorted(entry.rglob("*")) if p.is_file()], count, SEED):
        with flipped(flip):
            assert Store(folder / ".compressor").read("ab" * 32) is None, flip
    assert Store(folder / ".compressor").read("ab" * 32) == {"value": 3}


def test_a_flipped_bit_in_the_store_is_noticed(tmp_path: Path) -> None:
    flips_in_the_store(tmp_path, FEW)


@pytest.mark.slow
def test_many_flipped_bits_in_the_store_are_noticed(tmp_path: Path) -> None:
    flips_in_the_store(tmp_path, MANY)


def test_the_tensor_of_an_onnx_file_is_named(tmp_path: Path) -> None:
    path, proto = tmp_path / "model.onnx", tiny_onnx()
    path.write_bytes(proto.SerializeToString())
    tensors = onnx_checksums(path)["model.onnx"]
    assert list(tensors) == [tensor.name for tensor in proto.graph.initializer]
    entry = {"name": path.name, "sha256": file_sha256(path), "tensors": tensors}
    document = {"name": "n", "seed": 0, "versions": {}, "outputs": [entry], "spec": {}}
    (tmp_path / "manifest.json").write_text(sealed_text(document))
    weight = path.read_bytes().index(proto.graph.initializer[2].raw_data)
    with flipped(Flip(path, weight + 5, 3)):
        assert complaint(tmp_path) == "model.onnx changed tensor 'conv2.weight'"
    with flipped(Flip(path, path.read_bytes().index(b"logits"), 0)):
        assert "no tensor: what describes them was changed" in complaint(path)
    with flipped(Flip(path, 0, 7)):
        assert "is not an ONNX file" in complaint(path)


def test_names_in_an_onnx_file_that_are_no_text(run: Path) -> None:
    path = run / "model.onnx"
    place = path.read_bytes().index(b"location") + len("location") + 4
    with flipped(Flip(path, place, 7)):
        assert "model.onnx changed" in complaint(run)
    with flipped(Flip(path, path.read_bytes().rindex(b"conv2.weight"), 7)):
        assert "model.onnx changed" in complaint(run)


def test_the_tensor_of_external_data_is_named(run: Path) -> None:
    folder = run
    data = folder / "model.onnx.data"
    with flipped(Flip(data, 0, 0)):
        said = complaint(folder / "model.onnx")
    assert said.startswith("model.onnx.data changed tensor 'conv")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "model.json", "model.archive"])
def test_an_artifact_of_a_run_is_compared_alone(run: Path, name: str) -> None:
    folder = run
    (folder / "report.md").write_text("edited")
    (folder / "new.txt").write_text("new")
    proof = verify(folder / name)
    assert proof.ok
    assert name in {file.name for file in proof.files}
    assert len(proof.files) == (1 if name == "model.archive" else 2)
    assert complaint(folder / "manifest.json") == "report.md changed ; new.txt new "


@pytest.mark.parametrize("name", ["model.xml", "model.bin"])
def test_a_graph_of_openvino_is_compared_with_its_weights(name: str, tmp_path: Path) -> None:
    outputs = []
    for file in ("model.xml", "model.bin", "model.binary"):
        (tmp_path / file).write_text(file)
        outputs.append({"name": file, "sha256": file_sha256(tmp_path / file)})
    manifest = {"name": "x", "seed": 0, "versions": {}, "outputs": outputs, "spec": {}}
    (tmp_path / "manifest.json").write_text(sealed_text(manifest))
    assert [file.name for file in verify(tmp_path / name).files] == ["model.xml", "model.bin"]
    (tmp_path / "model.bin").write_text("damaged")
    assert complaint(tmp_path / name).startswith("model.bin changed")


def test_a_package_is_compared_file_by_file(tmp_path: Path) -> None:
    outputs, package = [], tmp_path / "model.mlpackage"
    for file in ("model.mlpackage/Manifest.json", "model.mlpackage/Data/weight.bin", "model.onnx"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
        outputs.append({"name": file, "sha256": file_sha256(tmp_path / file)})
    manifest = {"name": "x", "seed": 0, "versions": {}, "outputs": outputs, "spec": {}}
    (tmp_path / "manifest.json").write_text(sealed_text(manifest))
    (tmp_path / "model.onnx").write_text("another artifact")
    assert [f.name for f in verify(package).files] == [o["name"] for o in outputs[:2]]
    assert verify(package).ok
    (package / "Data/weight.bin").write_text("damaged")
    (package / "more").write_text("new")
    assert (
        complaint(package) == "model.mlpackage/Data/weight.bin changed ; model.mlpackage/more new "
    )


def damaged(path: Path, file: Path, byte: int) -> list[str]:
    """Return the tensors that ``compress verify --json`` lists for a file with a flipped bit."""
    with flipped(Flip(file, byte, 0)):
        result = CliRunner().invoke(application, ["verify", str(path), "--json"])
    assert result.exit_code == 3
    (state,) = (s for s in json.loads(result.stdout)["files"] if s["state"] == "changed")
    assert state["name"] == file.name
    assert all(repr(name) in state["detail"] for name in state["tensors"][:1])
    return list(state["tensors"])


@pytest.mark.parametrize("alone", [False, True])
def test_damaged_tensors_are_listed(alone: bool, run: Path) -> None:
    archive, weights, graph = (run / f"model.{end}" for end in ("archive", "safetensors", "onnx"))
    if alone:
        for name in ("manifest.json", "report.json"):
            (run / name).unlink()
    else:
        data = graph.with_name("model.onnx.data")
        assert damaged(graph, data, 0) == damaged(run, data, 0)
        assert damaged(run, data, 0)[0].startswith("conv")
    part = read_index(archive)[0].parts[0]
    lost = damaged(archive if alone else run, archive, part.chunks[0].start)
    assert lost
    assert set(lost) <= {tensor.name for tensor in part.section.tensors}
    index = archive.stat().st_size - 100
    assert damaged(archive, archive, index) == []  # nobody knows then which
    tensor = next(iter(read_header(weights).tensors.values()))
    if alone:
        archive.unlink()
    assert damaged(run, weights, tensor.offset) == [tensor.name]


def test_an_engine_lists_no_tensors(tmp_path: Path) -> None:
    path = BUILDERS["engine"](tmp_path / "engine")
    assert damaged(path, path, 5) == []


def test_an_archive_without_room_to_decode_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = BUILDERS["archive"](tmp_path / "archive")
    monkeypatch.setattr(unpacking, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(InputError, match="has room for 0; free some space"):
        verify(path)


def test_truncated_missing_new_and_swapped_files(run: Path) -> None:
    folder = run
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    assert complaint(folder) == "model.safetensors missing "
    weights.write_bytes(whole[:-1])
    assert "model.safetensors changed" in complaint(folder)
    weights.write_bytes(whole)
    (folder / "sub").mkdir()
    (folder / "sub" / "code.py").write_text("")
    assert complaint(folder) == "sub/code.py new "
    shutil.rmtree(folder / "sub")
    markdown, page = folder / "report.md", folder / "report.html"
    markdown.rename(folder / "x")
    page.rename(markdown)
    (folder / "x").rename(page)
    assert complaint(folder) == "report.md changed ; report.html changed "


def test_weights_of_another_model(tmp_path: Path) -> None:
    first, second = pair(tmp_path / "one"), BUILDERS["shards"](tmp_path / "two")
    assert verify(first / "model.safetensors").kind == "compressed model"
    shard = sorted(second.glob("*-of-*"))
    shutil.copy(shard[0], tmp_path / "kept")
    shutil.copy(shard[1], shard[0])
    assert f"{shard[0].name} changed" in complaint(second)
    shutil.copy(tmp_path / "kept", shard[0])
    assert verify(second).ok
    shard[0].unlink()
    assert f"{shard[0].name} missing" in complaint(second)


def test_a_description_that_was_edited(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    path = folder / "model.json"
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"z"', 1))
    assert "model.json changed model.safetensors was written with another one" in complaint(folder)


def test_weights_of_an_earlier_version_are_not_proved(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    document = json.loads((folder / "model.json").read_bytes())
    document["files"] = {}
    (folder / "model.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"no hash of 'model\.safetensors': an earlier version"):
        verify(folder)
    document["files"] = {"../model.safetensors": "0" * 64}
    (folder / "model.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"which is no file beside it"):
        verify(folder)


NAMES = ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "./a", "a\\b", "a\nb", "x\x1b[1m", 3]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(run: Path, name: object) -> None:
    with pytest.raises(ModelError, match="which is not a file in its folder"):
        checked_name(name, "manifest 'm'")
    path = run / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["seal"]
    content["outputs"][0]["name"] = name
    path.write_text(sealed_text(content))
    wrong = "which is not a file in its folder" if isinstance(name, str) else "outputs.0.name: "
    with pytest.raises(ModelError, match=wrong):
        verify(run)


def test_links(run: Path, tmp_path: Path) -> None:
    folder, elsewhere = run, tmp_path / "blob"
    shutil.copy(folder / "model.onnx", elsewhere)
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to(elsewhere)  # as caches of downloads have them
    assert verify(folder).ok
    elsewhere.write_bytes(b"other")
    assert "model.onnx changed" in complaint(folder)
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to("/dev/zero")
    assert "model.onnx missing" in complaint(folder)
    (folder / "model.onnx").unlink()
    os.mkfifo(folder / "model.onnx")
    assert "model.onnx missing" in complaint(folder)
    (folder / "more").symlink_to(tmp_path)
    assert "more new" in complaint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema": 1, "seal": "x"}, "its seal does not match"),
        ({"name": "n"}, "is not that of a run"),
    ],
)
def test_a_manifest_without_a_seal(
    tmp_path: Path, content: dict[str, object], message: str
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        verify(tmp_path)


def test_seals() -> None:
    text = sealed_text({"a": 1, "b": {"seal": "0" * 64}}).encode()
    assert is_sealed(text)
    assert not is_sealed(b"{}")
    for place in range(len(text)):
        other = bytearray(text)
        other[place] ^= 1
        assert not is_sealed(bytes(other))


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    for path in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(InputError, match="nothing beside it that says how its bytes must be"):
            verify(path)
    with pytest.raises(SpecError, match="does not exist"):
        verify(tmp_path / "other")


def test_the_command(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    done = CliRunner().invoke(application, ["verify", str(folder)])
    assert done.exit_code == 0
    assert "2 files, every byte unchanged" in done.stdout
    flip = read_header(folder / "model.safetensors").tensors["first.weight"].offset
    with flipped(Flip(folder / "model.safetensors", flip, 0)):
        failed = CliRunner().invoke(application, ["verify", str(folder), "--json"])
    assert failed.exit_code == 3
    document = json.loads(failed.stdout)
    assert (document["ok"], document["kind"]) == (False, "compressed model")
    (wrong,) = (file for file in document["files"] if file["state"] != "unchanged")
    assert (wrong["name"], wrong["tensors"]) == ("model.safetensors", ["first.weight"])


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = pair(Path("one"))
    flip = read_header(folder / "model.safetensors").tensors["first.weight"].offset
    with flipped(Flip(folder / "model.safetensors", flip, 0)):
        shown = plain_text(proof_page(verify(folder)))
    golden = Path(__file__).with_name("golden_verify.txt")
    assert shown == golden.read_text()


def test_what_is_proved_loads(tmp_path: Path) -> None:
    folder = pair(tmp_path / "one")
    assert verify(folder).ok
    assert load(folder)(torch.zeros(1, 64))["output"].shape[0] == 1
