"""Averages over windows beyond the image, of which integer kernels count what is not there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.pools import count_no_padding
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array
from tests.compressor.passes.quantize.static_models import carrier, data, outputs, quantized, sqnr

INT8 = QuantizeStatic(layers=(StaticRule(match="*"),))
# The whole image, as in the EfficientNet of transformers; odd sides; and odd sides with a padding.
POOLS = {
    "global": partial(nn.AvgPool2d, 1280, ceil_mode=True),
    "partial": partial(nn.AvgPool2d, 5, 5, ceil_mode=True),
    "padded": partial(nn.AvgPool2d, 5, 4, padding=2, ceil_mode=True),
    "usual": partial(nn.AvgPool2d, 4, 4),
}


class Pooled(nn.Module):
    """A pool between two convolutions."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.first, self.pool, self.last = nn.Conv2d(3, 8, 3, padding=1), pool, nn.Conv2d(8, 6, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.last(self.pool(torch.relu(self.first(image))))


def in_runtime(model: Carrier, folder: Path) -> tuple[Array, set[str]]:
    """Return the outputs of the file in ONNX Runtime, and the operators that it made of it."""
    source, optimized = folder / "source.onnx", folder / "optimized.onnx"
    ir.save(in_form_for("ort-cpu", model.graph(), "float32"), source)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(optimized)
    session = ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    found = {node.op_type for node in onnx.load(optimized).graph.node}
    return session.run(None, dict(data(seed=7)[0]))[0], found


@pytest.mark.parametrize("kind", POOLS)
def test_an_average_of_codes_is_that_of_what_they_stand_for(kind: str, tmp_path: Path) -> None:
    model = carrier(Pooled(POOLS[kind]()))
    found, operators = in_runtime(quantized(INT8, model).carrier, tmp_path)
    # Where the runtime counted what is not there, the first three had 1 to 13 dB.
    assert sqnr(outputs(model, data(seed=7)[0]), found) > 28
    assert "QLinearConv" in operators
    # Only with a padding is the kernel wrong: then the average is one of floats.
    assert ("QLinearAveragePool" in operators) == (kind != "padded"), operators


@pytest.mark.parametrize(
    ("written", "counts"),
    [
        ("ceil_mode = 1, count_include_pad = 1", False),
        ("ceil_mode = 1, count_include_pad = 1, pads = [0, 0, 0, 0]", False),
        ("ceil_mode = 1, count_include_pad = 1, pads = [1, 1, 1, 1]", True),
        ('ceil_mode = 1, count_include_pad = 1, auto_pad = "SAME_UPPER"', True),
        ("count_include_pad = 1", True),  # there, all kernels agree
    ],
)
def test_padding_that_is_not_there_is_not_counted(written: str, *, counts: bool) -> None:
    text = f"""<ir_version: 9, opset_import: ["": 18]>
    g (float[1, 2, 7, 7] x) => (float[1, 2, a, b] y) {{
        y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], {written}> (x)
    }}"""
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    count_no_padding(model)
    assert ("count_include_pad" in model.graph.node(0).attributes) == counts
    feed = {"x": np.random.default_rng(0).standard_normal((1, 2, 7, 7), np.float32)}
    before, after = (
        ort.InferenceSession(p.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, feed
        )[0]
        for p in (proto, ir.to_proto(model))
    )
    np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-6)
