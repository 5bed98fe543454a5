"""Every scheme, in every form of matrix product: the graph holds exactly what the codes mean."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from compressor.graph.codes import obstacle
from compressor.graph.costs import initializer_bytes, parameters
from compressor.graph.stored_weights import side_tensors
from compressor.graph.values import value_by_name
from compressor.models.executor import GraphModule
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import Array
from tests.compressor.graph.random_codes import FORMS, SCHEMES, random_codes, text
from tests.compressor.passes.quantize.small_models import graph, noise


def weight_of_graph(carrier: OnnxCarrier, taps: str) -> Array:
    """Return the value that a graph multiplies with, as ONNX Runtime computes it."""
    return carrier.runner([taps]).run({"x": np.eye(64, dtype=np.float32)})[taps]


def coded(form: str, scheme: Scheme) -> tuple[OnnxCarrier, QuantizedTensor, Layer]:
    carrier = graph(text(form), {"fc.weight": noise(*FORMS[form][1])})
    (layer,) = carrier.layers()
    assert (layer.rows, layer.columns) == (48, 64)
    codes = random_codes(layer, scheme)
    change = WeightCodes(layer, scheme, lambda _: codes)
    return carrier.with_codes({"fc.weight": change}), codes, layer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_graph_holds_exactly_the_dequantized_weight(
    form: str, scheme: Scheme, tmp_path: Path
) -> None:
    quantized, codes, layer = coded(form, scheme)
    wanted = layer.stored(codes.dequantize()).numpy()
    tap = "fc.weight_dequantized"
    np.testing.assert_array_equal(weight_of_graph(quantized, tap), wanted)

    quantized.save(tmp_path)
    restored = quantized.restore(tmp_path)
    np.testing.assert_array_equal(weight_of_graph(restored, tap), wanted)

    model = quantized.graph().clone()
    model.graph.outputs.append(value_by_name(model)[tap])
    x = torch.eye(64)
    np.testing.assert_array_equal(GraphModule(model)(x)[tap].numpy(), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_layer_is_still_one_and_costs_what_its_scheme_says(form: str, scheme: Scheme) -> None:
    quantized, codes, layer = coded(form, scheme)
    (found,) = quantized.layers()
    assert found == replace(layer, dtype=found.dtype)
    assert found.dtype != layer.dtype
    model = quantized.graph()
    assert parameters(model) == 48 * 64
    tables = sum(
        v.const_value.nbytes
        for name, v in model.graph.initializers.items()
        if not name.startswith("fc.") and v.const_value is not None
    )
    stored = replace(scheme, bits=4) if scheme.bits < 4 else scheme
    assert initializer_bytes(model) - tables == stored.nbytes(48, 64)
    assert obstacle(found, scheme, 21) == f"its weight is {found.dtype} already"
    assert torch.equal(
        found.canonical(quantized.weight(found)).view(codes.codes.dtype), codes.codes
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.scale_type == "float32"], ids=str)
def test_scales_of_a_half_precision_weight_have_its_type(dtype: str, scheme: Scheme) -> None:
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    carrier = graph(text("linear", dtype), {"fc.weight": noise(48, 64).astype(kind)})
    (layer,) = carrier.layers()
    scheme = replace(scheme, scale_type=dtype)
    codes = random_codes(layer, scheme)
    change = WeightCodes(layer, scheme, lambda _: codes)
    model = carrier.with_codes({"fc.weight": change}).graph().clone()
    made = next(node for node in model.graph if node.op_type == "Transpose").inputs[0]
    assert made is not None
    model.graph.outputs.append(made)
    module = GraphModule(model)
    half = getattr(torch, dtype)
    got = module(torch.eye(64, dtype=half))[made.name]
    assert got.dtype == half
    assert torch.equal(got, codes.dequantize().to(half))
    if scheme.element != "e2m1":
        assert initializer_bytes(model) == replace(scheme, bits=max(4, scheme.bits)).nbytes(48, 64)


def test_weights_of_one_kind_share_their_tables() -> None:
    body = "{ a = MatMul(x, one) y = MatMul(a, two) }"
    weights = {"one": noise(64, 64), "two": noise(64, 64, seed=1)}
    carrier = graph(f"g (float[n, 64] x) => (float[n, 64] y) {body}", weights)
    scheme = Scheme(4, granularity="group", group=32, element="e2m1", scale_type="e8m0")
    changes = {
        layer.weight: WeightCodes(layer, scheme, lambda _, layer=layer: random_codes(layer, scheme))  # type: ignore[misc]
        for layer in carrier.layers()
    }
    model = carrier.with_codes(changes).graph()
    names = set(model.graph.initializers)
    assert names - {"one", "two", "one_scale", "two_scale"} == {"e2m1_doubled", "e8m0_halved"}
    assert side_tensors(model.graph.initializers["one"]) == ["one_scale"]


def test_a_value_that_has_a_table_s_name_already_is_another() -> None:
    weights = {"fc.weight": noise(48, 64), "e2m1_doubled": noise(48)}
    body = "a = MatMul(x, t) y = Add(a, e2m1_doubled)"
    whole = f"""g (float[n, 64] x) => (float[n, 48] y) {{
        t = Transpose<perm = [1, 0]>(fc.weight) {body}
    }}"""
    carrier = graph(whole, weights)
    (layer,) = carrier.layers()
    codes = random_codes(layer, Scheme(4, granularity="group", group=16, element="e2m1"))
    change = WeightCodes(layer, codes.scheme, lambda _: codes)
    batch = {"x": noise(5, 64, seed=1)}
    got = carrier.with_codes({"fc.weight": change}).runner().run(batch)
    wanted = batch["x"] @ codes.dequantize().numpy().T + weights["e2m1_doubled"]
    np.testing.assert_allclose(got["y"], wanted, rtol=1e-4, atol=1e-4)
