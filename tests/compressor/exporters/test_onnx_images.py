"""Convolutions of sequences are written as those of images with one row, where they gain by it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.layers import layers_with_nodes
from compressor.graph.sequences import filling, gains_as_image
from compressor.graph.values import all_nodes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_runner import graph_runner
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.exporter import USUAL
from compressor.types.layers import Layer
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch
from tests.compressor.graph.channels.channel_graphs import graph

CHAIN = """(float[N, 64, T] x) => (float[N, 64, U] y) {
    a = Conv<kernel_shape = [3], pads = [2, 1], group = 64>(x, first, bias) b = Relu(a)
    c = Conv<strides = [2], dilations = [3]>(b, second, bias) y = Add(c, c)
}"""
WEIGHTS = {"first": (64, 1, 3), "second": (64, 64, 5), "bias": (64,)}


def fed(channels: int = 64, length: int = 50) -> Batch:
    return {"x": np.random.default_rng(5).standard_normal((2, channels, length), np.float32)}


def ops(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in all_nodes(model.graph))


def error(before: ir.Model, after: ir.Model, batch: Batch) -> float:
    (one,), (other,) = (list(graph_runner(m).run(batch).values()) for m in (before, after))
    assert one.shape == other.shape
    return float(np.abs(one - other).max() / np.abs(one).max())


def in_blocks(path: Path, folder: Path) -> int:
    """Count the convolutions that ONNX Runtime computes in blocks of channels."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = list(onnx.load(folder / "optimized.onnx").graph.node)
    nodes += [n for node in nodes for a in node.attribute for n in a.g.node]
    return sum(n.op_type == "Conv" and n.domain == "com.microsoft.nchwc" for n in nodes)


@pytest.mark.parametrize("others", [False, True])
def test_a_row_is_added_with_the_axis_before(others):
    read = "z = Relu(s)" if others else ""
    text = f"""(float[N, 134] x) => (float[N, 16, 7] y{", float[N, 1, 134] z" * others}) {{
        s = Unsqueeze(x, axis) y = Conv(s, w) {read}
    }}"""
    model = graph(text, {"w": (16, 1, 128), "axis": [1]})
    formed = in_form_for("ort-cpu", model, "float32")
    assert ops(formed)["Unsqueeze"] == 1 + others
    batch = {"x": np.random.default_rng(5).standard_normal((2, 134), np.float32)}
    (one, *_), (two, *_) = (list(graph_runner(m).run(batch).values()) for m in (model, formed))
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


def test_between_convolutions_the_row_stays(tmp_path):
    model = graph(CHAIN, WEIGHTS)
    written = in_form_for("ort-cpu", model, "float32")
    assert ops(written) == {"Unsqueeze": 1, "Conv": 2, "Relu": 1, "Squeeze": 1, "Add": 1}
    assert error(model, written, fed()) < 1e-5
    ir.save(written, tmp_path / "model.onnx")
    assert in_blocks(tmp_path / "model.onnx", tmp_path) == 2
    ir.save(model, tmp_path / "model.onnx")
    assert in_blocks(tmp_path / "model.onnx", tmp_path) == 0


@pytest.mark.parametrize("target", ["ort-cuda", "openvino", "tensorrt"])
def test_other_targets_get_sequences(target):
    model = graph(CHAIN, WEIGHTS)
    assert "Unsqueeze" not in ops(in_form_for(target, model, "float32"))


@pytest.mark.parametrize("outputs", ["", ", float[N, 64, V] b"])
def test_a_sequence_that_others_read_is_there_for_them(outputs):
    """Where it is an output, too."""
    text = f"""(float[N, 64, T] x) => (float[N, 64, U] y{outputs}) {{
        a = Conv(x, first) b = Relu(a)
        c = Conv<pads = [1, 1]>(b, second) d = Sigmoid(b) y = Add(c, d)
    }}"""
    model = graph(text, {"first": (64, 64, 3), "second": (64, 64, 3)})
    written = in_form_for("ort-cpu", model, "float32")
    assert [v.name for v in written.graph.outputs] == [v.name for v in model.graph.outputs]
    for one, other in zip(
        graph_runner(model).run(fed()).values(),
        graph_runner(written).run(fed()).values(),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_a_weight_that_several_read_is_stored_once():
    text = """(float[N, 64, T] x) => (float[N, 64, U] y) {
        a = Conv<pads = [1, 1]>(x, w) b = Sigmoid(a) y = Conv<pads = [1, 1]>(b, w)
    }"""
    model = graph(text, {"w": (64, 64, 3)})
    written = in_form_for("ort-cpu", model, "float32")
    assert ops(written)["Unsqueeze"] == 2
    (weight,) = {node.inputs[1] for node in written.graph if node.op_type == "Conv"}
    assert weight is not None
    assert weight.shape == (64, 64, 1, 3)
    assert error(model, written, fed()) < 1e-5


def test_codes_get_a_row_as_well():
    model = graph(CHAIN, WEIGHTS)
    coded = QuantizeWeights(preset="int8").apply(OnnxCarrier(model), PassContext(), {})
    written = in_form_for("ort-cpu", coded.carrier.graph(), "float32")
    shapes = {tuple(node.inputs[1].shape) for node in written.graph if node.op_type == "Conv"}
    assert all(len(shape) == 4 for shape in shapes)
    assert error(coded.carrier.graph(), written, fed()) < 1e-5


BRANCHES = """(float[2, 64, 50] x, bool up) => (float[2, 64, 48] y) {
    y = If(up) <
        then_branch = one () => (float[2, 64, 48] p) { p = Conv(x, first) },
        else_branch = two () => (float[2, 64, 48] q) { q = Conv(x, second) }
    >
}"""


def test_convolutions_in_branches_gain_too(tmp_path):
    model = graph(BRANCHES, {"first": (64, 64, 3), "second": (64, 64, 3)})
    exporter = OnnxExporter(target="ort-cpu")
    (file,) = exporter.write(OnnxCarrier(model), tmp_path, USUAL)
    assert in_blocks(file, tmp_path) == 2


@pytest.mark.parametrize(
    ("shape", "groups", "gains"),
    [
        ((64, 1, 3), 64, True),
        ((64, 1, 1), 64, False),  # a factor for each channel
        ((30, 1, 3), 30, True),
        ((17, 1, 3), 17, False),  # half of two blocks would be filling
        ((256, 16, 3), 16, True),
        ((256, 8, 3), 32, False),
        ((258, 1, 256), 1, True),
        ((512, 1, 10), 1, False),  # blocks take longer to lay out than so few products
        ((64, 62, 3), 1, False),  # channels that fill no four, and too few products for zeros
        ((64, 90, 3), 1, True),  # with two channels of zeros
        ((64, 97, 3), 1, False),  # which would be as many as half of a block
        ((1, 128, 7), 1, False),
    ],
)
def test_which_convolutions_gain(shape, groups, gains):
    text = f"""(float[N, {shape[1] * groups}, T] x) => (float[N, {shape[0]}, U] y) {{
        y = Conv<group = {groups}>(x, w)
    }}"""
    model = graph(text, {"w": shape})
    ((layer, _),) = layers_with_nodes(model)
    assert gains_as_image(layer) == gains
    assert (in_form_for("ort-cpu", model, "float32") is not model) == gains


@pytest.mark.parametrize(
    ("columns", "places", "zeros"),
    [
        (129, 4, 3),
        (129, 24, 3),
        (129, 16, 0),
        (129, 400, 0),
        (129, None, 3),
        (100, None, 0),
        (97, None, 0),
        (97, 4, 3),
        (85, 4, 0),
    ],
)
def test_zeros_fill_channels_where_a_product_of_matrices_wastes_more(columns, places, zeros):
    layer = Layer("a", "Conv", "a.weight", (128, columns, 3))
    assert filling(layer, places) == zeros
    assert gains_as_image(layer, places) == (zeros > 0 or columns % 4 == 0)


FILLED = """(float[N, 129, T] x) => (float[N, 64, U] y, float[N, 64, U] z) {
    a = Sqrt(x) b = Conv<pads = [1, 1]>(a, first) y = Relu(b) z = Conv<pads = [1, 1]>(a, second)
}"""


@pytest.mark.parametrize("coded", [False, True])
def test_channels_of_zeros_change_no_output(tmp_path, coded):
    """Codes have any zero point: what meets a zero is not looked at."""
    carrier = OnnxCarrier(graph(FILLED, {"first": (64, 129, 3), "second": (64, 129, 3)}))
    if coded:
        quantize = QuantizeWeights(bits=8, symmetric=False)
        carrier = quantize.apply(carrier, PassContext(), {}).carrier
    batch = {"x": np.abs(fed(129, 6)["x"])}
    (file,) = OnnxExporter(target="ort-cpu").write(carrier, tmp_path, USUAL)
    assert in_blocks(file, tmp_path) == 2
    assert ops(ir.load(file))["Unsqueeze"] == 1, "one row for both"
    for wanted, got in zip(
        graph_runner(carrier.graph()).run(batch).values(),
        graph_runner(ir.load(file)).run(batch).values(), strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
