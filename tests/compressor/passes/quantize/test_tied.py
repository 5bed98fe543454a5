"""A weight that two layers share, one of them transposed."""

from __future__ import annotations

import pytest

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.tensors import TensorSpec
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import data, outputs, quantized, sqnr

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
