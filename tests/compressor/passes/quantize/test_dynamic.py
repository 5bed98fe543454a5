"""``quantize-dynamic``."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import SpecError
from compressor.passes.quantize.dynamic import DynamicWeights, QuantizeDynamic
from compressor.types.carrier import Carrier
from compressor.types.passes import LayerRule, Outcome, PassContext
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

PLAIN = PassContext()
FUSED = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
GEMM = "g (float[n, 32] x) => (float[n, 24] y) { y = Gemm<transB = 1>(x, fc.weight, b) }"


def gemm(**attributes: float) -> Carrier:
    text = GEMM.replace(
        "transB = 1", ", ".join(["transB = 1", *(f"{k} = {v}" for k, v in attributes.items())])
    )
    return graph(text, {"fc.weight": noise(24, 32), "b": noise(24, seed=1)})


def applied(carrier: Carrier, step: QuantizeDynamic | None = None) -> Outcome:
    return (step or QuantizeDynamic()).apply(carrier, PLAIN, {})


def keep(carrier: Carrier, step: QuantizeDynamic | None = None) -> dict[str, str]:
    survey = (step or QuantizeDynamic()).survey(carrier, PLAIN)
    return {row.name: row.reason for row in survey.layers if not row.touched}


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("bits", [8, 7])
def test_transformers_agree_with_the_float_model(granularity: str, bits: int) -> None:
    weights = DynamicWeights.model_validate({"granularity": granularity, "bits": bits})
    outcome = applied(transformer(), QuantizeDynamic(weights=weights))
    assert parity_db(transformer(), outcome.carrier, tokens()) > (32 if bits == 8 else 28)
    assert not float_weights(outcome.carrier)
    assert all(layer.scheme == f"int{bits}/{granularity} dynamic" for layer in outcome.layers)


def test_transformers_shrink_to_a_quarter() -> None:
    outcome = applied(transformer())
    assert file_bytes(outcome.carrier) < 0.45 * file_bytes(transformer())


def test_matrix_products_run_in_onnx_runtime_s_fused_kernels(tmp_path: Path) -> None:
    found = optimized_ops(applied(transformer()).carrier, tmp_path)
    assert sum(op in FUSED for op in found) == 9
    assert not {"MatMulInteger", "DequantizeLinear"} & set(found)
    found = optimized_ops(applied(gemm()).carrier, tmp_path)
    assert found == ["DynamicQuantizeMatMul"]


def test_a_weight_shared_with_an_embedding_is_stored_once_as_int8() -> None:
    outcome = applied(transformer())
    initializers = outcome.carrier.graph().graph.initializers
    assert initializers["head.weight"].dtype == ir.DataType.INT8
    assert {layer.name for layer in outcome.layers} >= {"head"}
    assert "DequantizeLinear" not in ops(outcome.carrier)


def test_a_small_table_is_kept() -> None:
    text = """g (int64[n] i) => (float[n, 8] y) {
        x = Gather(embed.weight, i) y = MatMul(x, fc.weight)
    }"""
    carrier = graph(text, {"embed.weight": noise(10, 16), "fc.weight": noise(16, 8, seed=1)})
    assert keep(carrier) == {
        "embed": "a table below 65,536 weights stays; quantize-weights stores it with "
        "embeddings: true"
    }
    assert float_weights(applied(carrier).carrier) == ["embed.weight"]


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_convolutions_are_kept_unless_they_are_asked_for(granularity: str) -> None:
    reasons = keep(digits())
    assert set(reasons) == {layer.name for layer in digits().layers()} - {"head"}
    assert "convolutions is off" in reasons["stem"]
    weights = DynamicWeights.model_validate({"granularity": granularity})
    step = QuantizeDynamic(convolutions=True, weights=weights)
    assert not keep(digits(), step)
    outcome = applied(digits(), step)
    assert parity_db(digits(), outcome.carrier, images()) > 25
    assert not float_weights(outcome.carrier)
    assert file_bytes(outcome.carrier) < 0.35 * file_bytes(digits())


@pytest.mark.parametrize(
    ("text", "weight", "entry"),
    [
        ("y = Conv<group=4, strides=[2], pads=[1, 0]>(x, w, b)", (8, 1, 3), (2, 4, 11)),
        ("y = Conv<dilations=[2, 1], pads=[1, 0, 2, 1]>(x, w, b)", (8, 4, 3, 2), (2, 4, 9, 8)),
        ("y = Conv<auto_pad='SAME_UPPER'>(x, w, b)".replace("'", '"'), (8, 4, 3, 3), (2, 4, 8, 8)),
    ],
)
def test_convolutions_keep_their_attributes_and_bias(
    text: str, weight: tuple[int, ...], entry: tuple[int, ...]
) -> None:
    sizes = ", ".join(str(d) for d in entry[1:])
    header = f"g (float[n, {sizes}] x) => (float[n, 8{', h' * (len(entry) - 2)}] y)"
    carrier = graph(
        f"{header} {{ {text} }}".replace("h, h", "h, v"), {"w": noise(*weight), "b": noise(8)}
    )
    outcome = applied(carrier, QuantizeDynamic(convolutions=True))
    assert parity_db(carrier, outcome.carrier, {"x": noise(*entry, seed=2) + 1}) > 30


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("y = MatMul(x, w)", (32, 24)),
        ("t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", (24, 32)),
        ("y = Gemm(x, w)", (32, 24)),
        ("t = Transpose<perm = [1, 0]>(w) y = Gemm<transB = 1>(x, t)", (32, 24)),
    ],
)
def test_weights_may_be_stored_either_way_round(text: str, shape: tuple[int, int]) -> None:
    carrier = graph(f"g (float[n, 32] x) => (float[n, 24] y) {{ {text} }}", {"w": noise(*shape)})
    quantized = applied(carrier).carrier
    assert parity_db(carrier, quantized, {"x": noise(9, 32, seed=3)}) > 35
    assert tuple(quantized.graph().graph.initializers["w"].shape or ()) == shape


def test_readers_of_one_activation_share_its_quantization() -> None:
    text = """g (float[b, t, 16] x) => (float[b, t, 16] q, float[b, t, 16] k, float[b, t, 16] v) {
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
    }"""
    carrier = graph(text, {n: noise(16, 16, seed=i) for i, n in enumerate(("wq", "wk", "wv"))})
    quantized = applied(carrier).carrier
    assert ops(quantized).count("DynamicQuantizeLinear") == 1
    assert ops(quantized).count("MatMulInteger") == 3
    assert parity_db(carrier, quantized, {"x": noise(2, 5, 16, seed=9)}) > 35


def test_values_keep_their_names() -> None:
    layer = transformer().layers()[1]
    quantized = applied(transformer()).carrier
    tapped = quantized.runner([layer.output]).run(tokens())[layer.output]
    wanted = transformer().runner([layer.output]).run(tokens())[layer.output]
    assert tapped.shape == wanted.shape
    assert np.square(tapped - wanted).sum() < 1e-3 * np.square(wanted).sum()


def test_nodes_in_subgraphs_are_quantized_there() -> None:
    text = """g (float[n, 16] x, bool c) => (float[n, 16] y) {
        h = MatMul(x, w)
        y = If<then_branch = t () => (float[n, 16] a) { a = MatMul(h, w) },
               else_branch = e () => (float[n, 16] b) { b = Add(h, h) }>(c)
    }"""
    carrier = graph(text, {"w": noise(16, 16)})
    quantized = applied(carrier).carrier
    for chosen in (True, False):
        batch = {"x": noise(4, 16, seed=1), "c": np.array(chosen)}
        assert parity_db(carrier, quantized, batch) > 30


def test_rules_skip_layers() -> None:
    step = QuantizeDynamic(layers=(LayerRule(match="blocks.0.*", skip=True),))
    reasons = keep(transformer(), step)
    assert len(reasons) == 4
    assert set(reasons.values()) == {"skipped by the rule 'blocks.0.*'"}
    outcome = applied(transformer(), step)
    assert len(float_weights(outcome.carrier)) == 4
    assert len(outcome.layers) == 5


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(SpecError, match="matches no layer"):
        keep(gemm(), QuantizeDynamic(layers=(LayerRule(match="fd", skip=True),)))


@pytest.mark.parametrize("attribute", ["alpha", "beta"])
def test_gemm_with_factors_is_kept(attribute: str) -> None:
    with pytest.raises(SpecError, match="touches no layer: 1 of 1: its alpha"):
        keep(gemm(**{attribute: 0.5}))


def test_touching_nothing_is_an_error() -> None:
    step = QuantizeDynamic(layers=(LayerRule(match="*", skip=True),))
    with pytest.raises(SpecError, match="touches no layer"):
        step.survey(transformer(), PLAIN)
    quantized = applied(gemm()).carrier
    with pytest.raises(SpecError, match="touches no layer"):
        QuantizeDynamic().survey(quantized, PLAIN)


def test_tensorrt_is_refused_with_a_remedy() -> None:
    with pytest.raises(SpecError, match=r"MatMulInteger.*quantize-static"):
        QuantizeDynamic().survey(gemm(), PassContext(targets=frozenset({"tensorrt"})))


def test_preview_has_the_form_of_the_result_and_reads_no_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("compressor.passes.quantize.dynamic.quantize", None)
        preview = QuantizeDynamic().preview(transformer(), PLAIN, {})
    result = applied(transformer()).carrier
    assert ops(preview) == ops(result)
    described = [
        {k: (v.dtype, v.shape) for k, v in carrier.graph().graph.initializers.items()}
        for carrier in (preview, result)
    ]
    assert described[0] == described[1]


def test_the_float_model_is_left_as_it_was() -> None:
    before = ops(transformer()), float_weights(transformer())
    applied(transformer())
    assert before == (ops(transformer()), float_weights(transformer()))


def test_outcome_reports_the_weight_s_signal_to_noise() -> None:
    (layer,) = applied(gemm()).layers
    assert layer.name == "fc"
    assert layer.weight_sqnr_db == pytest.approx(44, abs=4)
    exact = graph(GEMM, {"fc.weight": np.eye(24, 32, dtype=np.float32), "b": noise(24)})
    assert applied(exact).layers[0].weight_sqnr_db is None


def test_a_value_is_quantized_before_all_its_readers() -> None:
    """Layers of one weight are replaced together, the last of them before others in between."""
    carrier = graph(
        """g (float[n, 32] x) => (float[n, 32] y) {
            a = MatMul (x, first.weight)
            b = MatMul (a, second.weight)
            c = MatMul (b, first.weight)
            d = MatMul (b, second.weight)
            e = MatMul (a, first.weight)
            f = Add (c, d)
            y = Add (e, f)
        }""",
        {"first.weight": noise(32, 32) / 6, "second.weight": noise(32, 32, seed=1) / 6},
    )
    made = applied(carrier).carrier
    seen = set(made.graph().graph.inputs)
    for node in made.graph().graph:
        assert all(v is None or v.is_initializer() or v in seen for v in node.inputs)
        seen.update(node.outputs)
