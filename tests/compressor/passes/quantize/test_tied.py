"""A weight that two layers share, one of them transposed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from compressor.calibration.collect import make_observer
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.tensors import TensorSpec
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import ORT, data, outputs, quantized, sqnr

ROWS = TensorSpec("image", ("batch", 64), "float32")
AUTOENCODER = """(float[batch, 64] image) => (float[batch, 64] output) {
    code = Gemm <transB = 1> (image, weight, bias)
    rectified = Relu(code)
    output = MatMul(rectified, weight)
}"""


@pytest.mark.parametrize(("bits", "least"), [(8, 38), (4, 13.8)])
@pytest.mark.parametrize("rounding", ["gptq", "nearest"])
def test_a_weight_that_is_also_read_transposed(bits: int, rounding: str, least: float) -> None:
    model = OnnxCarrier(graph(AUTOENCODER, {"weight": (24, 64), "bias": (24,)}))
    options = {"layers": [{"match": "*"}], "weights": {"bits": bits, "rounding": rounding}}
    declared = QuantizeStatic.model_validate(options, strict=False)
    after = quantized(declared, model, spec=ROWS).carrier
    assert {layer.dtype for layer in after.layers()} == {f"int{bits}"}
    batch = data(ROWS, seed=7)[0]
    assert sqnr(outputs(model, batch), outputs(after, batch)) > least


CALLED_TWICE = """(float[batch, 64] image) => (float[batch, 24] first, float[batch, 24] second) {
    mixed = Gemm(image, mixing)
    first = Gemm<transB = 1>(mixed, weight)
    few = Mul(mixed, factors)
    second = Gemm<transB = 1>(few, weight)
}"""


def test_a_weight_is_rounded_by_what_all_of_its_readers_multiply() -> None:
    """The second call sees every eighth column only, and says nothing of the others."""
    form = {"weight": (24, 64), "mixing": (64, 64), "factors": (64,)}
    model, rng = OnnxCarrier(graph(CALLED_TWICE, form)), np.random.default_rng(0)
    mixing = rng.normal(size=(64, 6)) @ rng.normal(size=(6, 64))
    mixing += 0.02 * rng.normal(size=(64, 64))
    stored = model.graph().graph.initializers
    stored["mixing"].const_value = ir.tensor(mixing.astype(np.float32), name="mixing")
    factors = (np.arange(64) % 8 == 0).astype(np.float32)
    stored["factors"].const_value = ir.tensor(factors, name="factors")
    batch, found = data(ROWS, seed=7)[0], {}
    for rounding in ("gptq", "nearest"):
        options = {
            "prepare": "none",
            "weights": {"bits": 4, "rounding": rounding},
            "layers": [{"match": "mixing", "skip": True}, {"match": "*"}],
        }
        declared = QuantizeStatic.model_validate(options, strict=False)
        after = quantized(declared, model, spec=ROWS).carrier
        found[rounding] = sqnr(outputs(model, batch), outputs(after, batch))
    assert found["gptq"] > found["nearest"] + 8


def test_a_shared_weight_is_planned() -> None:
    """Nothing is measured for a plan: joining moments that were not was an internal error."""
    form = {"weight": (24, 64), "mixing": (64, 64), "factors": (64,)}
    model = OnnxCarrier(graph(CALLED_TWICE, form))
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    requests = declared.survey(model, ORT).requests
    empty = {r.key: make_observer(r.observer, r.options).placeholder() for r in requests}
    assert {layer.dtype for layer in declared.preview(model, ORT, empty).layers()} == {"int8"}
