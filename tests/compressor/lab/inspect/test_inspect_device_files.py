"""Files for phones and other runtimes: their weights are those of the ONNX file."""

from __future__ import annotations

import json
import random
import shutil
from math import prod
from pathlib import Path

import pytest

from compressor import catalog
from compressor.errors import ModelError, SpecError
from compressor.lab.inspect import coreml
from compressor.lab.inspect.contents import ModelContents, contents_json
from compressor.lab.inspect.executorch import XNNPACK_NODES
from compressor.lab.inspect.litert import _TYPES, OPERATORS
from compressor.lab.inspect.path import inspect_path
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.report.pages.inspect import contents_page
from compressor.report.terminal import plain_text
from compressor.types.carrier import Carrier
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.exporters.test_litert import TARGET, Network, noise, opened
from tests.compressor.passes.quantize.static_models import statistics

SIZE = (3, 24, 24)
FILES = {
    "litert": ("model.tflite", "LiteRT file", "CONV_2D"),
    "ort": ("model.ort", "ONNX Runtime model", "com.microsoft.QLinearConv"),
    "openvino": ("model.xml", "OpenVINO model", "Convolution"),
    "coreml": ("model.mlpackage", "Core ML package", "conv"),
    "executorch": ("model.pte", "ExecuTorch program", "xnnpack.Conv2d"),
}
PACKAGES = {"coreml": "coremltools", "executorch": "executorch", "litert": "ai_edge_litert"}
SLOW = pytest.mark.slow  # their compilers take long to import
FORMATS = (
    "litert", "ort", "openvino", *(pytest.param(f, marks=SLOW) for f in ("coreml", "executorch")),
)  # fmt: skip


@pytest.fixture(scope="module")
def carriers() -> tuple[Carrier, Carrier]:
    """A network in 8 bits, and in floats."""
    network = Fuse().apply(opened(Network(), *SIZE), TARGET, {}).carrier
    declared = QuantizeStatic()
    found = statistics(declared, network, TARGET, [noise(16, *SIZE, seed=3)])
    return declared.apply(network, TARGET, found).carrier, network


def written(format: str, carrier: Carrier, folder: Path) -> Path:
    pytest.importorskip(PACKAGES.get(format, "onnx"))
    catalog.load("exporter", format)().write(carrier, folder, CONTEXT)
    return folder / FILES.get(format, ("model.onnx",))[0]


def inspected(path: Path) -> ModelContents:
    contents = inspect_path(path)
    assert isinstance(contents, ModelContents)
    return contents


def weights(contents: ModelContents) -> list[tuple[int, str, float | None]]:
    """Return the size, form and zeros of weights, whose axes stand in another order."""
    rows = [row for row in contents.tensors if prod(row.shape) > 12]
    return sorted((prod(row.shape), row.dtype, row.zeros) for row in rows)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_those_of_the_onnx_file(
    format: str, carriers: tuple[Carrier, Carrier], tmp_path: Path
) -> None:
    name, kind, operator = FILES[format]
    for place, carrier in enumerate(carriers):
        folder = tmp_path / str(place)
        folder.mkdir()
        contents = inspected(written(format, carrier, folder))
        assert (contents.kind, contents.path) == (kind, str(folder / name))
        assert weights(contents) == weights(inspected(written("onnx", carrier, folder)))
        assert contents.graph is not None
        (taken,), (given,) = contents.graph.inputs, contents.graph.outputs
        assert (taken.name, taken.shape[1:], taken.dtype) == ("x", SIZE, "float32")
        assert (given.shape[1:], given.dtype) == ((5,), "float32")
        forms = {row.quantization for row in contents.tensors if prod(row.shape) > 12}
        # Where codes become floats by ordinary operators, ONNX Runtime's file has only those.
        assert forms - {"int8"} == ({"int8/channel"} if place == 0 else {""})
        shown = plain_text(contents_page(contents))
        if place == 0:
            assert contents.graph.operators[operator] == (5 if format in ("ort", "coreml") else 4)
            assert "int8/channel" in shown
            assert "MACs" not in shown  # of such operators none are counted
        json.dumps(contents_json(contents), allow_nan=False)


def test_weights_of_openvino_lead_to_its_graph(
    carriers: tuple[Carrier, Carrier], tmp_path: Path
) -> None:
    path = written("openvino", carriers[0], tmp_path)
    assert inspected(path.with_suffix(".bin")) == inspected(path)
    path.with_suffix(".bin").unlink()
    with pytest.raises(ModelError, match="beyond its weights"):
        inspected(path)
    path.write_text('<!DOCTYPE net [<!ENTITY a "b">]><net><layers/></net>')
    with pytest.raises(ModelError, match="it declares a document type"):
        inspected(path)
    path.write_text("<model/>")
    with pytest.raises(ModelError, match="its root is 'model', without layers"):
        inspected(path)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused_or_read(
    format: str, carriers: tuple[Carrier, Carrier], tmp_path: Path
) -> None:
    path = written(format, carriers[0], tmp_path)
    file = path if path.is_file() else path / "Data/com.apple.CoreML/model.mlmodel"
    data, rng, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 4))):
            changed[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        file.write_bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            json.dumps(contents_json(inspected(path)), allow_nan=False)
        except ModelError:
            refused += 1
    assert refused > 20
    file.write_bytes(b"")
    with pytest.raises(ModelError):
        inspected(path)


def test_names_are_those_of_the_schemas() -> None:
    schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
    for ours, theirs in ((OPERATORS, schema.BuiltinOperator), (_TYPES, schema.TensorType)):
        names = {number: name for name, number in vars(theirs).items() if isinstance(number, int)}
        assert [names[n].lower() for n in range(len(ours))] == [name.lower() for name in ours]
    found = pytest.importorskip("executorch").__path__[0]
    text = Path(found, "backends/xnnpack/serialization/schema.fbs").read_text("utf-8")
    listed = text.partition("union XNodeUnion {")[2].partition("}")[0].split(",")
    names = [entry.partition(":")[0].strip().removeprefix("XNN") for entry in listed]
    assert tuple(filter(None, names)) == XNNPACK_NODES


@SLOW
def test_packages_hold_no_date_and_name_files_of_their_own(
    carriers: tuple[Carrier, Carrier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("coreml", carriers[1], tmp_path)
    assert not [key for key in inspected(path).metadata if "date" in key]
    manifest = json.loads((path / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = "../../../x"
    (path / "Manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="names a file outside of it"):
        inspected(path)
    shutil.rmtree(path / "Data")
    monkeypatch.setattr(coreml, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"needs the package coremltools.*compressor\[coreml\]"):
        inspect_path(path)
