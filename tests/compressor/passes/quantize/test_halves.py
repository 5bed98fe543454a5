"""Files in half precision are quantized as those of float32 are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import catalog
from compressor.errors import DataError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, ROWS, run, sqnr
from tests.compressor.passes.quantize.test_dequantize import opened
from tests.compressor.passes.quantize.test_quantized_again import applied
from tests.compressor.tiny_project import Project, onnx_project

CONTEXT = PassContext(targets=frozenset({"ort-cpu"}))
STATIC = {"pass": "quantize-static", "layers": [{"match": "*"}]}
HALVES: dict[str, tuple[int, Any]] = {
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}


def halved(model: onnx.ModelProto, half: str, *, ends: bool = True) -> onnx.ModelProto:
    """Return a model in half precision, with ``ends`` its inputs and outputs as well."""
    kind, dtype = HALVES[half]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            raw = array.astype(dtype).tobytes()
            tensor.CopyFrom(helper.make_tensor(tensor.name, kind, array.shape, raw, raw=True))
    floats = {
        value.name: value
        for value in (*graph.input, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    if ends:
        for value in floats.values():
            value.type.tensor_type.elem_type = kind
        return copy
    inner = {name: f"{name}_half" for name in floats}
    for node in graph.node:
        node.input[:] = [inner.get(name, name) for name in node.input]
        node.output[:] = [inner.get(name, name) for name in node.output]
    for value in (v for v in graph.input if v.name in inner):
        graph.node.insert(0, helper.make_node("Cast", [value.name], [inner[value.name]], to=kind))
    for value in (v for v in graph.output if v.name in inner):
        cast = helper.make_node("Cast", [inner[value.name]], [value.name], to=TensorProto.FLOAT)
        graph.node.append(cast)
    return copy


def exported(carrier: Any, folder: Path) -> Any:
    exporter = catalog.load("exporter", "onnx")()
    exporter.check(carrier)
    folder.mkdir()
    path = exporter.write(carrier, folder, ExportContext("guest", "0" * 64))[0]
    onnx.checker.check_model(str(path), full_check=True)
    return exporter.open(path)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["convolutional", "recurrent"])
@pytest.mark.parametrize(
    "declared",
    [QuantizeStatic(), QuantizeDynamic(convolutions=True), QuantizeWeights(bits=8)],
    ids=lambda declared: declared.name,
)
def test_all_passes_quantize_it(tmp_path: Path, name: str, half: str, declared: Any) -> None:
    model: onnx.ModelProto = getattr(guests, name)()
    x = IMAGES if name == "convolutional" else ROWS
    given = x.astype(HALVES[half][1])
    carrier = opened(halved(model, half), tmp_path)
    after = applied(declared.adapted(carrier, CONTEXT), declared, CONTEXT, given)
    assert {layer.dtype for layer in after.layers()} == {"int8"}
    result = exported(after, tmp_path / "out").run({"x": given})["y"]
    assert result.dtype == given.dtype
    assert sqnr(run(model, x), result.astype(np.float32)) > 32


def test_what_computes_in_float32_is_left_as_it_is(tmp_path: Path) -> None:
    carrier = opened(guests.convolutional(), tmp_path)
    for declared in (QuantizeStatic(), QuantizeDynamic(), QuantizeWeights()):
        assert declared.adapted(carrier, CONTEXT) is carrier
    half = opened(halved(guests.convolutional(), "float16"), tmp_path)
    assert QuantizeWeights().adapted(half, CONTEXT) is half  # its scales are half, too


@pytest.fixture
def project(tmp_path: Path, spine: None) -> Project:
    return onnx_project(tmp_path / "project")


@pytest.mark.parametrize("half", HALVES)
def test_a_run_from_file_to_report(project: Project, half: str) -> None:
    file = project.folder / "tiny.onnx"
    onnx.save(halved(onnx.load(file), half, ends=False), file)
    project.spec["passes"] = [
        {"pass": "fuse"},
        {"pass": "quantize-static", "layers": [{"match": "*"}]},
    ]
    plan = project.plan()
    assert [row.actions[-1] for row in plan.rows] == ["int8/channel x uint8"] * 3
    assert any("in float32 from here on" in note for note in plan.passes[1].notes)
    if half == "float16":  # a run takes seconds
        return
    report = project.run().report
    (artifact,) = [a for a in report["artifacts"] if a["format"] == "onnx"]
    assert all(check["ok"] for check in artifact["checks"])
    assert (artifact["deployed"], artifact["latency_ratio"]) == (True, None)
    assert "float model ran in PyTorch" in artifact["latency_ratio_reason"]
    carrier = report["passes"][1]
    assert all(layer["scheme"] for layer in carrier["layers"])


@pytest.mark.parametrize(
    ("half", "remedy"),
    [("float16", "$"), ("bfloat16", r" \(array.astype\(ml_dtypes.bfloat16\)\)$")],
)
def test_data_in_single_precision_are_refused(project: Project, half: str, remedy: str) -> None:
    file = project.folder / "tiny.onnx"
    onnx.save(halved(onnx.load(file), half), file)
    with pytest.raises(DataError, match=f"expects {half}; convert it in a transform{remedy}"):
        project.plan()


def test_bfloat16_files_are_opened(tmp_path: Path) -> None:
    """ONNX Runtime has no kernels for them, PyTorch has."""
    carrier = opened(halved(guests.convolutional(), "bfloat16"), tmp_path)
    assert isinstance(carrier, OnnxCarrier)
    given = IMAGES.astype(ml_dtypes.bfloat16)
    result = next(iter(carrier.runner().run({"x": given}).values()))
    assert sqnr(run(guests.convolutional(), IMAGES), result.astype(np.float32)) > 32
