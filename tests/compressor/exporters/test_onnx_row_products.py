"""Products of rows of floats with a bias are one operator of ONNX Runtime, without detours."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from compressor.exporters.onnx.forms import in_form_for
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.tensors import Array
from tests.compressor.exporters.test_onnx_code_forms import ORT, executed, same
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import statistics

BLOCK = """(float[{batch}, {length}, 12] x) => (float[{batch}, {length}, 12] y) {{
    m = MatMul(x, up) a = Add(up_bias, m) g = Gelu(a) n = MatMul(g, down) c = Add(n, down_bias)
    s = Add(c, x) k = LayerNormalization<axis = 2>(s, scale, shift)
    q = MatMul(k, last) w = Add(q, last_bias) y = {end}
}}"""
SIZES = {
    "up": (12, 20), "up_bias": (20,), "down": (20, 12), "down_bias": (12,), "scale": (12,),
    "shift": (12,), "last": (12, 12), "last_bias": (12,),
}  # fmt: skip


def block(batch: str = "N", length: str = "9", end: str = "Softmax(w)") -> ir.Model:
    return graph(BLOCK.format(batch=batch, length=length, end=end), SIZES, opset=21)


def sample() -> Array:
    return np.random.default_rng(3).standard_normal((2, 9, 12), np.float32)


def written(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in in_form_for("ort-cpu", model, "float32").graph)


@pytest.mark.parametrize("batch", ["N", "2"])
def test_rows_stay_a_matrix_between_products(batch, tmp_path):
    model = block(batch)
    formed = in_form_for("ort-cpu", model, "float32")
    assert executed(model, tmp_path)["BiasGelu"] == (batch == "N")
    assert executed(model, tmp_path)["SkipLayerNormalization"] == 1
    assert executed(formed, tmp_path) == {
        "Gemm": 3, "Reshape": 2, "Gelu": 1, "Sum": 1, "LayerNormalization": 1, "Softmax": 1,
    }  # fmt: skip
    assert same(model, formed)


def test_what_is_read_as_it_was_gets_a_view(tmp_path):
    text = BLOCK.format(batch="N", length="12", end="Add(w, t) ").replace(
        "y = Add(w, t)", "t = Transpose<perm = [0, 2, 1]>(w) y = Add(w, t)"
    )
    model = graph(text, SIZES, opset=21)
    formed = in_form_for("ort-cpu", model, "float32")
    assert executed(formed, tmp_path)["Reshape"] == 2
    assert same(model, formed)


@pytest.mark.parametrize("length", ["T", "9"])
def test_rows_of_two_dynamic_axes_stay(length):
    counted = written(block(length=length))
    assert counted["Gemm"] == (0 if length == "T" else 3)
    assert counted["MatMul"] == (3 if length == "T" else 0)


def test_weights_that_are_stored_as_codes_are_products_of_rows_too(tmp_path):
    declared = QuantizeStatic(prepare="none")
    carrier = OnnxCarrier(block())
    counted = statistics(declared, carrier, ORT, [{"x": sample()}])
    stored = declared.apply(carrier, ORT, counted).carrier.graph()
    formed = in_form_for("ort-cpu", stored, "float32")
    assert executed(formed, tmp_path)["Gemm"] == 3
    assert same(stored, formed)


def test_integer_products_and_other_targets_stay():
    model = block()
    assert in_form_for("openvino", model, "float32") is model
    declared = QuantizeStatic.model_validate({"layers": [{"match": "*"}]}, strict=False)
    carrier = OnnxCarrier(model)
    counted = statistics(declared, carrier, ORT, [{"x": sample()}])
    codes = declared.apply(carrier, ORT, counted).carrier.graph()
    assert not written(codes)["Gemm"]


HEADS = """(float[N, 9, 12] x) => (float[N, 3, 9, 4] y) {
    m = MatMul(x, w) a = Add(m, b) p, q, r = Split<axis = 2>(a, parts)
    f = Reshape(p, heads) g = Reshape(q, heads) o = Softmax(r) h = Reshape(o, heads)
    s = Sum(f, g, h) y = Transpose<perm = [0, 2, 1, 3]>(s)
}"""


def test_columns_are_split_as_a_matrix(tmp_path):
    """What takes heads apart then reads the matrix, with no view in between."""
    constants = {"parts": [12, 12, 12], "heads": [0, 0, 3, 4]}
    model = graph(HEADS, {"w": (12, 36), "b": (36,), **constants}, opset=21)
    formed = in_form_for("ort-cpu", model, "float32")
    assert executed(formed, tmp_path) == {
        "Reshape": 5, "Gemm": 1, "Split": 1, "Sum": 1, "Transpose": 1, "Softmax": 1,
    }  # fmt: skip
    assert same(model, formed)
