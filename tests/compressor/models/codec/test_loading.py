"""Reloading a compressed model: from the file, without reading it, and with clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.errors import ModelError, SpecError
from compressor.exporters import SafetensorsExporter
from compressor.files import file_sha256
from compressor.graph.skeleton import graph_as_json, graph_from_json, skeleton
from compressor.models.codec.load import _operators, check, load
from compressor.models.lazy_tensor import LazyTensor
from compressor.models.onnx.carrier import OnnxCarrier
from tests.compressor.exporters.hand_made import (
    CONTEXT,
    FEATURES,
    Builder,
    entry,
    images,
    quantized,
    rows,
    sample,
)
from tests.paths import ROOT


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_directory_and_its_files_load_alike(saved: Path, name: str, mmap: bool) -> None:
    first, second = load(saved, mmap=mmap), load(str(saved / name), mmap=mmap)
    x = torch.from_numpy(rows()["x"])
    assert not first.training
    assert torch.equal(first(x)["output"], second(x=x)["output"])


def test_it_is_the_network_that_was_saved(tmp_path: Path) -> None:
    carrier = sample("digits")
    SafetensorsExporter().write(carrier, tmp_path, CONTEXT)
    x = torch.from_numpy(images("digits")["image"])
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path)(x)["output"], carrier.module(x))


def test_quantized_layers_stay_quantized(tmp_path: Path) -> None:
    SafetensorsExporter().write(quantized(ir.DataType.INT4, None, blocks=True), tmp_path, CONTEXT)
    state = load(tmp_path).state_dict()
    assert state["first.weight"].dtype == torch.int8
    assert int(state["first.weight"].abs().max()) <= 7


def test_without_mapping_the_file_may_go_away(saved: Path) -> None:
    module = load(saved, mmap=False)
    weights = saved / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert int(module.state_dict()["first.weight"].abs().max()) > 0


def test_an_impossible_device(saved: Path) -> None:
    with pytest.raises(SpecError, match=r"device 'abacus': is not usable .*use cpu"):
        load(saved, device="abacus")


_MEASURE = """
import sys
from compressor.models.codec.load import load
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024
load(sys.argv[1])  # what the first use of the libraries takes
before = anonymous()
module = load(sys.argv[2], mmap=sys.argv[3] == "map")
print(anonymous() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 105 MB of floats, and of 105 million codes of 4 bits."""
    side, wide = 5120, 20480
    made = Builder()
    x = entry(features=side)
    weight = made.constant("first.weight", np.zeros((side, side), np.float32))
    codes = made.constant("second.weight", np.zeros((side, wide), ml_dtypes.int4))
    scale = made.constant("second.weight_scale", np.ones(wide, np.float32))
    value = made.node("MatMul", [x, weight], "first")
    floats = made.node("DequantizeLinear", [codes, scale], "floats", axis=1)
    model = made.model([x], made.node("MatMul", [value, floats], "second"), wide)
    place = tmp_path_factory.mktemp("large")
    exporter = SafetensorsExporter(sparse="never")  # these weights are nothing but zeros
    exporter.write(OnnxCarrier(model), place, CONTEXT)
    assert (place / "model.safetensors").stat().st_size > 157_000_000
    return place


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_opening_reads_no_weights(saved: Path, large: Path) -> None:
    def grown(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(saved), str(large), how],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    assert grown("map") < 20
    assert 140 < grown("read") < 180  # as in the file: codes stay packed


def test_weights_are_decoded_by_the_operators_that_need_them(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "packed"
    place.mkdir()
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    SafetensorsExporter().write(carrier, place, CONTEXT)
    x = torch.from_numpy(rows()["x"])
    modules = [load(place, dequantize=how) for how in ("on-use", "once", "once")]
    expected = modules[0](x)["output"]
    for module in modules * 2:
        assert torch.equal(module(x)["output"], expected)
        assert isinstance(module.state_dict()["first.weight"], LazyTensor)
        assert not list(module.parameters())
    moved = load(place, device="cpu").to(torch.float64)
    torch.testing.assert_close(moved(x.double())["output"].float(), expected)
    with pytest.raises(SpecError, match="dequantize 'never': is not a choice; use on-use or once"):
        load(place, dequantize="never")  # type: ignore[arg-type]


def test_the_graph_is_compiled_by_the_first_call_if_it_is_as_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def read(document: Any, subject: str) -> ir.Model:
        reads.append(subject)
        return graph_from_json(document, subject)

    monkeypatch.setattr("compressor.models.codec.reading.graph_from_json", read)
    module = load(saved)
    assert (module.input_names, module.output_names) == (("x",), ("output",))
    assert not reads
    module(torch.from_numpy(rows()["x"]))
    assert len(reads) == 1


def test_a_description_and_weights_of_two_exports_are_refused(saved: Path, tmp_path: Path) -> None:
    """Of the same shapes: nothing else would show it."""
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    path = other / "model.json"
    forge(other, {**json.loads(path.read_bytes()), "name": "other"})
    load(other)
    shutil.copy(saved / "model.safetensors", other)
    with pytest.raises(ModelError, match=r"were written with another model\.json, or this one was"):
        load(other)


def forge(saved: Path, document: Any) -> None:
    """Replace the description, and the hash of it that the weights have."""
    path, weights = saved / "model.json", saved / "model.safetensors"
    old = file_sha256(path)
    path.write_text(json.dumps(document))
    written = weights.read_bytes()
    assert old.encode() in written
    weights.write_bytes(written.replace(old.encode(), file_sha256(path).encode()))


def test_files_of_another_version_are_compiled_at_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.models.codec.reading.__version__", "99")
    monkeypatch.setattr("compressor.models.executor.compiler.NEWEST_OPSET", 20)
    with pytest.raises(ModelError, match="opset 21 is outside 13 to 20"):
        load(saved)


def test_checking_compiles_whatever_the_files_say(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(saved)
    monkeypatch.setattr("compressor.models.executor.compiler.NEWEST_OPSET", 20)
    load(saved)
    with pytest.raises(ModelError, match="opset 21 is outside 13 to 20"):
        check(saved)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model with an operator that PyTorch does not run, and four-bit weights."""
    x, made = entry(), Builder()
    codes = np.arange(FEATURES * 10).reshape(FEATURES, 10) % 16 - 8
    weight = made.constant("weight", codes.astype(ml_dtypes.int4))
    scale = made.constant("scale", np.full(10, 0.5, np.float32))
    weight = made.node("DequantizeLinear", [weight, scale], "wide", axis=1)
    picked = made.node("Hardmax", [x], "picked", axis=1)
    value = made.node("MatMul", [picked, weight], "y")
    exporter = SafetensorsExporter()
    carrier = OnnxCarrier(made.model([x], value))
    exporter.check(carrier)
    exporter.write(carrier, tmp_path, CONTEXT)
    return tmp_path


WARNING = r"model '.*' is executed by onnxruntime .* \(CPU\): PyTorch does not run Hardmax here"


def test_operators_that_pytorch_does_not_run_are_run_by_onnx_runtime(foreign: Path) -> None:
    check(foreign)
    with pytest.warns(UserWarning, match=WARNING):
        module = load(foreign)
    assert not module.training
    assert module.runtime.startswith("onnxruntime ")
    assert (module.input_names, module.output_names) == (("x",), ("output",))
    x = torch.from_numpy(rows()["x"])
    codes = (torch.arange(FEATURES * 10).reshape(FEATURES, 10) % 16 - 8) * 0.5
    expected = codes[x.argmax(1)]
    assert list(module(x)) == ["output"]
    assert torch.equal(module(x)["output"], expected)
    assert torch.equal(module(x=x)["output"], expected)
    with pytest.raises(ModelError, match="input 'x': is missing; give every input of the graph"):
        module()
    with pytest.raises(ModelError, match="input 'z': is not in the graph; give x"):
        module(x, z=x)


def test_onnx_runtime_runs_on_the_cpu_alone(foreign: Path) -> None:
    problem = (
        "device 'cuda': is not usable: the model runs in ONNX Runtime .* Hardmax here; use cpu"
    )
    with pytest.raises(SpecError, match=problem):
        load(foreign, device="cuda")


def test_the_report_names_onnx_runtime(foreign: Path) -> None:
    runner = SafetensorsExporter().open(foreign)
    assert runner.runtime.startswith("onnxruntime ")
    assert runner.run(rows())["output"].shape == (7, 10)


def test_functions_that_the_graph_holds_are_known() -> None:
    document = {
        "graph": {"node": [{"opType": "Double", "domain": "mine"}, {"opType": "Mystery"}]},
        "functions": [{"name": "Double", "domain": "mine", "node": [{"opType": "Add"}]}],
    }
    assert set(_operators(document)) == {("", "Mystery"), ("", "Add")}


def test_a_graph_survives_json() -> None:
    for carrier in (sample("cifar"), quantized(ir.DataType.INT4, None, blocks=True)):
        parts = skeleton(carrier.graph())
        text = json.dumps(graph_as_json(parts.proto))
        again = graph_from_json(json.loads(text), "graph")
        assert skeleton(again).proto.SerializeToString() == parts.proto.SerializeToString()
