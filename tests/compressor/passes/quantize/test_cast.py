"""``cast``: half precision on whole networks, its options and its plan."""

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import SpecError
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.types.passes import LayerRule, PassContext
from compressor.types.tensors import Array
from tests.compressor.passes.quantize.cast_models import (
    HALF,
    PLAIN,
    applied,
    check_casts,
    kinds,
    stored,
)
from tests.compressor.passes.quantize.small_models import (
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


@pytest.mark.parametrize(("carrier", "batch"), [(transformer, tokens), (digits, images)])
def test_bfloat16_is_computed_where_no_target_lacks_it(carrier: object, batch: object) -> None:
    source, data = carrier(), batch()  # type: ignore[operator]
    step = Cast(dtype="bf16")
    with pytest.raises(SpecError, match=r"target ort-cpu: it has no bfloat16 kernels.*weights-"):
        step.survey(source, PassContext(0, frozenset({"ort-cpu"})))
    context = PassContext(0, frozenset({"tensorrt"}))
    assert all(row.touched for row in step.survey(source, context).layers)
    after = step.apply(source, context, {}).carrier
    assert {layer.dtype for layer in after.layers()} == {"bfloat16"}
    assert [i.dtype for i in after.inputs] == [i.dtype for i in source.inputs]
    runner = after.runner()
    assert runner.runtime.startswith("torch ")
    assert parity_db(source, after, data) > 30
    tapped = next(v.name for n in after.graph().graph for v in n.outputs if n.op_type == "Add")
    assert tapped in after.runner([tapped]).run(data)


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


def test_dynamically_quantized_layers_stay_as_they_are(tmp_path: object) -> None:
    rules = (LayerRule(match="blocks.1.*", skip=True),)
    quantized = QuantizeDynamic(layers=rules).apply(transformer(), PLAIN, {}).carrier
    result = applied(quantized).carrier
    check_casts(result)
    assert parity_db(quantized, result, tokens()) > 30
    fused = optimized_ops(result, tmp_path)  # type: ignore[arg-type]
    assert sum(op in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul") for op in fused) == 5


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
    with pytest.raises(SpecError, match="keep-io"):
        Cast(weights_only=True, keep_io=False).survey(digits(), PLAIN)


@pytest.mark.parametrize("step", [Cast(), Cast(dtype="bf16", weights_only=True)])
def test_preview_has_the_form_of_the_result_and_reads_no_weight(
    step: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a weight was read")

    with monkeypatch.context() as patch:
        patch.setattr("compressor.passes.quantize.cast.rewrite._converted", refuse)
        patch.setattr("compressor.passes.quantize.cast.islands.extreme", refuse)
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


def test_an_epsilon_for_each_channel_stays_float32() -> None:
    """Of a padded row, 0 / 0 would be made."""
    text = "g (float[n, 4] x) => (float[n, 4] y) { a = Abs(x) b = Add(a, e) y = Div(x, b) }"
    result = applied(graph(text, {"e": np.full(4, 1e-9, np.float32)})).carrier
    assert kinds(result)["Div"] == ir.DataType.FLOAT
    (values,) = result.runner().run({"x": np.zeros((2, 4), np.float32)}).values()
    assert np.array_equal(values, np.zeros((2, 4)))


def test_a_weight_that_the_model_returns_keeps_its_type() -> None:
    weight = np.full((4, 4), 0.5, np.float32)
    text = "g (float[n, 4] x) => (float[n, 4] y, float[4, 4] w) { y = MatMul(x, w) }"
    carrier = graph(text, {"w": weight})
    with pytest.raises(SpecError, match="its weight is an output of the model"):
        Cast(weights_only=True).survey(carrier, PLAIN)
