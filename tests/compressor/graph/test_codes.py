"""Quantized weights in a graph."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.graph.codes import attach_codes, obstacle
from compressor.graph.editing import Editor
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.types.layers import Layer, QuantizedTensor, Scheme
from compressor.types.tensors import Array, Batch
from tests.compressor.graph.random_codes import UNSIGNED
from tests.compressor.passes.quantize.small_models import (
    digits,
    graph,
    images,
    noise,
    ops,
    run_plainly,
    tokens,
    transformer,
)

MATMUL = "g (float[n, 32] x) => (float[n, 24] y) { y = MatMul(x, fc.weight) }"
GEMM = "g (float[n, 32] x) => (float[n, 24] y) { y = Gemm<transB = 1>(x, fc.weight, b) }"
GEMM_PLAIN = "g (float[n, 32] x) => (float[n, 24] y) { y = Gemm(x, fc.weight, b) }"
CONV = (
    "g (float[n, 8, 9, 9] x) => (float[n, 6, 7, 9] y) { y = Conv<pads=[0, 1, 0, 1]>(x, fc.weight) }"
)
POINTWISE = "g (float[n, 8, 9, 9] x) => (float[n, 6, 9, 9] y) { y = Conv(x, fc.weight) }"
GROUPED = "g (float[n, 8, 9, 9] x) => (float[n, 6, 7, 7] y) { y = Conv<group = 2>(x, fc.weight) }"
TRANSPOSED = "g (float[n, 8, 5, 5] x) => (float[n, 6, h, w] y) { y = ConvTranspose(x, fc.weight) }"
EMBEDDING = "g (int64[n] x) => (float[n, 16] y) { y = Gather(fc.weight, x) }"

GRAPHS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (MATMUL, (32, 24), (5, 32)),
    "gemm": (GEMM, (24, 32), (5, 32)),
    "gemm-plain": (GEMM_PLAIN, (32, 24), (5, 32)),
    "conv": (CONV, (6, 8, 3, 3), (2, 8, 9, 9)),
    "pointwise": (POINTWISE, (6, 8, 1, 1), (2, 8, 9, 9)),
    "grouped": (GROUPED, (6, 4, 3, 3), (2, 8, 9, 9)),
    "transposed": (TRANSPOSED, (8, 6, 3, 3), (2, 8, 5, 5)),
    "embedding": (EMBEDDING, (20, 16), (0,)),
}
SCHEMES = [
    Scheme(8),
    Scheme(8, granularity="tensor"),
    Scheme(8, symmetric=False),
    Scheme(8, signed=False, symmetric=False, granularity="tensor"),
    Scheme(4),
    Scheme(4, signed=False, symmetric=False),
    Scheme(4, granularity="group", group=8),
    Scheme(8, symmetric=False, granularity="group", group=4),
]


def opened(name: str) -> tuple[OnnxCarrier, Batch]:
    text, shape, entry = GRAPHS[name]
    weights = {"fc.weight": noise(*shape)}
    if "b)" in text:
        weights["b"] = noise(24, seed=2)
    if name == "embedding":
        return graph(text, weights), {"x": np.array([3, 0, 19, 3])}
    return graph(text, weights), {"x": noise(*entry, seed=1)}


def rounded(carrier: OnnxCarrier, layer: Layer, scheme: Scheme) -> QuantizedTensor:
    matrix = layer.canonical(carrier.weight(layer))
    return quantize(matrix, *absmax_parameters(matrix, scheme), scheme)


def attached(carrier: OnnxCarrier, scheme: Scheme) -> tuple[OnnxCarrier, Array]:
    """Return the quantized model, and the weight as it should be read."""
    (layer,) = carrier.layers()
    result = rounded(carrier, layer, scheme)
    model = carrier.graph().clone()
    attach_codes(Editor(model), layer, scheme, lambda: result)
    return OnnxCarrier(model), layer.stored(result.dequantize()).numpy()


BLOCKED = ("conv", "grouped", "transposed")  # kernels of which ONNX has no blocks


@pytest.mark.parametrize(
    ("name", "scheme"),
    [(n, s) for n in GRAPHS for s in SCHEMES if not (n in BLOCKED and s.group)],
    ids=str,
)
def test_the_graph_computes_with_the_dequantized_weight(name: str, scheme: Scheme) -> None:
    carrier, batch = opened(name)
    quantized, weight = attached(carrier, scheme)
    wanted = carrier.with_weights({"fc.weight": torch.from_numpy(weight)}).runner().run(batch)
    got = run_plainly(quantized, batch)
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_codes_take_the_weight_s_name_and_shape(name: str) -> None:
    carrier, _ = opened(name)
    quantized, _ = attached(carrier, Scheme(8))
    initializers = quantized.graph().graph.initializers
    assert initializers["fc.weight"].dtype == ir.DataType.INT8
    assert initializers["fc.weight"].shape == carrier.graph().graph.initializers["fc.weight"].shape
    assert initializers["fc.weight_scale"].dtype == ir.DataType.FLOAT
    assert "fc.weight_zero_point" not in initializers
    if name != "embedding":
        assert [layer.name for layer in quantized.layers()] == ["fc"]
        assert quantized.layers()[0].shape == carrier.layers()[0].shape


def test_asymmetric_schemes_have_a_zero_point_of_the_codes_type() -> None:
    carrier, _ = opened("gemm")
    quantized, _ = attached(carrier, Scheme(4, symmetric=False, signed=False))
    initializers = quantized.graph().graph.initializers
    assert initializers["fc.weight_zero_point"].dtype == ir.DataType.UINT4


def test_four_bits_take_half_a_byte() -> None:
    carrier, _ = opened("gemm")
    for scheme, size in (
        (Scheme(8), 24 * 32),
        (Scheme(4), 24 * 32 // 2),
        (Scheme(3), 24 * 32 // 2),
    ):
        quantized, _ = attached(carrier, scheme)
        tensor = quantized.graph().graph.initializers["fc.weight"].const_value
        assert tensor is not None
        assert tensor.nbytes == len(tensor.tobytes()) == size


def test_the_original_graph_is_left_as_it_was() -> None:
    carrier, batch = opened("conv")
    before = carrier.runner().run(batch)["y"]
    attached(carrier, Scheme(8))
    assert carrier.graph().graph.initializers["fc.weight"].dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(carrier.runner().run(batch)["y"], before)


def test_nothing_is_quantized_before_it_is_read_and_then_once() -> None:
    carrier, _ = opened("gemm")
    (layer,) = carrier.layers()
    calls: list[int] = []

    def compute() -> QuantizedTensor:
        calls.append(1)
        return rounded(carrier, layer, Scheme(4))

    model = carrier.graph().clone()
    codes = attach_codes(Editor(model), layer, Scheme(4), compute)
    total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    assert total == 24 * 32 // 2 + 24 * 4 + 24 * 4
    copy = model.clone()
    assert not calls
    for name in ("fc.weight_scale", "fc.weight"):
        tensor = copy.graph.initializers[name].const_value
        assert tensor is not None
        tensor.tobytes()
    assert codes.quantized().codes.shape == (24, 32)
    assert calls == [1]


def test_all_readers_of_a_shared_weight_read_one_dequantized_value() -> None:
    text = (
        "g (float[n, 16] x) => (float[n, 16] y) { a = MatMul(x, w) b = MatMul(a, w) y = Add(b, w) }"
    )
    carrier = graph(text, {"w": noise(16, 16)})
    quantized, weight = attached(carrier, Scheme(8))
    assert ops(quantized) == ["DequantizeLinear", "MatMul", "MatMul", "Add"]
    batch = {"x": noise(16, 16, seed=1)}
    wanted = carrier.with_weights({"w": torch.from_numpy(weight)}).runner().run(batch)
    np.testing.assert_allclose(
        quantized.runner().run(batch)["y"], wanted["y"], rtol=1e-4, atol=1e-4
    )


def test_a_weight_read_inside_a_subgraph_is_dequantized_before_it() -> None:
    text = """g (float[n, 16] x, bool c) => (float[n, 16] y) {
        y = If<then_branch = t () => (float[n, 16] a) { a = MatMul(x, w) },
               else_branch = e () => (float[n, 16] b) { b = Identity(x) }>(c)
    }"""
    carrier = graph(text, {"w": noise(16, 16)})
    quantized, weight = attached(carrier, Scheme(8))
    assert ops(quantized) == ["DequantizeLinear", "If"]
    batch = {"x": noise(3, 16, seed=1), "c": np.array(True)}
    np.testing.assert_allclose(
        quantized.runner().run(batch)["y"], batch["x"] @ weight, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(8, granularity="tensor")], ids=str)
def test_a_table_is_looked_up_in_its_codes(scheme: Scheme) -> None:
    carrier, batch = opened("embedding")
    quantized, weight = attached(carrier, scheme)
    assert ops(quantized)[0] == "Gather"
    assert "DequantizeLinear" not in ops(quantized)[:1]
    np.testing.assert_array_equal(quantized.runner().run(batch)["y"], weight[batch["x"]])


def test_half_precision_weights_stay_half_precision_for_their_readers() -> None:
    text = "g (float16[n, 32] x) => (float16[n, 24] y) { y = MatMul(x, fc.weight) }"
    carrier = graph(text, {"fc.weight": noise(32, 24).astype(np.float16)})
    quantized, weight = attached(carrier, Scheme(8))
    batch = {"x": noise(5, 32, seed=1).astype(np.float16)}
    wanted = batch["x"].astype(np.float32) @ weight
    np.testing.assert_allclose(quantized.runner().run(batch)["y"], wanted, rtol=1e-2, atol=2e-2)


@pytest.mark.slow
def test_every_layer_of_real_networks_can_be_attached() -> None:
    for carrier, batch in ((digits(), images()), (transformer(), tokens())):
        model = carrier.graph().clone()
        for layer in carrier.layers():
            matrix = layer.canonical(carrier.weight(layer))
            result = quantize(matrix, *absmax_parameters(matrix, Scheme(8)), Scheme(8))
            attach_codes(Editor(model), layer, Scheme(8), lambda result=result: result)  # type: ignore[misc]
        quantized = OnnxCarrier(model)
        assert {layer.dtype for layer in quantized.layers()} == {"int8"}
        wanted, got = carrier.runner().run(batch), quantized.runner().run(batch)
        error = np.square(wanted["output"] - got["output"]).sum()
        assert 10 * np.log10(np.square(wanted["output"]).sum() / error) > 25


def conv_layer(**fields: object) -> Layer:
    given: dict[str, object] = {"name": "up", "kind": "ConvTranspose", "weight": "up.weight"}
    return Layer(**{**given, "shape": (8, 3, 4, 4), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "scheme", "opset", "reason"),
    [
        (conv_layer(groups=2), Scheme(8), 21, "two axes"),
        (conv_layer(), Scheme(8, granularity="group", group=4), 21, "blocks"),
        (conv_layer(dtype="int8"), Scheme(8), 21, "int8 already"),
        (
            conv_layer(kind="Gemm", shape=(4, 100)),
            Scheme(4, granularity="group", group=64),
            21,
            "100",
        ),
        (conv_layer(kind="Gemm", shape=(4, 64)), Scheme(4), 20, "opset 20"),
        (conv_layer(kind="Gemm", shape=(4, 64)), Scheme(12), 21, "12"),
    ],
)
def test_what_cannot_be_stored_is_said(
    layer: Layer, scheme: Scheme, opset: int, reason: str
) -> None:
    assert reason in (obstacle(layer, scheme, opset) or "")


def test_grouped_transposed_convolutions_are_stored_per_tensor() -> None:
    assert obstacle(conv_layer(groups=2), Scheme(8, granularity="tensor"), 21) is None
    assert obstacle(conv_layer(), Scheme(8), 21) is None


def test_attaching_what_cannot_be_stored_is_refused() -> None:
    carrier, _ = opened("gemm")
    (layer,) = carrier.layers()
    scheme = Scheme(4, granularity="group", group=7)
    editor = Editor(carrier.graph().clone())
    with pytest.raises(ValueError, match="layer 'fc': 32 columns do not divide into groups of 7"):
        attach_codes(editor, layer, scheme, lambda: rounded(carrier, layer, scheme))


@pytest.mark.parametrize(
    "scheme",
    [Scheme(8, granularity="group", group=8), Scheme(8, granularity="group", group=4, **UNSIGNED)],  # type: ignore[arg-type]
    ids=str,
)
def test_a_table_in_groups_is_looked_up_in_its_codes(scheme: Scheme) -> None:
    carrier, batch = opened("embedding")
    quantized, weight = attached(carrier, scheme)
    assert "DequantizeLinear" not in ops(quantized)[:2]
    assert quantized.layers() == ()  # the scales, which are looked up too, are no layer
    np.testing.assert_array_equal(quantized.runner().run(batch)["y"], weight[batch["x"]])


@pytest.mark.parametrize(
    ("scheme", "opset", "reason"),
    [
        (Scheme(8, element="e2m1"), 21, "e2m1 has 4 bits, not 8"),
        (Scheme(8, symmetric=False, element="e4m3"), 21, "e4m3 has no zero points"),
        (Scheme(8, element="e4m3"), 18, "opset 18 has no 8-bit floats; opset 19 has"),
        (Scheme(8, element="e4m3", scale_type="e8m0"), 21, "scales in e8m0"),
        (Scheme(8, element="e4m3"), 19, ""),
    ],
)
def test_floats_that_cannot_be_stored_are_said(scheme: Scheme, opset: int, reason: str) -> None:
    problem = obstacle(conv_layer(kind="Gemm", shape=(4, 64)), scheme, opset)
    assert reason in (problem or "") if reason else problem is None
