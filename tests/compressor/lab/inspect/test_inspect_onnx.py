"""What is in ONNX files, whoever wrote them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import ModelError
from compressor.lab.inspect.contents import ModelContents, TensorRow
from compressor.lab.inspect.path import inspect_path
from compressor.report.pages.inspect import contents_page
from compressor.report.terminal import plain_text
from tests.compressor.models import wild_models as wild
from tests.compressor.models.wild_models import Wild

FLOAT = TensorProto.FLOAT


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: dict[str, Any],
    opset: int = 21,
    **options: Any,
) -> None:
    entry = helper.make_tensor_value_info("x", FLOAT, ["batch", 4])
    output = helper.make_tensor_value_info("y", FLOAT, None)
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in tensors.items()]
    graph = helper.make_graph(nodes, "g", [entry], [output], initializers)
    imports = [helper.make_opsetid("", opset)]
    if any(node.domain for node in nodes):
        imports.append(helper.make_opsetid("com.microsoft", 1))
    model = helper.make_model(graph, opset_imports=imports, producer_name="tests")
    onnx.save(model, path, **options)


def inspected(path: Path) -> ModelContents:
    contents = inspect_path(path)
    assert isinstance(contents, ModelContents)
    return contents


def rows(contents: ModelContents) -> dict[str, TensorRow]:
    return {row.name: row for row in contents.tensors}


def test_a_float_model(tmp_path: Path) -> None:
    weight = np.array([[1, 0, 2, 3], [4, 5, 6, 7], [0, 1, 1, 1]], np.float32)
    gemm = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    save(tmp_path / "m.onnx", [gemm], {"w": weight, "b": np.ones(3, np.float32)}, opset=13)
    contents = inspected(tmp_path / "m.onnx")
    assert rows(contents)["w"] == TensorRow("w", (3, 4), "float32", 48, 100 * 2 / 12, "", 12)
    assert rows(contents)["b"].macs is None
    assert contents.parameters == 15
    assert contents.zeros == pytest.approx(100 * 2 / 15)
    graph = contents.graph
    assert graph is not None
    assert graph.opsets == {"ai.onnx": 13}
    assert graph.operators == {"Gemm": 1}
    assert (graph.macs, graph.producer) == (12, "tests")
    assert [str(i) for i in graph.inputs] == ["x float32[batch, 4]"]


@pytest.mark.parametrize(
    ("scale", "zero", "options", "scheme", "zeros"),
    [
        (np.float32(0.1), np.int8(0), {}, "int8/tensor", 2 / 8),
        (np.float32(0.1), np.int8(3), {}, "int8/tensor asym", 1 / 8),
        (
            np.ones(2, np.float32),
            np.array([0, 3], np.int8),
            {"axis": 1},
            "int8/channel asym",
            2 / 8,
        ),
        (np.ones(4, np.float32), np.zeros(4, np.int8), {"axis": 0}, "int8/channel", 2 / 8),
        (
            np.ones((2, 2), np.float32),
            np.array([[0, 0], [7, 3]], np.int8),
            {"axis": 0, "block_size": 2},
            "int8/group 2 asym",
            4 / 8,
        ),
    ],
)
def test_codes_before_dequantize_linear(
    tmp_path: Path, scale: Any, zero: Any, options: dict[str, Any], scheme: str, zeros: float
) -> None:
    codes = np.array([[0, 3], [1, 0], [7, 1], [7, 1]], np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], **options),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    save(tmp_path / "m.onnx", nodes, {"w": codes, "s": scale, "z": zero})
    contents = inspected(tmp_path / "m.onnx")
    row = rows(contents)["w"]
    assert (row.quantization, row.macs) == (scheme, 8)
    assert row.zeros == pytest.approx(100 * zeros)
    assert contents.zeros == pytest.approx(100 * zeros)
    assert contents.parameters == 8
    assert [(rows(contents)[n].quantization, rows(contents)[n].zeros) for n in "sz"] == [
        ("scale", None),
        ("zero point", None),
    ]


def test_operators_that_take_codes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]),
        helper.make_node("MatMulInteger", ["q", "w", "qz", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=FLOAT),
        helper.make_node(
            "MatMulNBits",
            ["f", "p", "ps"],
            ["y"],
            domain="com.microsoft",
            K=2,
            N=3,
            bits=4,
            block_size=16,
        ),
    ]
    codes = np.array([[5, 1], [1, 6], [5, 6], [1, 1]], np.int8)
    tensors = {
        "w": codes,
        "z": np.array([5, 6], np.int8),
        "p": np.zeros((3, 1, 8), np.uint8),
        "ps": np.ones(3, np.float32),
    }
    save(tmp_path / "m.onnx", nodes, tensors)
    found = rows(inspected(tmp_path / "m.onnx"))
    assert (found["w"].quantization, found["w"].zeros) == ("int8 asym", 50.0)
    assert found["p"].quantization == "int4/group 16"


def test_four_bit_codes(tmp_path: Path) -> None:
    codes = helper.make_tensor("w", TensorProto.INT4, [4, 2], [0, 1, 2, -8, 7, 0, 1, 1])
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    save(tmp_path / "m.onnx", nodes, {"s": np.ones(2, np.float32)})
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.initializer.append(codes)
    onnx.save(model, tmp_path / "m.onnx")
    assert rows(inspected(tmp_path / "m.onnx"))["w"] == TensorRow(
        "w", (4, 2), "int4", 4, 25.0, "int4/channel", 8
    )


def test_external_data(tmp_path: Path) -> None:
    save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"w": np.ones((4, 1000), np.float32)},
        save_as_external_data=True,
        location="weights.bin",
    )
    contents = inspected(tmp_path / "m.onnx")
    assert list(contents.files) == ["m.onnx", "weights.bin"]
    assert rows(contents)["w"].zeros == 0.0
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"'weights.bin' is missing or too short"):
        inspected(tmp_path / "m.onnx")


def test_external_data_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in" / "m.onnx"
    path.parent.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    save(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((4, 1), np.float32)})
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="outside its folder"):
        inspected(path)


def test_text_and_values_that_are_not_finite(tmp_path: Path) -> None:
    tensors = {
        "w": np.array([[np.inf], [0], [1], [1]], np.float32),
        "labels": np.array(["cat", "dog"], dtype=object),
    }
    save(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], tensors)
    contents = inspected(tmp_path / "m.onnx")
    assert rows(contents)["labels"].zeros is None
    assert contents.notes == ("'w' holds 1 values that are NaN or infinite",)
    assert "'w' holds 1 values" in plain_text(contents_page(contents))


@pytest.mark.parametrize("content", [b"", b"words, not a graph", b"\x08\x07\x12\x05tests"])
def test_what_is_not_onnx(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        inspected(tmp_path / "m.onnx")


@pytest.mark.parametrize("make", [wild.branches, wild.loop, wild.scan])
def test_weights_in_subgraphs(tmp_path: Path, make: Callable[[], Wild]) -> None:
    sample = make()
    onnx.save(sample.model, tmp_path / "m.onnx")
    contents = inspected(tmp_path / "m.onnx")
    found = rows(contents)
    weights = {f"{name}.weight" for name in sample.layers}
    assert weights <= set(found)
    assert all(found[name].macs for name in weights)
    assert contents.graph is not None
    assert contents.graph.operators["MatMul"] == len(weights)
    total = sum(np.prod(found[name].shape) for name in weights)
    assert contents.parameters - total == (64 if "start" in found else 0)
    assert contents.bytes == sum(row.bytes for row in contents.tensors) >= 4 * total


def test_halves(tmp_path: Path) -> None:
    onnx.save(wild.halves().model, tmp_path / "m.onnx")
    contents = inspected(tmp_path / "m.onnx")
    assert contents.parameters == 64 * 64 + 32 * 64 + 32
    assert contents.bytes == 2 * contents.parameters
    assert contents.bytes_by_dtype == {"float16": contents.bytes}
    assert contents.graph is not None
    assert contents.graph.macs == 64 * 64 + 32 * 64
    assert [str(spec) for spec in contents.graph.inputs] == ["x float16[n, 64]"]


def test_external_data_of_a_branch(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    model = wild.branches().model
    branches = {a.name: a.g for a in model.graph.node[1].attribute}
    tensor = branches["then_branch"].initializer[0]
    content = tensor.raw_data
    (tmp_path / "data" / "w.bin").write_bytes(bytes(8) + content)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "data/w.bin"), ("offset", "8")):
        tensor.external_data.add(key=key, value=text)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    contents = inspected(tmp_path / "m.onnx")
    assert contents.files["data/w.bin"] == 8 + len(content)
    assert rows(contents)["first.weight"].zeros == 0.0
    (tmp_path / "data" / "w.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"'data/w.bin' is missing or too short"):
        inspected(tmp_path / "m.onnx")


def test_long_names_and_values_are_cut_on_the_page_alone(tmp_path: Path) -> None:
    """Those of TensorFlow's fused operators take hundreds of characters, a dictionary thousands."""
    name = "model/first/" + "x" * 300 + "/last"
    add = helper.make_node("Add", ["x", name], ["y"])
    save(tmp_path / "m.onnx", [add], {name: np.ones(4, np.float32)})
    proto = onnx.load(tmp_path / "m.onnx")
    proto.metadata_props.add(key="character", value="\n".join(f"c{i}" for i in range(500)))
    onnx.save(proto, tmp_path / "m.onnx")
    contents = inspected(tmp_path / "m.onnx")
    assert list(rows(contents)) == [name]
    lines = plain_text(contents_page(contents)).splitlines()
    assert max(map(len, lines)) < 200
    (row,) = (text for text in lines if text.startswith("model/first/xxx"))
    assert "…" in row
    assert "xxx/last " in row
    assert any(text.startswith("metadata: character=c0 c1 c2") for text in lines)
