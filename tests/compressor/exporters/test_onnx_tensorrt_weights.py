"""Weights that alone are quantized, as TensorRT wants them stored."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter
from compressor.graph.values import value_by_name
from compressor.models.executor import GraphModule
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from tests.compressor.exporters.hand_made import CONTEXT
from tests.compressor.graph.random_codes import FORMS, SCHEMES, group, random_codes, text
from tests.compressor.passes.quantize.small_models import graph, noise


def product(form: str, scheme: Scheme) -> OnnxCarrier:
    """Return one product with random codes."""
    carrier = graph(text(form), {"fc.weight": noise(*FORMS[form][1])})
    (layer,) = carrier.layers()
    codes = random_codes(layer, scheme)
    return carrier.with_codes({"fc.weight": WeightCodes(layer, scheme, lambda _: codes)})


ASYMMETRIC = [s for s in SCHEMES if not s.symmetric]


@pytest.mark.parametrize("scheme", ASYMMETRIC, ids=str)
def test_tensorrt_takes_no_zero_points_and_says_so_when_planning(scheme: Scheme) -> None:
    def never(_: torch.Tensor) -> QuantizedTensor:
        raise AssertionError("evaluated")

    carrier = graph(text("linear"), {"fc.weight": noise(48, 64)})
    (layer,) = carrier.layers()
    planned = carrier.with_codes({"fc.weight": WeightCodes(layer, scheme, never)})
    with pytest.raises(SpecError, match=r"layer 'fc': .*symmetric: true in quantize-weights"):
        OnnxExporter(target="tensorrt").check(planned)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.symmetric], ids=str)
def test_tensorrt_gets_elements_of_the_right_type(
    form: str, scheme: Scheme, tmp_path: Path
) -> None:
    carrier = product(form, scheme)
    made = OnnxExporter(target="tensorrt", opset=23)
    made.check(carrier)
    path = made.write(carrier, tmp_path, CONTEXT)[0]
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert not {"MatMulNBits", "Gather", "Cast"} & set(operators)
    assert abs(made.predict(carrier) - path.stat().st_size) <= 32
    tensors = {t.name: t for t in onnx.load(path).graph.initializer}
    want = {
        ("e4m3", 8): TensorProto.FLOAT8E4M3FN,
        ("e2m1", 4): TensorProto.FLOAT4E2M1,
        ("int", 8): TensorProto.INT8,
    }.get((scheme.element, scheme.bits), TensorProto.INT4)
    assert tensors["fc.weight"].data_type == want
    two_levels = scheme.element == "e2m1" and scheme.scale_type == "e4m3"
    assert operators.count("DequantizeLinear") == 1 + two_levels
    assert ("fc.weight_tensor_scale" in tensors) == two_levels
    weight = next(n for n in onnx.load(path).graph.node if n.input[0] == "fc.weight").output[0]
    model = ir.load(path)
    model.graph.outputs.append(value_by_name(model)[weight])
    assert_weight(model, weight, product(form, scheme))


def assert_weight(model: ir.Model, name: str, carrier: OnnxCarrier) -> None:
    """Check that both graphs dequantize to the same; torch runs what ONNX Runtime lacks."""
    reference = carrier.graph().clone()
    reference.graph.outputs.append(value_by_name(reference)["fc.weight_dequantized"])
    x = torch.from_numpy(noise(5, 64, seed=3))
    found, wanted = GraphModule(model)(x)[name], GraphModule(reference)(x)
    assert torch.equal(found, wanted["fc.weight_dequantized"])


def test_four_bit_floats_need_the_opset_that_has_them() -> None:
    carrier = product("linear", group(4, 16, element="e2m1", scale_type="e4m3"))
    with pytest.raises(SpecError, match=r"layer 'fc': .*float4e2m1; set opset: 23"):
        OnnxExporter(opset=21, target="tensorrt").check(carrier)
    OnnxExporter(target="tensorrt").check(carrier)  # takes that opset by itself
