"""What the ONNX exporter writes: the same function, the promised form, the predicted size."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.exporters.onnx import exporter
from compressor.exporters.onnx.file import lay_out, write_layout
from compressor.exporters.onnx.opsets import newest_opset
from compressor.graph.skeleton import Skeleton, skeleton
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.types.carrier import Capability
from tests.compressor.exporters.hand_made import (
    CLASSES,
    CONTEXT,
    FEATURES,
    HIDDEN,
    Builder,
    codes,
    entry,
    images,
    node_by_node,
    quantized,
    rows,
    sample,
    stored,
    worst,
)
from tests.paths import ROOT

TYPES = [
    (ir.DataType.INT8, ir.DataType.INT8, False),
    (ir.DataType.INT8, ir.DataType.UINT8, False),
    (ir.DataType.UINT8, ir.DataType.UINT8, False),
    (ir.DataType.INT4, None, True),
    (ir.DataType.UINT4, None, True),
    (ir.DataType.FLOAT8E4M3FN, None, False),
]


def total(files: tuple[Path, ...]) -> int:
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", ["digits", "cifar"])
@pytest.mark.parametrize("opset", [18, 20, 21, 25, newest_opset()])
def test_float_networks_compute_the_same_at_every_opset(
    name: str, opset: int, tmp_path: Path
) -> None:
    carrier = sample(name)
    made = OnnxExporter(opset=opset)
    checked = made.checked_bytes(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    assert [f.name for f in files] == ["model.onnx"]
    model = onnx.load(files[0])
    assert {o.domain: o.version for o in model.opset_import} == {"": opset}
    for count in (1, 7):
        batch = images(name, count)
        assert worst(made.open(files[0]).run(batch), carrier.runner().run(batch)) < 1e-4
    axis = model.graph.input[0].type.tensor_type.shape.dim[0]
    assert axis.dim_param == "batch"
    assert checked == made.predict(carrier)
    assert abs(checked - total(files)) < 0.001 * total(files)


@pytest.mark.parametrize(("weights", "activations", "blocks"), TYPES)
def test_quantized_graphs_compute_the_same(
    weights: ir.DataType, activations: ir.DataType | None, blocks: bool, tmp_path: Path
) -> None:
    zero = 128 if activations == ir.DataType.UINT8 else 0
    carrier = quantized(weights, activations, activation_zero=zero, blocks=blocks)
    made = OnnxExporter()
    made.check(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    # Products of codes are computed exactly, in integers.
    exact = activations in (ir.DataType.UINT8, ir.DataType.INT8) and not blocks
    expected = node_by_node(carrier, rows()) if exact else carrier.runner().run(rows())
    assert worst(made.open(files[0]).run(rows()), expected) < 1e-4
    tensor = stored(files[0])["first.weight"]
    packed = weights == ir.DataType.INT4 and activations is None
    assert tensor.data_type == int(ir.DataType.UINT8 if packed else weights)
    assert len(tensor.raw_data) == FEATURES * HIDDEN * weights.bitwidth // 8
    assert abs(made.predict(carrier) - total(files)) < 0.02 * total(files)


@pytest.mark.parametrize("opset", [17, 19, 23, newest_opset()])
def test_quantized_graphs_change_opset(opset: int, tmp_path: Path) -> None:
    carrier = quantized(activation_zero=3)
    made = OnnxExporter(opset=opset)
    made.check(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    assert worst(made.open(files[0]).run(rows()), node_by_node(carrier, rows())) < 1e-4
    assert abs(made.predict(carrier) - total(files)) < 0.02 * total(files)


def test_an_onnx_file_goes_through(tmp_path: Path) -> None:
    original = tmp_path / "in.onnx"
    ir.save(quantized(activation_zero=5).graph(), original)
    carrier = open_onnx(original, 21)
    out = tmp_path / "out"
    out.mkdir()
    files = OnnxExporter().write(carrier, out, CONTEXT)
    assert worst(OnnxExporter().open(files[0]).run(rows()), node_by_node(carrier, rows())) < 1e-6


def test_the_file_says_where_it_is_from_and_nothing_more(tmp_path: Path) -> None:
    carrier = OnnxCarrier(quantized().graph().clone())
    node = carrier.graph().graph.node(0)
    node.doc_string = "/home/somebody/train.py"
    node.metadata_props["pkg.torch.onnx.stack_trace"] = "File /home/somebody/train.py"
    carrier.graph().doc_string = "secret"
    path = OnnxExporter().write(carrier, tmp_path, CONTEXT)[0]
    model = onnx.load(path)
    notes = {entry.key: entry.value for entry in model.metadata_props}
    assert model.producer_name == "compressor"
    assert [notes[f"compressor.{key}"] for key in ("name", "spec", "target")] == [
        "a-test",
        "ab" * 32,
        "ort-cpu",
    ]
    assert model.ir_version == 10
    assert not model.graph.value_info
    names = [t.name for t in model.graph.initializer]
    assert names == sorted(names)
    for leaked in (b"somebody", b"secret", str(tmp_path).encode()):
        assert leaked not in path.read_bytes()


@pytest.mark.parametrize("opset", [11, 21])
def test_what_a_file_notes_of_itself_stays(tmp_path: Path, opset: int) -> None:
    """Text recognizers hold their characters there, detectors the names of classes."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opsets = [helper.make_opsetid("", opset)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    theirs = {"character": "a\nb", "name": "yolo", "spec": "run 17", "target": "plant 3"}
    helper.set_model_props(proto, theirs)
    onnx.save(proto, tmp_path / "in.onnx")
    carrier = open_onnx(tmp_path / "in.onnx", 21)
    path = OnnxExporter().write(carrier, tmp_path, CONTEXT)[0]
    notes = [(entry.key, entry.value) for entry in onnx.load(path).metadata_props]
    assert dict(notes) | theirs == dict(notes)
    assert len(notes) == len(dict(notes)) == 8


def test_exporting_does_not_change_the_model(tmp_path: Path) -> None:
    carrier = quantized()
    before = ir.to_proto(carrier.graph()).SerializeToString(deterministic=True)
    OnnxExporter(opset=17).write(carrier, tmp_path, CONTEXT)
    assert ir.to_proto(carrier.graph()).SerializeToString(deterministic=True) == before


def exported(root: Path) -> list[str]:
    """Export two models in three ways; return the files' names and digests."""
    root.mkdir()
    found = []
    for number, carrier in enumerate((sample("digits"), quantized())):
        for made in (OnnxExporter(), OnnxExporter(opset=18), SafetensorsExporter()):
            place = root / f"{number}-{made.format}-{getattr(made, 'opset', 0)}"
            place.mkdir()
            for file in made.write(carrier, place, CONTEXT):
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                found.append(f"{place.name} {file.name} {digest}")
    return found


_EXPORT = """
import sys
from pathlib import Path
from tests.compressor.exporters.test_onnx_export import exported
print("\\n".join(exported(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Strings are hashed in another way there than here, where it is by chance."""
    seed = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "0"
    done = subprocess.run(
        [sys.executable, "-c", _EXPORT, str(tmp_path / "other")],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = exported(tmp_path / "here")
    assert done.stdout.splitlines() == here
    assert len(here) == 8


def test_nothing_lazy_is_evaluated_before_writing(tmp_path: Path) -> None:
    carrier = quantized(lazy=True)
    evaluated: list[str] = []
    for name, value in carrier.graph().graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.LazyTensor):
            made = tensor.raw
            value.const_value = ir.LazyTensor(
                lambda name=name, made=made: (evaluated.append(name), made())[1],
                dtype=tensor.dtype,
                shape=ir.Shape(tensor.shape),
            )
    made = OnnxExporter(opset=19, target="tensorrt")
    made.check(carrier)
    size = made.predict(carrier)
    assert not evaluated
    files = made.write(carrier, tmp_path, CONTEXT)
    assert sorted(evaluated) == ["first.weight", "second.weight"]
    assert abs(size - total(files)) < 0.01 * total(files)


def test_a_lazy_tensor_of_the_wrong_size_is_found(tmp_path: Path) -> None:
    carrier = quantized(lazy=True)
    value = carrier.graph().graph.initializers["first.weight"]
    value.const_value = ir.LazyTensor(
        lambda: ir.tensor(np.zeros((3, 3), np.int8)),
        dtype=ir.DataType.INT8,
        shape=ir.Shape((FEATURES, HIDDEN)),
    )
    with pytest.raises(ArtifactError, match=r"first\.weight.*9 bytes"):
        OnnxExporter().write(carrier, tmp_path, CONTEXT)


@pytest.mark.parametrize("blocks", [False, True])
def test_external_data(blocks: bool, tmp_path: Path) -> None:
    carrier = quantized(ir.DataType.INT4 if blocks else ir.DataType.INT8, None, blocks=blocks)
    made = OnnxExporter.model_validate({"external-data": "always"})
    made.check(carrier)
    files = made.write(carrier, tmp_path, CONTEXT)
    assert [f.name for f in files] == ["model.onnx", "model.onnx.data"]
    assert abs(made.predict(carrier) - total(files)) < 0.02 * total(files)
    assert worst(made.open(files[0]).run(rows()), carrier.runner().run(rows())) < 1e-4
    inside = {t.name for t in onnx.load(files[0], load_external_data=False).graph.initializer}
    assert "second.bias" in inside
    with files[1].open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(ArtifactError):
        made.open(files[0])


def test_external_data_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    carrier = quantized()
    small = OnnxExporter(external_from=30_000)
    assert len(small.write(carrier, tmp_path, CONTEXT)) == 2
    monkeypatch.setattr(exporter, "PROTOBUF_LIMIT", 30_000)
    small.check(carrier)
    with pytest.raises(SpecError, match="set external-data: auto"):
        OnnxExporter(external_data="never").check(carrier)


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=6), st.booleans())
def test_the_layout_knows_its_size_to_the_byte(lengths: list[int], external: bool) -> None:
    made = Builder()
    for index, length in enumerate(lengths):
        made.constant(f"w{index}", np.zeros(length, np.int8))
    x = entry()
    model = made.model([x], made.node("Relu", [x], "y"), FEATURES)
    parts: Skeleton = skeleton(model)
    layout = lay_out(parts, external)
    predicted = (layout.model_bytes, layout.data_bytes)
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        files = write_layout(layout, Path(directory))
        sizes = [f.stat().st_size for f in files]
    assert predicted == (sizes[0], sizes[1] if len(sizes) > 1 else 0)


def branching() -> OnnxCarrier:
    """Both branches have weights of their own; the mean's axes are an input from opset 18 on."""
    x, outer = entry(), Builder()
    branches = []
    for name, weight in (("then", 2.0), ("else", -3.0)):
        inner = Builder()
        scale = inner.constant("scale", np.full((FEATURES, CLASSES), weight, np.float32))
        value = inner.node("MatMul", [x, scale], f"{name}_product")
        axes = inner.constant("axes", np.array([1], np.int64))
        mean = inner.node("ReduceMean", [value, axes], f"{name}_mean", keepdims=1)
        mean.dtype, mean.shape = ir.DataType.FLOAT, ir.Shape(["batch", 1])
        branches.append(
            ir.Graph(
                [], [mean], nodes=inner.nodes, initializers=inner.initializers, name=f"{name}_graph"
            )
        )
    total = outer.node("ReduceSum", [x], "total", keepdims=0)
    limit = outer.constant("limit", np.float32(0))
    condition = outer.node("Greater", [total, limit], "condition")
    value = outer.node("If", [condition], "y", then_branch=branches[0], else_branch=branches[1])
    return OnnxCarrier(outer.model([x], value, 1))


@pytest.mark.parametrize("opset", [18, 21, newest_opset()])
def test_weights_in_subgraphs(opset: int, tmp_path: Path) -> None:
    carrier = branching()
    made = OnnxExporter(opset=opset)
    made.check(carrier)
    path = made.write(carrier, tmp_path, CONTEXT)[0]
    for sign in (1, -1):
        batch = {"x": sign * np.abs(rows()["x"])}
        assert worst(made.open(path).run(batch), carrier.runner().run(batch)) < 1e-5


@pytest.mark.parametrize("opset", [17, 21, newest_opset()])
def test_operators_outside_the_standard_keep_their_shapes(opset: int, tmp_path: Path) -> None:
    x, made = entry(), Builder()
    packed = np.random.default_rng(0).integers(0, 256, (32, 2, 16), np.uint8)
    parts = [x, made.constant("w", packed), made.constant("s", np.ones(64, np.float32))]
    fields = {"K": FEATURES, "N": 32, "bits": 4, "block_size": 32}
    value = made.node("MatMulNBits", parts, "product", "com.microsoft", **fields)
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch", 32])
    model = made.model([x], made.node("Relu", [value], "y"), 32, domains=["com.microsoft"])
    carrier = OnnxCarrier(model)
    exporter = OnnxExporter(opset=opset)
    exporter.check(carrier)
    path = exporter.write(carrier, tmp_path, CONTEXT)[0]
    assert [info.name for info in onnx.load(path).graph.value_info] == ["product"]
    assert worst(exporter.open(path).run(rows()), carrier.runner().run(rows())) < 1e-5


def test_a_carrier_without_graph() -> None:
    class Bare:
        kind = "checkpoint"
        offers = frozenset({Capability.WEIGHTS})

    with pytest.raises(SpecError, match="needs a graph, but a checkpoint model has none"):
        OnnxExporter().check(Bare())  # type: ignore[arg-type]


def test_codes_cover_their_range() -> None:
    assert codes((1000,), ir.DataType.INT4, 0).astype(int).min() == -7
