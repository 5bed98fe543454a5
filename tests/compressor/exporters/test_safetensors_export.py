"""What the safetensors exporter writes, read by the safetensors library and loaded again."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from compressor import __version__
from compressor.errors import ArtifactError, SpecError
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.graph.skeleton import Skeleton
from compressor.models.codec.writing import GraphPlan
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.carrier import Capability
from compressor.types.layers import Scheme, WeightCodes
from compressor.types.tensors import Batch
from tests.compressor.exporters.hand_made import (
    CLASSES,
    CONTEXT,
    FEATURES,
    HIDDEN,
    Builder,
    entry,
    images,
    quantized,
    rows,
    sample,
    worst,
)
from tests.compressor.graph.random_codes import FORMS, SCHEMES, random_codes, text
from tests.compressor.passes.quantize.small_models import graph, noise

TYPES = [
    (ir.DataType.INT8, ir.DataType.INT8, False),
    (ir.DataType.UINT8, ir.DataType.UINT8, False),
    (ir.DataType.INT4, None, True),
    (ir.DataType.UINT4, None, True),
    (ir.DataType.FLOAT8E4M3FN, None, False),
]


@pytest.mark.parametrize("name", ["digits", pytest.param("cifar", marks=pytest.mark.slow)])
def test_float_networks_compute_the_same(name: str, tmp_path: Path) -> None:
    carrier, made = sample(name), SafetensorsExporter()
    checked = made.checked_bytes(carrier)
    weights, description = made.write(carrier, tmp_path, CONTEXT)
    assert (weights.name, description.name) == ("model.safetensors", "model.json")
    for count in (1, 7):
        batch = images(name, count)
        assert worst(made.open(weights).run(batch), carrier.runner().run(batch)) < 1e-4
    state = carrier.module.state_dict()
    stored = load_file(weights)
    for key, value in stored.items():
        if key in state:
            assert torch.equal(value, state[key])
    size = weights.stat().st_size + description.stat().st_size
    assert checked == made.predict(carrier)
    assert abs(checked - size) < 0.001 * size
    assert made.open(tmp_path).runtime == f"torch {torch.__version__} (compressor.load)"


@pytest.mark.parametrize(("weights", "activations", "blocks"), TYPES)
def test_quantized_graphs_compute_the_same(
    weights: ir.DataType, activations: ir.DataType | None, blocks: bool, tmp_path: Path
) -> None:
    carrier = quantized(weights, activations, activation_zero=0, blocks=blocks)
    made = SafetensorsExporter()
    made.check(carrier)
    path = made.write(carrier, tmp_path, CONTEXT)[0]
    graph = tmp_path / "onnx"
    graph.mkdir()
    plain = unoptimized(OnnxExporter().write(carrier, graph, CONTEXT)[0])
    assert worst(made.open(path).run(rows()), plain) < 1e-5
    assert worst(made.open(path).run(rows()), carrier.runner().run(rows())) < 1e-2


def unoptimized(path: Path) -> Batch:
    """Run in ONNX Runtime as the graph says: its fused integer kernels round differently."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return {"output": session.run(["output"], rows())[0]}


def test_the_description(tmp_path: Path) -> None:
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    path = SafetensorsExporter().write(carrier, tmp_path, CONTEXT)[1]
    document = json.loads(path.read_bytes())
    assert list(document) == [
        "format",
        "schema",
        "inputs",
        "outputs",
        "weights",
        "files",
        "tensors",
        "graph",
    ]
    assert (document["format"], document["schema"]) == ("compressor", 1)
    assert document["weights"] == "model.safetensors"
    assert document["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", FEATURES]}]
    assert document["outputs"][0]["shape"] == ["batch", CLASSES]
    assert list(document["files"]) == ["model.safetensors"]
    parts = load_file(tmp_path / "model.safetensors")
    weight = {"dtype": "int4", "shape": [FEATURES, HIDDEN], "packed": 2}
    summed = f"{zlib.crc32(parts['first.weight'].numpy()):08x}"
    assert document["tensors"]["first.weight"] == {**weight, "crc32": summed}
    bias = {"dtype": "float32", "shape": [HIDDEN]}
    assert document["tensors"]["first.bias"].items() >= bias.items()
    for listed in document["graph"]["graph"]["initializer"]:
        assert set(listed) <= {"name", "dims", "dataType"}
    assert b", " not in path.read_bytes()


def test_codes_of_4_bits_lie_two_in_a_byte(tmp_path: Path) -> None:
    carrier = quantized(ir.DataType.INT4, None, blocks=True)
    path = SafetensorsExporter().write(carrier, tmp_path, CONTEXT)[0]
    with safe_open(path, framework="pt") as file:
        described = hashlib.sha256((tmp_path / "model.json").read_bytes()).hexdigest()
        assert file.metadata() == {
            "format": "compressor",
            "name": "a-test",
            "description": described,
            "version": __version__,
        }
        packed = file.get_tensor("first.weight")
    assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (FEATURES * HIDDEN // 2,))
    value = carrier.graph().graph.initializers["first.weight"].const_value
    assert value is not None
    codes = value.numpy().astype(np.int8).ravel()
    assert torch.equal(packed & 15, torch.from_numpy((codes[0::2] & 15).astype(np.uint8)))
    assert torch.equal(packed >> 4, torch.from_numpy((codes[1::2] & 15).astype(np.uint8)))


def test_small_tensors_of_nodes_stay_in_the_graph(tmp_path: Path) -> None:
    x, made = entry(), Builder()
    half = made.node("Constant", [], "half", value=ir.tensor(np.float32(0.5)))
    table = made.node("Constant", [], "table", value=ir.tensor(np.ones(FEATURES, np.float32)))
    value = made.node("Mul", [made.node("Add", [x, table], "sum"), half], "y")
    carrier = OnnxCarrier(made.model([x], value, FEATURES))
    weights, description = SafetensorsExporter().write(carrier, tmp_path, CONTEXT)
    assert set(load_file(weights)) == {"table"}
    document = json.loads(description.read_bytes())
    attribute = document["graph"]["graph"]["node"][0]["attribute"][0]
    assert np.frombuffer(base64.b64decode(attribute["t"]["rawData"]), np.float32)[0] == 0.5
    batch = rows()
    got = SafetensorsExporter().open(weights).run(batch)
    np.testing.assert_allclose(got["output"], (batch["x"] + 1) / 2, rtol=1e-6)


_DTYPES = st.sampled_from(
    [
        *(np.float32, np.float16, np.int64, np.int8, np.uint8, np.bool_, np.float64),
        *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.uint2),
        ml_dtypes.float8_e4m3fn,
    ]
)
_SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(_DTYPES, _SHAPES), max_size=6))
def test_the_container_is_what_the_library_reads(entries: dict[str, Any]) -> None:
    tensors = {
        name: ir.tensor(np.ones(shape, np.float32).astype(dtype))
        for name, (dtype, shape) in entries.items()
        if name != "__metadata__"
    }
    with tempfile.TemporaryDirectory() as directory:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="empty")
        model = ir.Model(graph, ir_version=10)
        parts = Skeleton(ir.to_proto(model), tensors, {})
        plan = GraphPlan(model, parts, "x", sparse=False, max_shard_size=None)
        files = plan.write(Path(directory))
        assert sum(f.stat().st_size for f in files) == plan.nbytes
        stored = load_file(files[0])
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert bytes(stored[name].flatten().view(torch.uint8).numpy()) == tensor.tobytes()
            assert stored[name].data_ptr() % stored[name].element_size() == 0


def test_nothing_lazy_is_evaluated_before_writing(tmp_path: Path) -> None:
    carrier = quantized(lazy=True)
    calls: list[str] = []
    for name in ("first.weight", "second.weight"):
        value = carrier.graph().graph.initializers[name]
        tensor = value.const_value
        assert isinstance(tensor, ir.LazyTensor)
        made = tensor.raw
        value.const_value = ir.LazyTensor(
            lambda name=name, made=made: (calls.append(name), made())[1],
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.shape),
        )
    exporter = SafetensorsExporter()
    exporter.check(carrier)
    size = exporter.predict(carrier)
    assert not calls
    files = exporter.write(carrier, tmp_path, CONTEXT)
    assert sorted(calls) == ["first.weight", "second.weight"]
    assert abs(size - sum(f.stat().st_size for f in files)) < 100


def test_a_lazy_tensor_of_the_wrong_size_is_found(tmp_path: Path) -> None:
    carrier = quantized(lazy=True)
    carrier.graph().graph.initializers["first.weight"].const_value = ir.LazyTensor(
        lambda: ir.tensor(np.zeros(3, np.int8)),
        dtype=ir.DataType.INT8,
        shape=ir.Shape((FEATURES, HIDDEN)),
    )
    with pytest.raises(ArtifactError, match=r"first\.weight.*3 bytes"):
        SafetensorsExporter().write(carrier, tmp_path, CONTEXT)


def test_what_cannot_be_loaded_is_refused() -> None:
    x, made = entry(), Builder()
    carrier = OnnxCarrier(made.model([x], made.node("Mystery", [x], "y", "com.example"), FEATURES))
    with pytest.raises(SpecError, match=r"Mystery.*leave out this export"):
        SafetensorsExporter().check(carrier)
    x, made = entry(), Builder()
    words = made.constant("words", np.array(["a", "b"], object))
    value = made.node("Identity", [words], "y")
    with pytest.raises(SpecError, match="tensor 'words': is string"):
        SafetensorsExporter().check(OnnxCarrier(made.model([x], value, FEATURES)))


def test_a_carrier_without_graph() -> None:
    class Bare:
        kind = "checkpoint"
        offers = frozenset({Capability.WEIGHTS})

    with pytest.raises(SpecError, match="needs a graph, but a checkpoint model has none"):
        SafetensorsExporter(layout="graph").check(Bare())  # type: ignore[arg-type]


def test_outputs_in_bfloat16(tmp_path: Path) -> None:
    x, made = entry(), Builder()
    half = made.node("Cast", [x], "half", to=int(ir.DataType.BFLOAT16))
    weight = made.constant("fc.weight", np.ones((FEATURES, 8), ml_dtypes.bfloat16))
    model = made.model([x], made.node("MatMul", [half, weight], "y"), 8)
    model.graph.outputs[0].dtype = ir.DataType.BFLOAT16
    path = SafetensorsExporter().write(OnnxCarrier(model), tmp_path, CONTEXT)[0]
    batch = rows()
    got = SafetensorsExporter().open(path).run(batch)["output"]
    assert got.dtype == ml_dtypes.bfloat16
    assert worst({"y": got.astype(np.float32)[:, :1]}, {"y": batch["x"].sum(1)[:, None]}) < 0.02


def test_arrays_that_the_model_does_not_take_are_ignored(tmp_path: Path) -> None:
    path = SafetensorsExporter().write(quantized(), tmp_path, CONTEXT)[0]
    batch = rows()
    batch["x"].flags.writeable = False
    label = np.zeros(7, np.int64)
    assert set(SafetensorsExporter().open(path).run({**batch, "label": label})) == {"output"}


def test_an_artifact_that_does_not_load(tmp_path: Path) -> None:
    path = SafetensorsExporter().write(quantized(), tmp_path, CONTEXT)[0]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ArtifactError, match="the file is truncated or damaged"):
        SafetensorsExporter().open(path)
    path.unlink()
    with pytest.raises(ArtifactError, match="do not exist"):
        SafetensorsExporter().open(tmp_path)


def test_latency_is_judged_where_it_is_that_of_the_device() -> None:
    assert SafetensorsExporter().not_judged
    assert OnnxExporter(target="tensorrt").not_judged
    assert not OnnxExporter().not_judged
    assert SafetensorsExporter().targets == frozenset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_of_every_scheme_are_loaded_as_they_were(
    form: str, scheme: Scheme, tmp_path: Path
) -> None:
    carrier = graph(text(form), {"fc.weight": noise(*FORMS[form][1])})
    (layer,) = carrier.layers()
    codes = random_codes(layer, scheme)
    carrier = carrier.with_codes({"fc.weight": WeightCodes(layer, scheme, lambda _: codes)})
    made = SafetensorsExporter(layout="graph")
    made.check(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    assert (
        abs(made.predict(carrier) - sum(f.stat().st_size for f in files)) <= 16
    )  # the name's length
    batch = {"x": noise(5, 64, seed=1)}
    loaded = made.open(files[0]).run(batch)
    plain = batch["x"].astype(np.float64) @ codes.dequantize().double().numpy().T
    assert worst(loaded, {"y": plain}) < 1e-5
    assert worst(loaded, carrier.runner().run(batch)) < 1e-5
    with safe_open(files[0], framework="pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    tables = 16 * (scheme.element == "e2m1") + 1024 * (scheme.scale_type == "e8m0")
    assert stored == scheme.nbytes(48, 64) + tables
