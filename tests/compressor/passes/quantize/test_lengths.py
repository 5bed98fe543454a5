"""What reads only the lengths of a quantized value has nothing dequantized for it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_runner import graph_runner
from compressor.passes.quantize.static.static import QuantizeStatic
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import ORT, sqnr, statistics

POOLED = """(float[N, 16, H, W] x) => (float[N, 16, h, w] y) {
    a = Conv<kernel_shape = [1, 1]>(x, first) b = Relu(a) s = Shape(b)
    c = MaxPool<kernel_shape = [1, 1]>(b) t = Shape(c)
    d = Conv<kernel_shape = [1, 1]>(c, second) e = Reshape(d, s) y = Reshape(e, t)
}"""


def test_lengths_are_read_from_codes() -> None:
    """Of a quantized value, and of one that only moves its codes."""
    model = graph(POOLED, {"first": (16, 16, 1, 1), "second": (16, 16, 1, 1)})
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    batch = {"x": np.random.default_rng(3).standard_normal((2, 16, 9, 7), np.float32)}
    carrier = OnnxCarrier(model)
    counted = statistics(declared, carrier, ORT, [batch])
    written = declared.apply(carrier, ORT, counted).carrier.graph()
    shapes = [node for node in written.graph if node.op_type == "Shape"]
    assert [node.inputs[0].dtype for node in shapes if node.inputs[0]] == [ir.DataType.UINT8] * 2
    (one,), (other,) = (graph_runner(m).run(batch).values() for m in (model, written))
    assert sqnr(one, other) > 35
