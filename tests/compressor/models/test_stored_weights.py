"""A runtime gets floats in place of weights that are only stored as codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor.exporters.onnx.exporter import OnnxExporter
from compressor.models.onnx import stored_weights
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.onnx.stored_weights import read_as_floats
from compressor.types.tensors import Array
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.passes.quantize.small_models import graph, noise

SHAPE = (8, 8, 3, 3)
STORED = """stored (float[n, 8, 12, 12] x) => (float[n, 8, 12, 12] y) {
    w = DequantizeLinear<axis = 0>(codes, scale, zero)
    a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w)
    b = Relu(a)
    q = QuantizeLinear(b, step, place)
    d = DequantizeLinear(q, step, place)
    v = DequantizeLinear<axis = 0>(others, scale, zero)
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(d, v)
    r = QuantizeLinear(c, wide, place)
    y = DequantizeLinear(r, wide, place)
}"""
PRODUCT = """product (float[n, 64] x) => (float[n, 8] y) {
    w = DequantizeLinear<axis = 0>(codes, scale)
    y = MatMul(x, w)
}"""


def weights() -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        "codes": random.integers(-127, 128, SHAPE).astype(np.int8),
        "others": random.integers(-64, 65, SHAPE).astype(np.int8),
        "scale": random.uniform(0.001, 0.003, 8).astype(np.float32),
        "zero": np.zeros(8, np.int8),
        "step": np.array(0.02, np.float32),
        "wide": np.array(0.1, np.float32),
        "place": np.array(0, np.uint8),
    }


def decoded(model: ir.Model) -> list[str | None]:
    """Return the codes that are decoded."""
    nodes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    return [node.inputs[0].name for node in nodes if node.inputs[0] is not None]


def test_a_graph_gives_the_outputs_of_its_file_to_the_last_bit(tmp_path: Path):
    stored = graph(STORED, weights())
    file = OnnxExporter().open(OnnxExporter().write(stored, tmp_path, CONTEXT)[0])
    batch = {"x": noise(4, 8, 12, 12)}
    (ours,), (theirs,) = (r.run(batch).values() for r in (graph_runner(stored.graph()), file))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("zero", [np.zeros(8, np.int8), np.arange(8, dtype=np.int8)])
def test_only_what_multiplies_floats_is_read_as_floats(zero: Array):
    given = {**weights(), "zero": zero}
    model = graph(STORED, given).graph()
    read_as_floats(model)
    assert decoded(model) == ["q", "others", "r"]
    assert "codes" not in model.graph.initializers
    floats = model.graph.initializers["w"].const_value
    assert floats is not None
    shift, scale = (given[x].astype(np.float32).reshape(8, 1, 1, 1) for x in ("zero", "scale"))
    np.testing.assert_array_equal(floats.numpy(), (given["codes"] - shift) * scale)


def test_what_would_take_much_memory_stays(monkeypatch: pytest.MonkeyPatch):
    model = graph(STORED, weights()).graph()
    monkeypatch.setattr(stored_weights, "_MOST", 4 * int(np.prod(SHAPE)) - 1)
    read_as_floats(model)
    assert decoded(model) == ["codes", "q", "others", "r"]


def test_codes_in_groups_stay_and_one_scale_serves_all():
    codes = np.ones((64, 8), np.int8)
    grouped = PRODUCT.replace("axis = 0", "axis = 0, block_size = 32")
    model = graph(grouped, {"codes": codes, "scale": np.ones((2, 8), np.float32)}).graph()
    read_as_floats(model)
    assert decoded(model) == ["codes"]
    model = graph(PRODUCT, {"codes": codes, "scale": np.array(0.5, np.float32)}).graph()
    read_as_floats(model)
    assert not decoded(model)
