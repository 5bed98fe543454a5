"""Files that are written and read tensor by tensor are those that protobuf writes and reads."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto

from compressor.exporters.onnx.file import (
    Layout,
    check_file,
    check_message,
    described,
    lay_out,
    write_layout,
)
from compressor.exporters.onnx.wire import read_outline
from compressor.graph.blocks import all_initializers, sink_constants
from compressor.graph.skeleton import skeleton
from tests.compressor.exporters.hand_made import Builder, entry, quantized, sample
from tests.compressor.models import wild_models

LEAST = 1024  # bytes of data that are passed over


def text() -> ir.Model:
    """Return a model that holds text, a tensor without elements, and a number."""
    made = Builder()
    x = entry()
    words = made.constant("words", ir.StringTensor(np.array([b"a", b"bc"], dtype=object)))
    made.constant("nothing", np.zeros((0, 3), np.float32))
    made.constant("number", np.float32(3))
    made.node("Identity", [words], "same")
    return made.model([x], made.node("Relu", [x], "y"))


MODELS: dict[str, Callable[[], ir.Model]] = {
    "int8": lambda: quantized().graph(),
    "int4 in blocks": lambda: quantized(ir.DataType.INT4, None, blocks=True).graph(),
    "2 bits, lazy": lambda: quantized(ir.DataType.INT2, None, blocks=True, lazy=True).graph(),
    "float8": lambda: quantized(ir.DataType.FLOAT8E4M3FN, None).graph(),
    "module": lambda: sample("digits").graph(),
    "branches": lambda: ir.from_proto(wild_models.branches().model),
    "loop": lambda: ir.from_proto(wild_models.loop().model),
    "functions": lambda: ir.from_proto(wild_models.functions().model),
    "text": text,
}


def laid_out(model: ir.Model, external: bool) -> Layout:
    layout = lay_out(skeleton(model), external)
    sink_constants(layout.proto.graph)
    return layout


def whole(layout: Layout) -> onnx.ModelProto:
    """Return the message with its data, as protobuf holds it."""
    proto = onnx.ModelProto()
    proto.CopyFrom(layout.proto)
    for tensor in all_initializers(proto.graph):
        if tensor.name in layout.inline:
            tensor.raw_data = layout.tensors[tensor.name].tobytes()
    return proto


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_has_the_bytes_that_protobuf_writes(
    kind: str, external: bool, tmp_path: Path
) -> None:
    layout = laid_out(MODELS[kind](), external)
    expected = whole(layout).SerializeToString(deterministic=True)
    predicted = layout.model_bytes
    files = write_layout(layout, tmp_path)
    assert files[0].read_bytes() == expected
    assert predicted == len(expected)


@pytest.mark.parametrize("kind", MODELS)
def test_an_outline_lacks_large_data_alone(kind: str, tmp_path: Path) -> None:
    layout = laid_out(MODELS[kind](), external=False)
    (path,) = write_layout(layout, tmp_path)
    expected = whole(layout)
    large = {n: size for n, size in layout.inline.items() if size >= LEAST}
    for tensor in all_initializers(expected.graph):
        if tensor.name in large:
            tensor.ClearField("raw_data")
    assert read_outline(path, LEAST) == (expected, large)


def test_a_cut_file_is_refused_where_protobuf_refuses_it(tmp_path: Path) -> None:
    (path,) = write_layout(laid_out(MODELS["branches"](), external=False), tmp_path)
    content = path.read_bytes()
    cut = tmp_path / "cut.onnx"

    def refused(read: Callable[[], Any]) -> bool:
        try:
            read()
        except DecodeError:
            return True
        return False

    for end in range(0, len(content), 397):
        cut.write_bytes(content[:end])
        expected = refused(lambda end=end: onnx.ModelProto.FromString(content[:end]))
        assert refused(lambda: read_outline(cut, 64)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x0b", "byte 0 begins no field"), (b"\xff" * 20, "has no end"), (b"\x0a\x05ab", "no end")],
)
def test_what_is_no_message_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(DecodeError, match=message):
        read_outline(tmp_path / "model.onnx", LEAST)


def test_large_weights_of_a_branch_are_checked_without_their_data(tmp_path: Path) -> None:
    layout = laid_out(MODELS["branches"](), external=False)
    expected = described(layout.proto)
    inside = {t.name for t in all_initializers(layout.proto.graph)}
    inside -= {t.name for t in layout.proto.graph.initializer}
    assert inside & {n for n, size in layout.inline.items() if size >= LEAST}
    assert check_message(layout) is None
    (path,) = write_layout(layout, tmp_path)
    check_file(path, layout.proto.opset_import[0].version, expected)


def test_the_memory_is_that_of_one_tensor() -> None:
    # Protobuf's writer takes all of them three times, its reader twice.
    size, count = 4 << 20, 8
    made = Builder()
    x = value = entry(features=size // 4)
    for index in range(count):
        lazy = ir.LazyTensor(
            lambda: ir.tensor(np.ones(size // 4, np.float32)),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape([size // 4]),
        )
        value = made.node("Add", [value, made.constant(f"w{index}", lazy)], f"y{index}")
    layout = laid_out(made.model([x], value, size // 4), external=False)
    expected = described(layout.proto)
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        (path,) = write_layout(layout, Path(folder))
        check_file(path, 21, expected)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * size
    assert {t.data_type for t in layout.proto.graph.initializer} == {TensorProto.FLOAT}


UPSAMPLED = """
<ir_version: 8, opset_import: ["" : 17]>
upsampled (float[batch, 3, 8, 8] image) => (float[batch, 3, height, width] y)
<int64 row = {2}, int64 column = {3}, int64 twice = {2}, int64[1] none = {0}, int64[1] two = {2}>
{
    shape = Shape (image)
    rows = Gather <axis = 0> (shape, row)
    columns = Gather <axis = 0> (shape, column)
    height = Mul (rows, twice)
    width = Mul (columns, twice)
    first = Unsqueeze (height, none)
    second = Unsqueeze (width, none)
    samples = Slice (shape, none, two, none)
    sizes = Concat <axis = 0> (samples, first, second)
    y = Resize <mode = "nearest"> (image, , , sizes)
}
"""


def test_sizes_that_are_sliced_from_a_shape_are_taken() -> None:
    """So PyTorch writes the upsampling of a decoder for any number of samples."""
    layout = lay_out(skeleton(ir.from_proto(onnx.parser.parse_model(UPSAMPLED))), external=False)
    assert check_message(layout) is None
    wrong = UPSAMPLED.replace("(samples, first, second)", "(samples, first)")
    layout = lay_out(skeleton(ir.from_proto(onnx.parser.parse_model(wrong))), external=False)
    assert "must be same as rank of input 'X'" in (check_message(layout) or "")
