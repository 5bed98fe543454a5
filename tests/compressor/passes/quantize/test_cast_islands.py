"""``cast``: what stays in float32, and where casts stand around it."""

import numpy as np
import onnx_ir as ir
import pytest

from compressor.passes.quantize.cast.cast import Cast
from compressor.types.tensors import Array, Batch
from tests.compressor.passes.quantize.cast_models import (
    HALF,
    PLAIN,
    applied,
    check_casts,
    half,
    kinds,
    stored,
)
from tests.compressor.passes.quantize.small_models import (
    float_weights,
    graph,
    noise,
    ops,
    parity_db,
)


def test_weights_beyond_float16_keep_their_layer_float32() -> None:
    weight = noise(16, 16)
    weight[3, 4] = 1e5
    text = (
        "g (float[n, 16] x) => (float[n, 16] y) { h = MatMul(x, a.weight) y = MatMul(h, b.weight) }"
    )
    carrier = graph(text, {"a.weight": weight, "b.weight": noise(16, 16)})
    plan = Cast().survey(carrier, PLAIN)
    assert all(row.touched for row in plan.layers)  # a plan reads no weights
    outcome = applied(carrier)
    assert outcome.notes == ("layer 'a' stays in float32: its weight reaches 1e+05, above 65504",)
    assert [layer.name for layer in outcome.layers] == ["b"]
    assert float_weights(outcome.carrier) == ["a.weight"]
    assert np.isfinite(outcome.carrier.runner().run({"x": noise(4, 16) / 1e4})["y"]).all()


def test_masks_beyond_float16_reach_the_softmax_in_float32() -> None:
    text = """g (float[n, 8] x, bool[n, 8] m) => (float[n, 8] y) {
        s = MatMul(x, w) f = Where(m, zero, least) e = Unsqueeze(f, axis)
        q = Squeeze(e, axis) a = Add(s, q) p = Softmax(a) y = MatMul(p, w)
    }"""
    carrier, result = half(
        text,
        w=noise(8, 8),
        zero=np.array([0.0], np.float32),
        least=np.array([-3.4e38], np.float32),
        axis=np.array([0]),
    )
    assert kinds(result)["Add"] == ir.DataType.FLOAT
    batch: Batch = {"x": noise(3, 8), "m": np.zeros((3, 8), bool)}
    batch["m"][:2, 2:5] = True  # nothing is left of the last row
    assert parity_db(carrier, result, batch) > 50


def test_constants_that_would_vanish_keep_their_reader_float32() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        h = MatMul(x, w) r = Relu(h) d = Add(r, eps) y = Div(h, d)
    }"""
    _, result = half(text, w=noise(8, 8), eps=np.array([1e-12], np.float32))
    assert kinds(result)["Add"] == ir.DataType.FLOAT
    _, result = half(text, w=noise(8, 8), eps=np.array([1e-3], np.float32))
    assert kinds(result)["Add"] == HALF


def test_a_normalization_written_out_stays_float32_in_its_core() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        h = MatMul(x, w) s = Pow(h, two) m = ReduceMean(s, axis) e = Add(m, eps)
        q = Sqrt(e) r = Reciprocal(q) z = Mul(h, r) y = MatMul(z, w)
    }"""
    constants: dict[str, Array] = {
        "two": np.array(2.0, np.float32),
        "eps": np.array(1e-6, np.float32),
        "axis": np.array([-1]),
    }
    carrier, result = half(text, w=noise(8, 8), **constants)
    found = kinds(result)
    assert {found[op] for op in ("Pow", "ReduceMean", "Add", "Sqrt", "Reciprocal")} == {
        ir.DataType.FLOAT
    }
    assert found["Mul"] == found["MatMul"] == HALF
    assert ops(result).count("Cast") == 4  # input, into Pow, out of Reciprocal, output
    assert parity_db(carrier, result, {"x": noise(5, 8) * 30}) > 50


def test_a_constant_read_by_both_kinds_is_stored_once_as_float32() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        h = MatMul(x, w) p = Pow(h, c) t = Mul(h, c) y = Mul(t, p)
    }"""
    carrier, result = half(text, w=noise(8, 8), c=np.full(8, 2, np.float32))
    assert stored(result, "c") == ir.DataType.FLOAT
    assert parity_db(carrier, result, {"x": noise(5, 8)}) > 50


SUBGRAPH = """g (float[n, 8] x, bool c) => (float[n, 8] y) {
    h = MatMul(x, a)
    r = If<then_branch = t () => (float[n, 8] u) { v = MatMul(h, b) u = Relu(v) },
           else_branch = e () => (float[n, 8] o) { o = Add(h, x) }>(c)
    y = MatMul(r, a)
}"""


@pytest.mark.parametrize("chosen", [True, False])
def test_branches_are_cast_inside_and_end_in_float32(chosen: bool) -> None:
    carrier, result = half(SUBGRAPH, a=noise(8, 8), b=noise(8, 8, seed=1))
    assert (stored(result, "a"), stored(result, "b")) == (HALF, HALF)
    plan = {row.name: row.reason for row in Cast().survey(carrier, PLAIN).layers}
    assert plan == {"a": "", "b": ""}
    branches = list(result.graph().graph.subgraphs())
    assert {branch.outputs[0].dtype for branch in branches} == {ir.DataType.FLOAT}
    batch = {"x": noise(3, 8, seed=2), "c": np.array(chosen)}
    assert parity_db(carrier, result, batch) > 50


def test_loops_carry_float32() -> None:
    text = """g (float[n, 8] x, int64 k) => (float[n, 8] y) {
        h = MatMul(x, a) t = Cast<to = 9>(k)
        r = Loop<body = b (int64 i, bool p, float[n, 8] s) => (bool q, float[n, 8] o) {
            q = Identity(p) d = Add(s, h) o = Tanh(d)
        }>(k, t, h)
        y = MatMul(r, a)
    }"""
    carrier, result = half(text, a=noise(8, 8))
    assert parity_db(carrier, result, {"x": noise(3, 8, seed=2), "k": np.array(3)}) > 50


def test_casts_that_were_there_are_merged() -> None:
    text = """g (float[n, 8] x, float16[n, 8] z) => (float[n, 8] y) {
        h = MatMul(x, a) i = Cast<to = 10>(h) j = Add(i, z) k = Cast<to = 1>(j) y = MatMul(k, a)
    }"""
    carrier, result = half(text, a=noise(8, 8))
    assert ops(result) == ["Cast", "MatMul", "Add", "MatMul", "Cast"]
    batch = {"x": noise(3, 8), "z": noise(3, 8, seed=1).astype(np.float16)}
    assert parity_db(carrier, result, batch) > 50


def test_sequences_hold_float32() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        h = MatMul(x, a) s = SequenceConstruct(h, x) c = ConcatFromSequence<axis = 0>(s)
        y = MatMul(c, a)
    }"""
    carrier = graph(text, {"a": noise(8, 8)}, inferred=False)
    result = applied(carrier).carrier
    check_casts(result)
    assert parity_db(carrier, result, {"x": noise(3, 8)}) > 50


def test_an_output_may_be_read_inside_too() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y, float[n, 8] z, float[n] k) {
        y = MatMul(x, a) z = MatMul(y, a) v, i = TopK(y, one) k = Squeeze(v, axis)
    }"""
    carrier, result = half(text, a=noise(8, 8), one=np.array([1]), axis=np.array([-1]))
    assert [v.name for v in result.graph().graph.outputs] == ["y", "z", "k"]
    assert parity_db(carrier, result, {"x": noise(3, 8)}) > 50


def test_operators_of_other_domains_stay_float32() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        h = MatMul(x, a) q = com.microsoft.QuickGelu(h) r = Relu(q) y = MatMul(r, a)
    }"""
    carrier, result = half(text, a=noise(8, 8))
    assert kinds(result)["Relu"] == HALF
    assert parity_db(carrier, result, {"x": noise(3, 8)}) > 50


def test_layers_of_integer_codes_are_kept() -> None:
    text = """g (float[n, 8] x) => (float[n, 8] y) {
        d = DequantizeLinear(a.weight, s) h = MatMul(x, d) y = MatMul(h, b.weight)
    }"""
    weights: dict[str, Array] = {
        "a.weight": np.ones((8, 8), np.int8),
        "s": np.array(0.1, np.float32),
        "b.weight": noise(8, 8),
    }
    carrier = graph(text, weights)
    plan = {row.name: row.reason for row in Cast().survey(carrier, PLAIN).layers}
    assert plan == {"a": "its weight is int8 already", "b": ""}
    result = applied(carrier).carrier
    assert stored(result, "s") == ir.DataType.FLOAT
    assert parity_db(carrier, result, {"x": noise(3, 8)}) > 50
