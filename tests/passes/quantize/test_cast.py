"""``cast``: half precision and its float32 islands."""

import re
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import SpecError
from compressor.types.carrier import Carrier
from compressor.types.passes import LayerRule, Outcome, PassContext
from compressor.types.tensors import Array, Batch
from passes.quantize.cast import Cast
from passes.quantize.dynamic import QuantizeDynamic
from tests.passes.quantize.small_models import (
    digits,
    file_bytes,
    float_weights,
    graph,
    images,
    noise,
    ops,
    optimized_ops,
    parity_db,
    tokens,
    transformer,
)

PLAIN = PassContext()
HALF = ir.DataType.FLOAT16


def applied(carrier: Carrier, step: Cast | None = None) -> Outcome:
    return (step or Cast()).apply(carrier, PLAIN, {})


def half(text: str, **weights: Array) -> tuple[Carrier, Carrier]:
    """Return a graph and the same in half precision, which must be sound."""
    carrier = graph(text, weights)
    result = applied(carrier).carrier
    check_casts(result)
    return carrier, result


def check_casts(carrier: Carrier) -> None:
    """No cast follows a cast, none is idle, and no value is cast to one type twice."""
    file_bytes(carrier)
    made: Counter[tuple[str | None, int]] = Counter()
    for node in carrier.graph().graph:
        if node.op_type != "Cast" or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        before = source.producer()
        to = node.attributes.get_int("to", 0)
        assert before is None or before.op_type != "Cast"
        assert source.dtype is None or source.dtype.value != to
        made[source.name, to] += 1
    assert set(made.values()) <= {1}


def kinds(carrier: Carrier) -> dict[str, ir.DataType | None]:
    """Element type of each node's first output, by operator (the last of each)."""
    return {node.op_type: node.outputs[0].dtype for node in carrier.graph().graph}


def stored(carrier: Carrier, name: str) -> ir.DataType | None:
    return carrier.graph().graph.initializers[name].dtype


@pytest.mark.parametrize(("carrier", "batch"), [(transformer, tokens), (digits, images)])
def test_networks_agree_with_the_float_model(carrier: object, batch: object) -> None:
    source, data = carrier(), batch()  # type: ignore[operator]
    outcome = applied(source)
    check_casts(outcome.carrier)
    assert parity_db(source, outcome.carrier, data) > 50
    assert file_bytes(outcome.carrier) < 0.6 * file_bytes(source)
    assert not float_weights(outcome.carrier)
    assert {layer.name for layer in outcome.layers} == {layer.name for layer in source.layers()}
    assert {layer.scheme for layer in outcome.layers} == {"fp16"}
    assert {layer.dtype for layer in outcome.carrier.layers()} == {"float16"}


def test_casts_stand_at_borders_only() -> None:
    found = ops(applied(transformer()).carrier)
    # The model's own, one behind the positions, four around two softmaxes, one at the output.
    assert found.count("Cast") == 1 + 1 + 4 + 1
    assert ops(applied(digits()).carrier).count("Cast") == 4


@pytest.mark.parametrize("keep_io", [True, False])
def test_inputs_and_outputs_follow_the_option(keep_io: bool) -> None:
    outcome = applied(digits(), Cast(keep_io=keep_io))
    wanted = "float32" if keep_io else "float16"
    names = [(s.name, s.dtype) for s in (*outcome.carrier.inputs, *outcome.carrier.outputs)]
    assert names == [("image", wanted), ("output", wanted)]
    batch = images() if keep_io else {"image": images()["image"].astype(np.float16)}
    got = outcome.carrier.runner().run(batch)["output"]
    expected = digits().runner().run(images())["output"]
    assert got.dtype == wanted
    assert np.square(got - expected).sum() < 1e-4 * np.square(expected).sum()


def test_skipped_layers_stay_float32_with_their_bias() -> None:
    step = Cast(layers=(LayerRule(match="blocks.0.mlp.*", skip=True),))
    plan = {row.name: row for row in step.survey(transformer(), PLAIN).layers}
    assert plan["blocks.0.mlp.0"].action == "keep"
    assert "rule 'blocks.0.mlp.*'" in plan["blocks.0.mlp.0"].reason
    outcome = applied(transformer(), step)
    check_casts(outcome.carrier)
    assert float_weights(outcome.carrier) == ["blocks.0.mlp.0.weight", "blocks.0.mlp.2.weight"]
    assert stored(outcome.carrier, "blocks.0.mlp.0.bias") == ir.DataType.FLOAT
    assert stored(outcome.carrier, "blocks.1.mlp.0.bias") == HALF
    assert parity_db(transformer(), outcome.carrier, tokens()) > 50


def test_a_tied_weight_is_skipped_for_all_its_readers() -> None:
    step = Cast(layers=(LayerRule(match="head", skip=True),))
    outcome = applied(transformer(), step)
    assert float_weights(outcome.carrier) == ["head.weight"]
    assert parity_db(transformer(), outcome.carrier, tokens()) > 50


def test_rules_and_emptiness_are_checked() -> None:
    with pytest.raises(SpecError, match="matches no layer"):
        Cast(layers=(LayerRule(match="tail", skip=True),)).survey(digits(), PLAIN)
    with pytest.raises(SpecError, match="touches no layer: 7 of 7: skipped"):
        Cast(layers=(LayerRule(match="*", skip=True),)).survey(digits(), PLAIN)
    with pytest.raises(SpecError, match="touches no layer: 7 of 7: its weight is float16"):
        Cast().survey(applied(digits()).carrier, PLAIN)


def test_the_plan_names_what_stays_float32() -> None:
    notes = Cast().survey(transformer(), PassContext(targets=frozenset({"ort-cpu"}))).notes
    assert "2 Softmax (adds up many terms)" in notes[0]
    assert "not faster" in notes[1]


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


def test_vanished_weights_are_counted() -> None:
    weight = np.full((4, 4), 0.5, np.float32)
    weight[0, :3] = 1e-9
    weight[1, 0] = 0.0
    carrier = graph("g (float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, w) }", {"w": weight})
    (layer,) = applied(carrier).layers
    assert layer.details == {"vanished": 3}


def test_positions_and_angles_stay_float32() -> None:
    found = kinds(applied(transformer()).carrier)
    assert found["Range"] == ir.DataType.INT64
    assert found["Sin"] == ir.DataType.FLOAT
    assert stored(applied(transformer()).carrier, "rates") == ir.DataType.FLOAT


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
def test_bodies_of_if_stay_float32(chosen: bool) -> None:
    carrier, result = half(SUBGRAPH, a=noise(8, 8), b=noise(8, 8, seed=1))
    assert (stored(result, "a"), stored(result, "b")) == (HALF, ir.DataType.FLOAT)
    plan = {row.name: row.reason for row in Cast().survey(carrier, PLAIN).layers}
    assert plan == {"a": "", "b": "it is read in a subgraph"}
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


def test_a_plan_computes_no_weight_that_an_earlier_pass_left_lazy() -> None:
    def refuse() -> ir.TensorProtocol:
        pytest.fail("a lazy weight was computed")

    text = """g (float[n, 8] x) => (float[n, 8] y) {
        d = DequantizeLinear(a.weight, s) h = MatMul(x, d) y = MatMul(h, b.weight)
    }"""
    weights: dict[str, Array] = {
        "a.weight": np.ones((8, 8), np.int8),
        "s": np.array(0.1, np.float32),
        "b.weight": noise(8, 8),
    }
    carrier = graph(text, weights)
    for value in carrier.graph().graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.LazyTensor(
            refuse, value.const_value.dtype, ir.Shape(value.const_value.shape.numpy())
        )
    assert sum(row.touched for row in Cast().survey(carrier, PLAIN).layers) == 1
    assert stored(Cast().preview(carrier, PLAIN, {}), "b.weight") == HALF


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


def test_dynamically_quantized_layers_stay_as_they_are(tmp_path: object) -> None:
    rules = (LayerRule(match="blocks.1.*", skip=True),)
    quantized = QuantizeDynamic(layers=rules).apply(transformer(), PLAIN, {}).carrier
    result = applied(quantized).carrier
    check_casts(result)
    assert parity_db(quantized, result, tokens()) > 30
    fused = optimized_ops(result, tmp_path)  # type: ignore[arg-type]
    assert sum(op in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul") for op in fused) == 5


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


SINGLE = {
    "Resize": 'y = Resize<mode = "linear">(h, , scales)',
    "ConvTranspose": "y = ConvTranspose(h, k)",
    "BatchNormalization": "y = BatchNormalization(h, c, c, c, c)",
    "InstanceNormalization": "y = InstanceNormalization(h, c, c)",
    "GroupNormalization": "y = GroupNormalization<num_groups = 2>(h, c, c)",
    "PRelu": "y = PRelu(h, p)",
    "Einsum": 'y = Einsum<equation = "nchw,cd->ndhw">(h, e)',
    "Softplus": "y = Softplus(h)",
    "LRN": "y = LRN<size = 3>(h)",
    "AveragePool": "y = AveragePool<kernel_shape = [2, 2]>(h)",
    "MaxPool": "y = MaxPool<kernel_shape = [2, 2]>(h)",
    "GlobalAveragePool": "y = GlobalAveragePool(h)",
    "HardSwish": "y = HardSwish(h)",
    "CumSum": "y = CumSum(h, axis)",
    "ArgMax": "a = ArgMax<axis = 1>(h) y = Cast<to = 1>(a)",
    "Clip": "y = Clip(h, low, high)",
    "Pad": "y = Pad(h, pads, low)",
    "GridSample": "y = GridSample(h, grid)",
    "Celu": "y = Celu(h)",
    "Shape": "s = Shape(h) y = Expand(low, s)",
    "LayerNormalization": "y, m, v = LayerNormalization<axis = 1>(h, n)",
    "Dropout": "y = Dropout(h)",
    "Compare": "g = Greater(h, low) t = Cast<to = 1>(g) y = Mul(t, h)",
    "Random": "r = RandomUniformLike(h) z = Mul(r, nil) y = Add(z, h)",
}
CONSTANTS: dict[str, Array] = {
    "w": noise(4, 4, 3, 3),
    "k": noise(4, 2, 3, 3, seed=1),
    "c": np.full(4, 0.7, np.float32),
    "p": noise(4, 1, 1, seed=2),
    "e": noise(4, 3, seed=3),
    "n": noise(4, 6, 6, seed=4),
    "grid": np.tanh(noise(2, 5, 5, 2, seed=5)),
    "scales": np.array([1, 1, 2, 1.5], np.float32),
    "axis": np.array(1),
    "pads": np.array([0, 0, 1, 1, 0, 0, 0, 2]),
    "low": np.array(-0.5, np.float32),
    "high": np.array(0.5, np.float32),
    "nil": np.array(0, np.float32),
}


@pytest.mark.parametrize("name", SINGLE)
def test_operators_run_in_onnx_runtime_after_the_cast(name: str) -> None:
    text = SINGLE[name]
    words = set(re.findall(r"\w+", text)) | {"w"}
    used = {k: v for k, v in CONSTANTS.items() if k in words}
    carrier, result = half(
        f"g (float[2, 4, 8, 8] x) => (float[n, o, i, j] y) {{ h = Conv(x, w) {text} }}", **used
    )
    assert stored(result, "w") == HALF
    assert parity_db(carrier, result, {"x": noise(2, 4, 8, 8, seed=6)}) > 40


def test_recurrent_layers_run() -> None:
    text = """g (float[t, b, 8] x) => (float[t, d, b, 6] y) {
        h = MatMul(x, a) y, s = LSTM<hidden_size = 6>(h, w, r)
    }"""
    carrier, result = half(text, a=noise(8, 8), w=noise(1, 24, 8), r=noise(1, 24, 6))
    assert parity_db(carrier, result, {"x": noise(5, 2, 8)}) > 50


def test_older_opsets_are_cast_too() -> None:
    text = """g (float[n, 4, 8, 8] x) => (float[n, o, i, j] y) {
        h = Conv(x, w) y = Softmax<axis = 1>(h)
    }"""
    carrier = graph(text, {"w": noise(4, 4, 3, 3)}, opset=13)
    result = applied(carrier).carrier
    assert parity_db(carrier, result, {"x": noise(2, 4, 8, 8)}) > 50


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_weights_only_computes_in_float32(dtype: str) -> None:
    step = Cast.model_validate({"dtype": dtype, "weights-only": True})
    for carrier, batch in ((transformer(), tokens()), (digits(), images())):
        outcome = applied(carrier, step)
        assert not float_weights(outcome.carrier)
        wanted = "float16" if dtype == "fp16" else "bfloat16"
        assert {layer.dtype for layer in outcome.carrier.layers()} == {wanted}
        assert parity_db(carrier, outcome.carrier, batch) > (60 if dtype == "fp16" else 45)
        assert file_bytes(outcome.carrier) < 0.61 * file_bytes(carrier)
        assert set(kinds(outcome.carrier).values()) <= {*kinds(carrier).values(), ir.DataType.FLOAT}


def test_weights_only_leaves_what_overflows_or_is_skipped() -> None:
    weight = np.full((4, 4), 1e5, np.float32)
    text = """g (float[n, 4] x) => (float[n, 4] y) {
        h = MatMul(x, a) i = MatMul(h, b) y = MatMul(i, c)
    }"""
    carrier = graph(text, {"a": weight, "b": noise(4, 4), "c": noise(4, 4)})
    step = Cast(weights_only=True, layers=(LayerRule(match="c", skip=True),))
    outcome = applied(carrier, step)
    assert float_weights(outcome.carrier) == ["a", "c"]
    assert outcome.notes == ("layer 'a' stays in float32: its weight reaches 1e+05, above 65504",)
    step = Cast(dtype="bf16", weights_only=True)
    assert not float_weights(applied(carrier, step).carrier)
    carrier = graph(text, {"a": np.full((4, 4), 3.4e38, np.float32), "b": weight, "c": weight})
    assert float_weights(applied(carrier, step).carrier) == ["a"]


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(SpecError, match=r"no bfloat16 kernels.*weights-only"):
        Cast(dtype="bf16").survey(digits(), PLAIN)
    with pytest.raises(SpecError, match="keep-io"):
        Cast(weights_only=True, keep_io=False).survey(digits(), PLAIN)


@pytest.mark.parametrize("step", [Cast(), Cast(dtype="bf16", weights_only=True)])
def test_preview_has_the_form_of_the_result_and_reads_no_weight(
    step: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a weight was read")

    with monkeypatch.context() as patch:
        patch.setattr("passes.quantize.half._converted", refuse)
        patch.setattr("passes.quantize.islands.extreme", refuse)
        preview = step.preview(transformer(), PLAIN, {})
    result = applied(transformer(), step).carrier
    assert ops(preview) == ops(result)
    described = [
        {k: (v.dtype, v.shape) for k, v in carrier.graph().graph.initializers.items()}
        for carrier in (preview, result)
    ]
    assert described[0] == described[1]


def test_the_float_model_is_left_as_it_was() -> None:
    def described() -> list[tuple[str | None, str]]:
        main = transformer().graph().graph
        values = [*main.inputs, *main.initializers.values(), *(v for n in main for v in n.outputs)]
        return [(v.name, str(v.type)) for v in values]

    before = ops(transformer()), described()
    for step in (Cast(), Cast(keep_io=False), Cast(weights_only=True)):
        applied(transformer(), step)
    assert before == (ops(transformer()), described())
