"""Passes enter the branches of ``If`` and the bodies of ``Loop`` and ``Scan``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import compressor
from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.graph.blocks import partition
from compressor.graph.values import all_nodes
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.run.evaluate import layer_signals
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import LayerRule, PassContext
from compressor.types.tensors import Batch
from tests.compressor.passes.quantize.small_models import float_weights, graph, noise, parity_db
from tests.compressor.passes.quantize.static_models import statistics

WIDTH = 32
ORT = PassContext(targets=frozenset({"ort-cpu"}))

IF = """g (float[n, 32] x, bool flag) => (float[n, 32] y) {
  h = MatMul(x, first)
  y = If(flag) <
    then_branch = t () => (float[n, 32] o) {
      m = MatMul(h, second) b = Add(m, shift) r = Tanh(b) o = Mul(r, gain)
    },
    else_branch = e () => (float[n, 32] p) { k = MatMul(h, third) p = Add(k, h) }
  >
}"""
LOOP = """g (float[n, 32] x, int64 count) => (float[n, 32] y, float[t, n, 32] z) {
  go = Constant<value = bool {1}>()
  h = MatMul(x, first)
  y, z = Loop(count, go, h) <
    body = b (int64 i, bool c, float[n, 32] v) => (bool d, float[n, 32] w, float[n, 32] s) {
      d = Identity(c) m = MatMul(v, second) a = Add(m, h) w = Tanh(a) s = Mul(w, gain)
    }
  >
}"""
SCAN = """g (float[t, n, 32] x, float[n, 32] start) => (float[n, 32] y, float[t, n, 32] z) {
  h = MatMul(x, first)
  y, z = Scan <num_scan_inputs = 1,
    body = b (float[n, 32] v, float[n, 32] u) => (float[n, 32] w, float[n, 32] s) {
      m = MatMul(v, second) k = MatMul(u, third) a = Add(m, k) w = Tanh(a) s = Mul(w, gain)
    }
  >(start, h)
}"""
NESTED = """g (float[n, 32] x, int64 count, bool flag) => (float[n, 32] y) {
  go = Constant<value = bool {1}>()
  h = MatMul(x, first)
  y = Loop(count, go, h) <
    body = b (int64 i, bool c, float[n, 32] v) => (bool d, float[n, 32] w) {
      d = Identity(c)
      w = If(flag) <
        then_branch = t () => (float[n, 32] o) { m = MatMul(v, second) a = Add(m, h) o = Tanh(a) },
        else_branch = e () => (float[n, 32] p) { k = MatMul(v, third) p = Tanh(k) }
      >
    }
  >
}"""


def flags(**batch: np.ndarray) -> list[Batch]:
    return [{**batch, "flag": np.array(flag)} for flag in (True, False)]


X = noise(5, WIDTH, seed=3)
MODELS: Mapping[str, tuple[str, Sequence[Batch]]] = {
    "if": (IF, flags(x=X)),
    "loop": (LOOP, [{"x": X, "count": np.array(4)}]),
    "scan": (SCAN, [{"x": noise(6, 5, WIDTH, seed=4), "start": noise(5, WIDTH, seed=5)}]),
    "nested": (NESTED, flags(x=X, count=np.array(3))),
}
STEPS: Mapping[str, tuple[Any, float]] = {  # the least SQNR, dB
    "cast": (Cast(dtype="fp16"), 60),
    "weights-only": (Cast(dtype="fp16", weights_only=True), 60),
    "weights": (QuantizeWeights(bits=8), 34),
    "four-bits": (QuantizeWeights(bits=4, group=16), 12),
    "dynamic": (QuantizeDynamic(), 32),
    "static": (QuantizeStatic(), 30),
}


def network(name: str) -> Carrier:
    text, _ = MODELS[name]
    matrices = {n: noise(WIDTH, WIDTH, seed=i) for i, n in enumerate(("first", "second", "third"))}
    weights = {name: array * WIDTH**-0.5 for name, array in matrices.items() if name in text}
    vectors = {name: 1 + 0.3 * noise(WIDTH, seed=9) for name in ("shift", "gain") if name in text}
    return graph(text, {**weights, **vectors})


def applied(step: Any, name: str) -> Carrier:
    source, (_, batches) = network(name), MODELS[name]
    static = isinstance(step, QuantizeStatic)
    observed = statistics(step, source, ORT, list(batches)) if static else {}
    result: Carrier = step.apply(source, ORT, observed).carrier
    return result


def sqnr_db(wanted: Batch, given: Batch) -> float:
    signal = sum(float(np.square(w, dtype=np.float64).sum()) for w in wanted.values())
    error = sum(float(np.square(wanted[n].astype(np.float64) - given[n]).sum()) for n in wanted)
    return 10 * np.log10(signal / max(error, 1e-30))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", STEPS)
def test_weights_inside_are_compressed_in_every_artifact(
    form: str, name: str, tmp_path: Path
) -> None:
    (step, least), (_, batches) = STEPS[form], MODELS[name]
    source, changed = network(name), applied(step, name)
    assert not {"first", "second", "third"} & set(float_weights(changed))
    assert all(row.touched for row in step.survey(source, ORT).layers)
    exporter = OnnxExporter(target="ort-cpu")
    (path,) = exporter.write(changed, tmp_path, USUAL)
    SafetensorsExporter().write(changed, tmp_path, USUAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = compressor.load(tmp_path)
    opened = exporter.open(path)
    for batch in batches:
        wanted = source.runner().run(batch)
        with torch.no_grad():
            tensors = loaded(**{n: torch.from_numpy(np.asarray(a)) for n, a in batch.items()})
        if isinstance(tensors, torch.Tensor):
            tensors = (tensors,)
        if not isinstance(tensors, dict):
            tensors = dict(zip(wanted, tensors, strict=True))
        assert sqnr_db(wanted, changed.runner().run(batch)) > least
        assert sqnr_db(wanted, opened.run(batch)) > least
        assert sqnr_db(wanted, {n: t.numpy() for n, t in tensors.items()}) > least


@pytest.mark.parametrize("name", MODELS)
def test_halves_cross_borders_of_bodies_only_where_they_must(name: str) -> None:
    changed = applied(Cast(dtype="fp16", keep_io=False), name)
    batches = MODELS[name][1]
    kinds = {v.name: v.dtype for v in changed.graph().graph.inputs}
    for batch in batches:
        given = {n: a.astype(kinds[n].numpy()) for n, a in batch.items() if kinds[n]}
        assert sqnr_db(network(name).runner().run(batch), changed.runner().run(given)) > 55
    products = [n for n in all_nodes(changed.graph().graph) if n.op_type == "MatMul"]
    assert {v.dtype for n in products for v in n.inputs if v} == {ir.DataType.FLOAT16}
    for inner in changed.graph().graph.subgraphs():
        ends = [v for v in (*inner.inputs, *inner.outputs) if v.dtype in FLOATS]
        assert {v.dtype for v in ends} <= {ir.DataType.FLOAT}


FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16}


def test_values_of_unknown_type_keep_what_reads_them() -> None:
    source = network("loop")
    (body,) = source.graph().graph.subgraphs()
    body.inputs[2].type = None
    for node in all_nodes(source.graph().graph):
        if node.graph is body:
            for value in node.outputs:
                value.type = None
    rows = {row.name: row.reason for row in Cast(dtype="fp16").survey(source, ORT).layers}
    assert rows["second"] == "reads a value of unknown type"
    changed = Cast(dtype="fp16").apply(source, ORT, {}).carrier
    assert parity_db(network("loop"), changed, MODELS["loop"][1][0]) > 55


@pytest.mark.parametrize(
    "step",
    [
        Cast(dtype="fp16", layers=(LayerRule(match="second", skip=True),)),
        QuantizeDynamic(layers=(LayerRule(match="second", skip=True),)),
        QuantizeStatic(layers=(StaticRule(match="second", skip=True), StaticRule(match="*"))),
    ],
)
def test_rules_name_layers_inside(step: Any) -> None:
    rows = {row.name: row.reason for row in step.survey(network("scan"), ORT).layers}
    assert rows == {"first": "", "second": "skipped by the rule 'second'", "third": ""}
    assert float_weights(applied(step, "scan")) == ["second"]


def test_static_says_which_weights_are_only_stored() -> None:
    step = QuantizeStatic(layers=(StaticRule(match="*"),))
    rows = {row.name: row.action for row in step.survey(network("if"), ORT).layers}
    assert rows == {
        "first": "int8/channel x uint8",
        "second": "int8/channel",
        "third": "int8/channel",
    }


CONVOLUTION = """g (float[n, 3, 8, 8] x, int64 count) => (float[n, 3, 8, 8] y) {
  go = Constant<value = bool {1}>()
  y = Loop(count, go, x) <
    body = b (int64 i, bool c, float[n, 3, 8, 8] v) => (bool d, float[n, 3, 8, 8] w) {
      d = Identity(c)
      k = Conv<pads = [1, 1, 1, 1]>(v, kernel)
      q = BatchNormalization(k, gamma, beta, mean, variance)
      half = Constant<value = float {0.5}>()
      root = Constant<value = float {1.4142135}>()
      one = Constant<value = float {1.0}>()
      s = Div(q, root) e = Erf(s) f = Add(e, one) g0 = Mul(q, f) w = Mul(g0, half)
    }
  >
}"""


def test_layers_and_functions_in_a_loop_are_fused() -> None:
    vectors = {name: 1 + 0.2 * noise(3, seed=i) for i, name in enumerate(("gamma", "beta", "mean"))}
    weights = {"kernel": noise(3, 3, 3, 3) * 0.3, "variance": np.full(3, 0.7, np.float32)}
    source = graph(CONVOLUTION, {**weights, **vectors})
    fused = Fuse().apply(source, ORT, {}).carrier
    inside = [
        n.op_type for n in all_nodes(fused.graph().graph) if n.graph is not fused.graph().graph
    ]
    assert sorted(inside) == ["Conv", "Gelu", "Identity"]
    batch = {"x": noise(2, 3, 8, 8), "count": np.array(3)}
    assert parity_db(source, fused, batch) > 100


def test_signals_of_layers_are_those_of_the_main_graph() -> None:
    four = "count = Constant<value = int64 {4}>()"
    text = LOOP.replace(", int64 count", "").replace("go = Constant", f"{four} go = Constant")
    matrices = {name: noise(WIDTH, WIDTH, seed=1) * WIDTH**-0.5 for name in ("first", "second")}
    source = graph(text, {**matrices, "gain": noise(WIDTH)})
    changed = QuantizeDynamic().apply(source, ORT, {}).carrier
    assert set(layer_signals(changed, source, [{"x": X}])) == {"first"}


@pytest.mark.parametrize("name", MODELS)
def test_a_block_reads_inputs_of_the_model_and_none_of_a_body(name: str) -> None:
    source = network(name)
    inputs = {spec.name for spec in source.inputs}
    blocks = partition(source.graph())
    assert all(set(block.inputs) <= inputs for block in blocks)
    weights = {weight for block in blocks for weight in block.weights}
    assert weights >= {layer.weight for layer in source.layers()}
