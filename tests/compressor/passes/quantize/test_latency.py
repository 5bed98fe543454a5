"""What is predicted of the time that nodes take, and of what it takes to convert values."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from compressor.passes.quantize.static.cuts import _cut
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.latency_facts import AVX2, VNNI
from compressor.passes.quantize.static.static import QuantizeStatic
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.island_graphs import (
    ORT,
    chain,
    nanoseconds,
    network,
)
from tests.compressor.tiny_project import Project


def test_the_time_of_a_choice_is_that_of_kernels_and_conversions():
    model = chain("point64", "depth64", "point64", size=32, channels=64)
    net, _ = network(model)
    costs = CostModel(VNNI, typical_shapes(model))
    first, middle, last = (costs.cost(node) for node in model.graph)
    size, facts = 64 * 32 * 32, VNNI
    blocked = facts.call + facts.block_layout * size
    kernels = first.floating + middle.floating + last.floating
    assert net.floating[0] == pytest.approx(kernels + 2 * blocked)
    outer = frozenset(n for n in model.graph if n.attributes.get_int("group", 1) == 1)
    chosen = net.cut(outer, frozenset(model.graph) - outer)
    turn = facts.call + facts.turn * size
    there, back = (facts.call + r * size + turn for r in (facts.quantize, facts.dequantize))
    kernels = first.integer + middle.floating + last.integer
    expected = kernels + 2 * there + 2 * back + 2 * blocked
    assert nanoseconds(net, chosen) == pytest.approx(expected)


def test_a_value_is_converted_once_for_all_its_readers():
    text = """(float[1, 64, 32, 32] x) => (float[1, 64, 32, 32] y) {
        a = Conv<kernel_shape = [1, 1]>(x, aw)
        b = Conv<kernel_shape = [1, 1]>(x, bw)
        y = Sub(a, b)
    }"""
    weight = (64, 64, 1, 1)
    model = graph(text, {"aw": weight, "bw": weight})
    net, nodes = network(model)
    facts, size = VNNI, 64 * 32 * 32
    costs = CostModel(facts, typical_shapes(model))
    both, one = net.cut(nodes), net.cut((), nodes)
    a, b, minus = (costs.cost(node) for node in model.graph)
    blocked = facts.call + facts.block_layout * size  # the difference has none
    floats = a.floating + b.floating + minus.floating + 3 * blocked
    assert nanoseconds(net, one) == pytest.approx(floats)
    turned = facts.call + facts.turn * size
    codes = facts.call + facts.quantize * size + turned
    back = facts.call + facts.dequantize * size
    # The difference of two maps is computed with channels last, and turned once.
    expected = a.integer + b.integer + minus.floating + codes + 2 * back + turned
    assert nanoseconds(net, both) == pytest.approx(expected)


def test_kernels_of_depthwise_layers_are_slower_as_integers_and_dense_ones_are_faster():
    # Measured in ONNX Runtime 1.31 (docs/quantization.md): 1.2 to 4 times, and 0.25 to 0.6 times.
    for layers, faster in ((("depth64",), False), (("depth72",), False), (("dense64",), True)):
        model = chain(*layers, channels=int(layers[0][5:]))
        cost = CostModel(VNNI, typical_shapes(model)).cost(model.graph[0])
        assert (cost.integer < 0.7 * cost.floating) == faster
        assert (cost.integer > 1.1 * cost.floating) == (not faster)


def test_open_axes_have_a_typical_length():
    model = chain("dense16", "depth16")
    assert typical_shapes(model)["v0"] == (1, 16, 64, 64)
    image = model.graph.inputs[0]
    image.shape = ir.Shape(["N", 3, "height", "width"])
    for node in model.graph:
        node.outputs[0].shape = ir.Shape(["N", 16, None, None])
    assert typical_shapes(model)["v0"] == (1, 16, 128, 128)
    assert image.shape == ir.Shape(["N", 3, "height", "width"])


def test_calibration_data_say_how_long_open_axes_are():
    model = chain("dense16", "depth16")
    image = model.graph.inputs[0]
    image.shape = ir.Shape(["N", 3, "height", None])
    shapes = typical_shapes(model, {"x": (1, 3, 40, 24)})
    assert (shapes["x"], shapes["v0"]) == ((1, 3, 40, 24), (1, 16, 40, 24))
    assert typical_shapes(model, {"x": (3, 40)})["v0"] == (1, 16, 128, 128)
    image.shape = ir.Shape([8, 3, 64, "height"])  # a sample is no batch of eight
    assert typical_shapes(model, {"x": (1, 3, 64, 32)})["v0"] == (8, 16, 64, 32)


def test_an_open_axis_that_is_another_inputs_samples_is_one():
    text = """(float[n, 8] x, float[2, n, 8] h) => (float[2, n, 8] y) { y = Add(x, h) }"""
    assert typical_shapes(graph(text, {}))["h"] == (2, 1, 8)


def test_lengths_that_the_graph_computes_are_known():
    # The width of a text recognizer's input is open, and its map becomes a sequence.
    text = """(float[N, 16, 8, width] x) => (float[N, t, 24] y) {
        a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 16>(x, conv)
        s = Shape(a) first = Constant<value = int64[1] {0}>() n = Gather(s, first)
        rest = Constant<value_ints = [-1, 16]>() form = Concat<axis = 0>(n, rest)
        t = Reshape(a, form) y = MatMul(t, fc)
    }"""
    model = graph(text, {"conv": (16, 1, 3, 3), "fc": (16, 24)})
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    assert typical_shapes(model)["y"] == (1, 8 * 128, 24)
    assert typical_shapes(model, {"x": (1, 16, 8, 40)})["y"] == (1, 8 * 40, 24)
    assert QuantizeStatic()._settings(ORT).decide(model).choice is not None


def test_the_run_says_what_shapes_the_calibration_data_have(on_onnx: Project):
    assert on_onnx.plan().context.shapes["image"] == (1, 1, 8, 8)
    del on_onnx.spec["data"]["calibration"]
    assert on_onnx.plan().context.shapes == {}


def test_convolutions_of_sequences_are_faster_as_integers():
    # Measured in ONNX Runtime 1.31: 137 µs in floats, 32 in integers; depthwise 101 and 16. As
    # images with one row, floats take 0.90 and 0.23 of that (Zen 4).
    text = """(float[1, {c}, {n}] x) => (float[1, {c}, m] y) {{
        y = Conv<kernel_shape = [{k}], group = {g}>(x, w)
    }}"""
    for channels, length, window, groups, floating, integer in (
        (64, 1002, 3, 1, 0.9 * 137e3, 32e3),
        (256, 130, 31, 256, 0.23 * 101e3, 16e3),
    ):
        filled = text.format(c=channels, n=length, k=window, g=groups)
        model = graph(filled, {"w": (channels, channels // groups, window)})
        cost = CostModel(VNNI, typical_shapes(model)).cost(model.graph[0])
        assert cost.floating == pytest.approx(floating, rel=0.2)
        assert cost.integer == pytest.approx(integer, rel=0.2)


@pytest.mark.parametrize(
    ("gate", "layouts"),
    [("g = GlobalAveragePool(x)", 4), ("g = Conv<kernel_shape = [1, 1]>(x, aw)", 2)],
)
def test_a_product_with_one_number_a_channel_undoes_the_blocks_of_float_layers(gate, layouts):
    text = f"""(float[1, 16, 32, 32] x) => (float[1, 16, 32, 32] y) {{
        a = Conv<kernel_shape = [1, 1]>(x, aw) {gate} s = Mul(a, g)
        y = Conv<kernel_shape = [1, 1]>(s, bw)
    }}"""
    facts, size = VNNI, 16 * 32 * 32
    model = graph(text, {"aw": (16, 16, 1, 1), "bw": (16, 16, 1, 1)})
    net, _ = network(model)
    costs = CostModel(facts, typical_shapes(model))
    kernels = sum(costs.cost(node).floating for node in model.graph)
    turned = layouts * (facts.call + facts.block_layout * size)
    assert net.floating[0] == pytest.approx(kernels + turned)


def test_kernels_of_cpus_without_vnni_have_times_of_their_own():
    # Measured on a Zen 3, microseconds (tests/benchmarks/bench_kernels.py).
    text = """(float[1, {c}, {n}, {n}] x) => (float[1, {o}, {n}, {n}] y) {{
        y = Conv<kernel_shape = [{k}, {k}], pads = [{p}, {p}, {p}, {p}], group = {g}>(x, w)
    }}"""
    for channels, rows, size, window, groups, floating, integer in (
        (64, 64, 56, 3, 1, 2385, 1228),
        (64, 256, 56, 1, 1, 1123, 659),
        (192, 192, 28, 3, 192, 64, 94),  # depthwise, all lanes full
        (24, 24, 56, 3, 24, 32, 106),  # and not
        (20, 20, 40, 3, 1, 177, 141),  # 32 columns are computed
        (128, 128, 28, 3, 32, 388, 1339),  # groups of four channels have no blocks
        (8, 8, 60, 3, 1, 98, 131),  # one block takes as long as two
        (1, 1, 100, 5, 1, 88, 417),  # a single channel is depthwise for codes
    ):
        filled = text.format(c=channels, o=rows, n=size, k=window, p=window // 2, g=groups)
        model = graph(filled, {"w": (rows, channels // groups, window, window)})
        cost = CostModel(AVX2, typical_shapes(model)).cost(model.graph[0])
        assert cost.floating == pytest.approx(floating * 1e3, rel=0.25)
        assert cost.integer == pytest.approx(integer * 1e3, rel=0.25)


@pytest.mark.parametrize("beside", ["float", "integer"])
def test_an_image_is_resized_fast_among_float_convolutions_only(beside):
    # 64 x 56 x 56, twice as high and wide: 96 microseconds in blocks of channels, 540 otherwise.
    text = """(float[1, 64, 56, 56] x) => (float[1, 64, 112, 112] y) {
        a = Conv<kernel_shape = [1, 1]>(x, aw) scales = Constant<value_floats = [1., 1., 2., 2.]>()
        r = Resize<mode = "nearest">(a, , scales) y = Conv<kernel_shape = [1, 1]>(r, bw)
    }"""
    model = graph(text, {"aw": (64, 64, 1, 1), "bw": (64, 64, 1, 1)})
    net, nodes = network(model, AVX2)
    edges = net._parts[0]
    sides = dict.fromkeys(nodes, "codes" if beside == "integer" else "floats")
    resize = next(n for n in model.graph if n.op_type == "Resize")
    outside = ("first", resize) in _cut(edges.capacities, sides)
    assert outside == (beside == "integer")
    cost = CostModel(AVX2, typical_shapes(model)).cost(resize)
    assert cost.floating == pytest.approx(96e3, rel=0.25)
    assert cost.floating + cost.outside == pytest.approx(540e3, rel=0.25)


def test_an_activation_that_a_convolution_computes_leaves_its_blocks():
    text = """(float[1, 64, 56, 56] x) => (float[1, 64, 56, 56] y) {
        a = Conv<kernel_shape = [1, 1]>(x, aw) b = Relu(a) c = Conv<kernel_shape = [1, 1]>(b, bw)
        d = Relu(c) s = Add(b, d) y = Conv<kernel_shape = [1, 1]>(s, cw)
    }"""
    model = graph(text, dict.fromkeys(("aw", "bw", "cw"), (64, 64, 1, 1)))
    net, _ = network(model)
    costs = CostModel(VNNI, typical_shapes(model))
    kernels = sum(costs.cost(n).floating for n in model.graph if n.op_type != "Relu")
    turned = VNNI.call + VNNI.block_layout * 64 * 56 * 56
    assert net.floating[0] == pytest.approx(kernels + 2 * turned)  # of the input and the output


def test_a_sequence_that_is_written_as_an_image_is_as_fast():
    """Depthwise: in blocks of channels, with the time to lay them out; see `gains_as_image`."""
    text = """(float[1, {0}, 100] x) => (float[1, {0}, 86] y) {{
        y = Conv<group = {0}>(x, w)
    }}"""
    times = []
    for channels in (128, 129):
        model = graph(text.format(channels), {"w": (channels, 1, 15)})
        cost = CostModel(VNNI, typical_shapes(model)).cost(model.graph[0])
        times.append(cost.floating)
    assert times[0] < 0.5 * times[1], "129 channels would have 15 of filling"
