"""Layers that a runtime computes faster in floating point stay there, and the plan says so."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.cuts import Network
from compressor.passes.quantize.static.islands import choose
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.latency_facts import AVX2, ORT_CPU_LATENCIES, VNNI
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.placement import ORT_CPU, TENSORRT, place
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.passes import Outcome
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.island_graphs import (
    ALL,
    ORT,
    chain,
    nanoseconds,
    network,
)
from tests.compressor.passes.quantize.static_models import runtime_operators, sqnr, statistics

HARD = ("dense16", "HardSwish", "depth16", "HardSwish", "point16", "depth16", "HardSwish", "point8")


@cache
def hard() -> OnnxCarrier:
    """A network like the first layers of a MobileNetV3."""
    return OnnxCarrier(chain(*HARD, size=112))


@cache
def wide() -> OnnxCarrier:
    """Dense convolutions with many channels."""
    return OnnxCarrier(chain("dense64", "Relu", "dense64", "Relu", "point64", channels=16))


def quantized(declared: QuantizeStatic, model: OnnxCarrier) -> Outcome:
    return declared.apply(model, ORT, known(declared, model))


def known(declared: QuantizeStatic, model: OnnxCarrier) -> dict[str, Any]:
    batches = [
        {"x": np.random.default_rng(seed).standard_normal((1, *_shape(model)), np.float32)}
        for seed in range(2)
    ]
    return statistics(declared, model, ORT, batches)


def _shape(model: OnnxCarrier) -> tuple[int, ...]:
    return tuple(int(d) for d in model.inputs[0].shape[1:])


def rows(declared: QuantizeStatic, model: OnnxCarrier) -> dict[str, Any]:
    return {row.name: row for row in declared.survey(model, ORT).layers}


def test_layers_that_are_faster_as_floats_are_stored_as_int8_and_the_plan_says_why():
    planned = rows(QuantizeStatic(), hard())
    assert {row.action for row in planned.values()} == {"int8/channel"}
    assert all(row.touched for row in planned.values())
    for row in planned.values():
        reason = re.fullmatch(
            r"faster as floats: as integers, (\d\.\d\d) x the time \(predicted\)", row.reason
        )
        assert reason is not None
        assert float(reason[1]) > 1.05
    (note,) = QuantizeStatic().survey(hard(), ORT).notes
    assert re.fullmatch(
        r"0 of 5 layers compute with integers, which gain too little in others \(the rule "
        r"\{match: '\*'\} takes integers for all\): "
        r"predicted latency in ONNX Runtime over the float model's: "
        r"1\.00 x on CPUs with VNNI and 1\.00 x on CPUs with AVX2 and without VNNI; "
        r"if all layers computed with integers, "
        r"[12]\.\d\d x on CPUs with VNNI and [12]\.\d\d x on CPUs with AVX2 and without VNNI",
        note,
    )


def test_what_stays_float_is_computed_without_codes_of_activations():
    after = quantized(QuantizeStatic(), hard())
    nodes = [node.op_type for node in after.carrier.graph().graph]
    assert "QuantizeLinear" not in nodes
    assert {layer.dtype for layer in after.carrier.layers()} == {"int8"}
    assert len(after.layers) == 5
    x = {"x": np.random.default_rng(7).standard_normal((1, *_shape(hard())), np.float32)}
    (ours,), (theirs,) = (list(model.runner().run(x).values()) for model in (after.carrier, hard()))
    assert sqnr(theirs, ours) > 30


def test_layers_are_chosen_once_for_the_graph_and_its_copies(monkeypatch: pytest.MonkeyPatch):
    carrier, chosen = OnnxCarrier(hard().graph().clone()), list[Any]()

    def counted(*given: Any) -> Any:
        chosen.append(choose(*given))
        return chosen[-1]

    monkeypatch.setattr("compressor.passes.quantize.static.settings.choose", counted)
    after = quantized(QuantizeStatic(), carrier)
    QuantizeStatic().preview(carrier, ORT, {})
    assert len(after.layers) == 5
    assert len(chosen) == 1
    rule = StaticRule.model_validate({"match": "layer2"})
    assert rows(QuantizeStatic(layers=(rule,)), carrier)["layer2"].action == "int8/channel x uint8"
    assert len(chosen) == 2
    assert rows(QuantizeStatic(), carrier)["layer2"].reason


def test_a_choice_does_not_keep_its_graph():
    carrier = OnnxCarrier(hard().graph().clone())
    rows(QuantizeStatic(), carrier)
    left = weakref.ref(carrier.graph())
    del carrier
    gc.collect()
    assert left() is None


def test_a_rule_for_all_layers_makes_them_integer():
    planned = rows(ALL, hard())
    assert {(row.action, row.reason) for row in planned.values()} == {("int8/channel x uint8", "")}
    assert not any("latency" in note for note in ALL.survey(hard(), ORT).notes)


def test_layers_that_are_faster_as_integers_are():
    for declared in (QuantizeStatic(), ALL):
        planned = rows(declared, wide())
        assert {row.action for row in planned.values()} == {"int8/channel x uint8"}
        assert not any("latency" in note for note in declared.survey(wide(), ORT).notes)


@pytest.mark.parametrize("declared", [{"weights": {"bits": 4}}, {"activations": {"bits": 4}}])
def test_other_widths_are_not_for_speed(declared):
    planned = rows(QuantizeStatic.model_validate(declared, strict=False), hard())
    assert not {row.reason for row in planned.values()} - {""}


def test_a_layer_with_a_rule_is_integer():
    rule = {"match": "layer2", "granularity": "tensor"}
    planned = rows(QuantizeStatic.model_validate({"layers": [rule]}, strict=False), hard())
    assert planned["layer2"].action == "int8/tensor x uint8"
    assert {row.action for name, row in planned.items() if name != "layer2"} == {"int8/channel"}


@pytest.mark.parametrize(
    "layers",
    [
        ("dense16", "depth16", "point64", "depth64", "point16"),
        ("dense8", "HardSwish", "depth8", "point128", "HardSwish", "point128"),
        ("point32", "Relu", "depth32", "MaxPool<kernel_shape = [2, 2]>", "point64", "dense64"),
    ],
)
def test_no_other_choice_takes_less_time(layers):
    # The choice of least time, found by trying all of them.
    net, nodes = network(chain(*layers, channels=16))
    least = net.cut(())
    choices = [
        net.cut(chosen, nodes - {*chosen})
        for size in range(len(nodes) + 1)
        for chosen in itertools.combinations(nodes, size)
    ]
    best = min(choices, key=lambda c: c.ratio)
    assert least.ratio == pytest.approx(best.ratio)
    assert sum(c.ratio == best.ratio for c in choices) > 1 or least.integer == best.integer


def test_a_copy_takes_over_what_is_known_of_the_graph(monkeypatch: pytest.MonkeyPatch):
    model = chain("depth16", "point16", "depth16", size=24, channels=16)
    settings = QuantizeStatic()._settings(ORT)
    first = settings.decide(model)
    anew = settings.decide(copy := model.clone())
    assert first.choice is not None

    def cut(*_: object) -> None:
        pytest.fail("the graph was cut again")

    monkeypatch.setattr(Network, "cut", cut)
    decision = settings.decide(copy, first)
    assert decision.choice == anew.choice
    assert decision.reasons == anew.reasons
    assert list(decision.placement.values) == list(anew.placement.values)


def test_what_is_too_small_to_gain_stays_floats():
    # A perceptron of 16, 64, 32 and 2 took 1.22 times as long in int8: each kernel's call costs
    # more than its product.
    text = """(float[N, 16] x) => (float[N, 2] y) {
        a = Gemm(x, w1, b1) r = Relu(a) b = Gemm(r, w2, b2) s = Relu(b) y = Gemm(s, w3, b3)
    }"""
    weights = {"w1": (16, 64), "b1": (64,), "w2": (64, 32), "b2": (32,), "w3": (32, 2), "b3": (2,)}
    planned = rows(QuantizeStatic(), OnnxCarrier(graph(text, weights)))
    assert {row.action for row in planned.values()} == {"int8/channel"}
    assert all("faster as floats" in row.reason for row in planned.values())


def test_no_choice_is_predicted_to_be_slower_than_floats():
    for layers in (("depth16", "depth16"), ("point16", "depth16"), ("dense64", "depth64")):
        model = chain(*layers, size=24, channels=16)
        choice = QuantizeStatic()._settings(ORT).decide(model).choice
        net, nodes = network(model, *ORT_CPU_LATENCIES)
        ratios = net.cut(nodes).ratios if choice is None else choice.ratios.values()
        assert max(ratios) <= 1


def test_a_product_with_a_bias_behind_it_is_one_of_integers(tmp_path: Path):
    # ONNX Runtime merges the two, and turned the weight into floats in every run.
    text = """(float[N, 64] x) => (float[N, 48] y) { a = MatMul(x, fc) y = Add(b, a) }"""
    model = OnnxCarrier(graph(text, {"fc": (64, 48), "b": (48,)}))
    adapted = ALL.adapted(model, ORT)
    assert isinstance(adapted, OnnxCarrier)
    batches = [{"x": np.random.default_rng(3).standard_normal((32, 64), np.float32)}]
    after = ALL.apply(adapted, ORT, statistics(ALL, adapted, ORT, batches)).carrier
    operators = runtime_operators(after, tmp_path)
    assert operators["QGemm"] == 1
    assert "DequantizeLinear" not in operators
    (ours,), (theirs,) = (list(m.runner().run(batches[0]).values()) for m in (after, model))
    assert sqnr(theirs, ours) > 30


def test_other_targets_have_no_predictions():
    model = hard().graph()
    readers = QuantizeStatic()._settings(ORT).decide(model).readers
    names = [layer.name for layer in readers.values()]
    assert choose(model, ORT_CPU, readers, names, ()) is not None
    assert choose(model, TENSORRT, readers, names, ()) is None


def test_a_pool_of_codes_follows_an_integer_convolution():
    # ONNX Runtime pools codes fast behind an integer layer only; behind one of floats it took 57 ms
    # for what takes 0.3 ms in floats, and what is copied then 0.06 ms.
    pool = "MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>"
    model = chain("dense64", "Relu", pool, "dense64", "dense64", "dense64", size=112)
    net, nodes = network(model)
    first = next(n for n in model.graph if n.op_type == "Conv")
    pooled = next(n for n in model.graph if n.op_type == "MaxPool")
    together, apart = net.cut(nodes), net.cut(nodes - {first}, {first})
    assert pooled in together.integer
    assert pooled not in apart.integer
    size, facts = 64 * 56 * 56, VNNI
    slow = nanoseconds(net, net.cut(nodes - {first} | {pooled}, {first}))
    assert slow > nanoseconds(net, apart) + 0.9 * facts.slow_pool * size


def test_a_layer_that_is_skipped_leaves_its_pool_in_floats():
    pool = "MaxPool<kernel_shape = [2, 2], strides = [2, 2]>"
    model = chain("dense16", "Relu", pool, "dense64", "dense64", size=112)
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
    rules = (StaticRule(match="layer0", skip=True), StaticRule(match="*"))
    decision = QuantizeStatic(layers=rules)._settings(ORT).decide(model)
    assert {*decision.schemes} == {"layer3", "layer4"}
    assert "v2" in decision.placement.values
    assert not decision.placement.carried


def test_chosen_joins_and_moves_are_the_ones_that_work_on_codes():
    text = """(float[1, 16, 16, 16] x) => (float[1, 16, 8, 8] y) {
        a = Conv<kernel_shape = [1, 1]>(x, aw)
        b = Conv<kernel_shape = [1, 1]>(a, bw)
        s = Add(a, b)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(s)
        y = Conv<kernel_shape = [1, 1]>(p, cw)
    }"""
    weight = (16, 16, 1, 1)
    model = graph(text, {"aw": weight, "bw": weight, "cw": weight})
    decision = ALL._settings(ORT).decide(model)
    usual = place(model, ORT_CPU, decision.schemes, decision.readers)
    nodes = {node.op_type: node for node in model.graph}
    assert usual.joins == {nodes["Add"]}
    assert "s" in usual.values
    assert "p" not in usual.values
    chosen = place(model, ORT_CPU, decision.schemes, decision.readers, ())
    assert not chosen.joins
    assert "s" not in chosen.values
    assert "p" in chosen.values


def test_the_ratio_of_an_island_is_what_its_layers_take_as_integers():
    model = chain("dense16", "depth16", *["point64"] * 4, size=112)
    net, nodes = network(model)
    chosen = net.cut(())
    (island,) = net.islands(chosen)
    assert {n for n in island if n in nodes} == nodes - chosen.integer
    costs = CostModel(VNNI, typical_shapes(model))
    alone = sum(costs.cost(node).floating for node in island) / net.floating[0]
    saved = chosen.ratio - net.cut(nodes).ratio
    assert net.turned(chosen, island) == pytest.approx(((alone - saved) / alone, saved))


def test_one_choice_is_for_all_kinds_of_cpus():
    model = chain("dense16", "depth16", "point64", "depth64", "dense64", channels=16, size=56)
    both, _ = network(model, VNNI, AVX2)
    chosen = both.cut(())
    for index, facts in enumerate((VNNI, AVX2)):
        alone, _ = network(model, facts)
        assert alone.floating == (both.floating[index],)
        assert chosen.ratios[index] >= alone.cut(()).ratio - 1e-6
        same = alone.cut(chosen.integer, {*model.graph} - chosen.integer)
        assert same.ratio == pytest.approx(chosen.ratios[index])
    assert chosen.ratio == pytest.approx(sum(chosen.ratios) / 2)


def test_no_kind_of_cpu_pays_for_what_another_gains():
    # Twice as fast on one CPU, which is worth a little slower on the other by the mean alone.
    model = wide().graph()
    readers = ALL._settings(ORT).decide(model).readers
    names = [layer.name for layer in readers.values()]
    assert choose(model, ORT_CPU, readers, names, ()) is None  # all are integer
    costs = [CostModel(facts, typical_shapes(model)) for facts in ORT_CPU_LATENCIES]
    extra = sum(costs[1].cost(n).floating for n in model.graph) / 3
    slow = {
        name: replace(rates, call=extra) if name == "integer-dense" else rates
        for name, rates in AVX2.rates.items()
    }
    profile = replace(ORT_CPU, latencies=(VNNI, replace(AVX2, rates=slow)))
    choice = choose(model, profile, readers, names, ())
    assert choice is not None
    assert max(choice.integer_ratios.values()) > 1
    assert sum(choice.integer_ratios.values()) < 2
    assert max(choice.ratios.values()) <= 1
