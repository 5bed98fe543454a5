"""Files of older opsets compute what ONNX Runtime does with them as they are."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from compressor.errors import ModelError
from compressor.models.onnx.carrier import OnnxCarrier, upgraded
from compressor.models.onnx.ort_runner import graph_runner

X = np.random.default_rng(0).standard_normal((2, 4, 6, 5)).astype(np.float32)


def older(opset: int, body: str, scales: str = "") -> ir.Model:
    given = f"<float[4] s = {{{scales}}}>" if scales else ""
    text = (
        f'<ir_version: 4, opset_import: ["": {opset}]> g (float[N,4,6,5] x) => (float[A,B,C,D] y)'
    )
    return ir.from_proto(onnx.parser.parse_model(f"{text} {given} {{ {body} }}"))


@pytest.mark.parametrize(
    ("opset", "body", "scales"),
    [
        (7, 'y = Upsample<mode="linear", scales=[1.0, 1.0, 1.4, 2.7]>(x)', ""),
        (9, 'y = Upsample<mode="nearest">(x, s)', "1, 1, 1.4, 2.7"),
        (9, 'y = Upsample<mode="linear">(x, s)', "1, 1, 2, 2"),
        (10, 'y = Resize<mode="nearest">(x, s)', "1, 1, 1.4, 2.7"),
        (10, 'y = Resize<mode="nearest">(x, s)', "1, 1, 0.4, 0.7"),
        (10, 'y = Resize<mode="linear">(x, s)', "1, 1, 0.4, 0.7"),
        (10, 'y = Resize<mode="linear">(x, s)', "1, 1, 1.4, 2.7"),
        (9, "y = Softmax(x)", ""),
        (12, "y = LogSoftmax<axis=2>(x)", ""),
        (12, "y = Hardmax<axis=3>(x)", ""),
        (9, "y = Clip<min=-0.5, max=0.25>(x)", ""),
        (10, "y = ReduceMean<axes=[1, 2], keepdims=1>(x)", ""),
    ],
)
def test_a_newer_opset_computes_the_same(opset: int, body: str, scales: str):
    (want,) = graph_runner(older(opset, body, scales)).run({"x": X}).values()
    model = upgraded(older(opset, body, scales), 21, "m.onnx")
    (have,) = graph_runner(model).run({"x": X}).values()
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_what_no_newer_opset_has_is_refused():
    with pytest.raises(ModelError, match=r"opset 9 to 21 .*Hardmax over several axes"):
        upgraded(older(9, "y = Hardmax<axis=2>(x)"), 21, "m.onnx")


def test_nothing_is_left_of_a_region_that_nothing_reads():
    model = upgraded(older(9, 'y = Upsample<mode="nearest">(x, s)', "1, 1, 2, 2"), 21, "m.onnx")
    assert list(OnnxCarrier(model).graph().graph.initializers) == ["s"]
