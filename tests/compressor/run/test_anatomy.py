"""The layers of a report's graph, and the bytes of a file."""

from __future__ import annotations

import pytest

from tests.compressor.tiny_project import Project


@pytest.fixture
def quantized(on_onnx: Project) -> Project:
    on_onnx.spec["passes"] = [{"pass": "quantize-static", "layers": [{"match": "*"}]}]
    on_onnx.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    on_onnx.run()
    return on_onnx


def test_layers_come_in_order_with_what_they_read(quantized: Project):
    layers = quantized.report()["graph"]["layers"]
    assert [(x["name"], x["reads"]) for x in layers] == [("conv1", []), ("conv2", [0]), ("fc", [1])]
    assert [x["macs"] for x in layers] == [8 * 64 * 9, 8 * 64 * 8 * 9, 4 * 8]
    assert sum(x["time_share"] for x in layers) == pytest.approx(100)
    assert max(layers, key=lambda x: x["time_share"])["name"] == "conv2"


def test_the_parts_of_a_file_add_up_to_it(quantized: Project):
    onnx, safetensors = quantized.report()["artifacts"]
    assert safetensors["contents"] is None
    parts = onnx["contents"]
    assert sum(parts.values()) == onnx["bytes"]
    weights = 8 * 9 + 8 * 8 * 9 + 4 * 8
    biases = 4 * (8 + 8 + 4)
    assert weights + biases <= parts["weights"] <= weights + biases + 64  # shapes
    assert parts["scales"] > 0
