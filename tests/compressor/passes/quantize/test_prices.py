"""What computing on codes must save to be worth its rounding."""

from __future__ import annotations

import re

import onnx_ir as ir
import pytest

from compressor.graph.layers import layers_with_nodes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.cuts import Network
from compressor.passes.quantize.static.islands import kernels_of
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.latency_facts import VNNI
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.placement import ORT_CPU
from compressor.passes.quantize.static.prices import WORTH, behind_averages, last, prices
from compressor.passes.quantize.static.static import QuantizeStatic
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.island_graphs import ALL, ORT, chain, network

GATED = """(float[N, 64, 32, 32] x) => (float[N, 10] y) {
    a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, body)
    m = GlobalAveragePool(a)
    s = Conv<kernel_shape = [1, 1]>(m, squeeze) r = Relu(s)
    e = Conv<kernel_shape = [1, 1]>(r, excite) g = Sigmoid(e) b = Mul(a, g)
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(b, after)
    axes = Constant<value_ints = [2, 3]>() p = ReduceMean<keepdims = 0>(c, axes)
    t = HardSwish(p) y = Gemm<transB = 1>(t, head)
}"""
WEIGHTS = {
    "body": (64, 64, 3, 3), "squeeze": (16, 64, 1, 1), "excite": (64, 16, 1, 1),
    "after": (64, 64, 3, 3), "head": (10, 64),
}  # fmt: skip


def gated(head: int = 10) -> ir.Model:
    """A network of two convolutions, with a gate between them and a head behind an average."""
    text = GATED.replace("float[N, 10]", f"float[N, {head}]")
    return graph(text, {**WEIGHTS, "head": (head, 64)})


def behind(model: ir.Model) -> set[str]:
    readers = {node: layer for layer, node in layers_with_nodes(model)}
    found = behind_averages(model.graph, readers, typical_shapes(model))
    return {readers[node].name for node in found}


def test_gates_and_heads_lie_behind_averages():
    assert behind(gated()) == {"squeeze", "excite", "head"}


@pytest.mark.parametrize(
    "text",
    [
        # The mean of a layer norm is no average of all places, nor is one over channels.
        """(float[N, 9, 64] x) => (float[N, 9, 10] y) {
            last = Constant<value_ints = [2]>() m = ReduceMean(x, last) d = Sub(x, m)
            y = MatMul(d, turned) }""",
        # One place a sample, but no average of others.
        "(float[N, 64] x) => (float[N, 10] y) { r = Relu(x) y = MatMul(r, turned) }",
    ],
)
def test_what_reads_numbers_that_no_average_gave_does_not(text):
    assert not behind(graph(text, {"turned": (64, 10)}))


def test_a_head_behind_an_average_stays_float_where_it_saves_little_and_the_plan_says_why():
    model = OnnxCarrier(gated(head=4096))
    planned = {row.name: row for row in QuantizeStatic().survey(model, ORT).layers}
    assert planned["body"].action == planned["after"].action == "int8/channel x uint8"
    assert planned["head"].action == "int8/channel"
    assert re.fullmatch(
        r"behind an average, whose range is uncertain, integers save too little: "
        r"0\.\d % of the time \(predicted\)",
        planned["head"].reason,
    )
    asked = QuantizeStatic(layers=(StaticRule(match="head"),))
    planned = {row.name: row for row in asked.survey(model, ORT).layers}
    assert planned["head"].action == "int8/channel x uint8"


def test_a_head_that_takes_much_of_the_time_is_integer():
    planned = {
        row.name: row for row in QuantizeStatic().survey(OnnxCarrier(gated(head=2**16)), ORT).layers
    }
    assert planned["head"].action == "int8/channel x uint8"


def test_prices_of_all_but_averages_add_up_to_what_codes_must_save():
    model = chain("dense64", "dense64", "point64")
    readers = {node: layer for layer, node in layers_with_nodes(model)}
    kernels = kernels_of(model, ORT_CPU, readers, [layer.name for layer in readers.values()])
    assert sum(prices(kernels, ()).values()) == pytest.approx(WORTH)
    first = next(iter(readers))
    assert prices(kernels, (first,))[first] == WORTH


def test_a_price_is_part_of_a_choice_and_not_of_its_time():
    model = chain("dense64", "dense64", "dense64", channels=16)
    free, nodes = network(model)
    kernels = kernels_of(
        model, ORT_CPU, ALL._settings(ORT).decide(model).readers, [f"layer{i}" for i in range(3)]
    )
    costs = [CostModel(VNNI, typical_shapes(model))]
    dear = Network(model.graph, kernels, costs, dict.fromkeys(nodes, 1.0))
    assert free.cut(()).integer >= nodes
    assert not dear.cut(()).integer & nodes
    assert dear.cut(nodes).ratio == pytest.approx(free.cut(nodes).ratio)
    assert dear.floating == free.floating


def test_an_average_that_is_the_output_is_not_rounded():
    # SqueezeNet's outputs are one: 46 dB were left where its codes were written, 53 without.
    model = chain(*["point64", "Relu"] * 10, "GlobalAveragePool", size=32, channels=64)
    decision = QuantizeStatic()._settings(ORT).decide(model)
    assert len(decision.schemes) == 10
    assert "y" not in decision.placement.values
    kernels = kernels_of(model, ORT_CPU, decision.readers, decision.schemes)
    assert {node.op_type for node in last(model.graph, kernels)} == {"GlobalAveragePool"}
