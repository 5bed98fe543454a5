"""What the runtimes refuse is refused at plan time, with the layer's name and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser, shape_inference

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import OnnxExporter
from compressor.exporters.openvino.exporter import OpenvinoExporter
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from tests.compressor.exporters.hand_made import CONTEXT, FEATURES, Builder, codes, entry, quantized

INT8, UINT8 = ir.DataType.INT8, ir.DataType.UINT8
SYMMETRIC = "set activations.symmetric: true in quantize-static"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activations": UINT8, "activation_zero": 128}, f"activations are uint8.*{SYMMETRIC}"),
    ({"activation_zero": 3}, rf"zero point is 3, TensorRT takes 0 only \(and 3 .*{SYMMETRIC}"),
    ({"weights": UINT8, "activations": None}, "weights are uint8.*set weights.symmetric: true"),
    ({"weight_zero": -2}, "zero point is -2.*set weights.symmetric: true"),
    ({"integer_bias": True}, "bias is int32 with a scale"),
    (
        {"weights": ir.DataType.UINT4, "activations": None, "blocks": True},
        "weights are uint4.*symmetric",
    ),
    ({"activations": ir.DataType.INT16}, "activations are int16"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_tensorrt_refuses(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    carrier = quantized(**options)
    with pytest.raises(SpecError, match=f"'first(.bias)?': .*{message}"):
        OnnxExporter(target="tensorrt").check(carrier)
    OnnxExporter().check(carrier)
    with pytest.raises(ArtifactError, match=message):
        OnnxExporter(target="tensorrt").write(carrier, tmp_path, CONTEXT)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_zero": 0},
        {"weights": ir.DataType.INT4, "activations": None, "blocks": True},
        {"weights": ir.DataType.FLOAT8E4M3FN, "activations": ir.DataType.FLOAT8E4M3FN},
    ],
)
def test_tensorrt_takes(options: dict[str, Any], tmp_path: Path) -> None:
    made = OnnxExporter(target="tensorrt")
    made.check(quantized(**options))
    made.write(quantized(**options), tmp_path, CONTEXT)
    assert made.targets == {"tensorrt"}


def test_zero_points_that_are_not_known_yet_are_checked_when_written(tmp_path: Path) -> None:
    carrier = quantized()
    value = carrier.graph().graph.initializers["first.input_zero_point"]
    value.const_value = ir.LazyTensor(lambda: ir.tensor(np.int8(4)), dtype=INT8, shape=ir.Shape(()))
    made = OnnxExporter(target="tensorrt")
    made.check(carrier)
    with pytest.raises(ArtifactError, match="zero point is 4"):
        made.write(carrier, tmp_path, CONTEXT)


def dense(operator: str, weight: ir.DataType, x: ir.Value) -> OnnxCarrier:
    made = Builder()
    value = made.constant("fc.weight", codes((FEATURES, 8), weight, 0))
    codes_in = made.node("DynamicQuantizeLinear", [x], "codes")
    product = made.node(operator, [codes_in, value], "product")
    result = made.node("Cast", [product], "y", to=int(ir.DataType.FLOAT))
    made.nodes[0].resize_outputs(3)
    for index, name in ((1, "scale"), (2, "zero")):
        made.nodes[0].outputs[index].name = name
    return OnnxCarrier(made.model([x], result, 8))


@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt"])
def test_integer_operators(target: Literal["ort-cpu", "tensorrt"]) -> None:
    carrier = dense("MatMulInteger", INT8, entry())
    made = OnnxExporter(target=target)
    if target == "ort-cpu":
        made.check(carrier)
        return
    with pytest.raises(SpecError, match="does not take MatMulInteger; start from the float"):
        made.check(carrier)


@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt"])
def test_a_weight_that_is_quantized_at_run_time(target: Literal["ort-cpu", "tensorrt"]) -> None:
    x, made = entry(), Builder()
    weight = made.constant("fc.weight", np.ones((FEATURES, 8), np.float32))
    scale = made.constant("s", np.float32(0.1))
    zero = made.constant("z", np.int8(0))
    value = made.node("QuantizeLinear", [weight, scale, zero], "codes")
    value = made.node("DequantizeLinear", [value, scale, zero], "again")
    carrier = OnnxCarrier(made.model([x], made.node("MatMul", [x, value], "y"), 8))
    with pytest.raises(SpecError, match=r"layer 'fc': its weight 'fc.weight' is stored as float"):
        OnnxExporter(target=target).check(carrier)


def test_types_without_kernels_on_the_cpu() -> None:
    carrier = quantized(ir.DataType.FLOAT4E2M1, None, blocks=True)
    carrier.graph().graph.opset_imports[""] = 23
    with pytest.raises(SpecError, match="layer 'first': its weights are float4e2m1, ONNX Runtime"):
        OnnxExporter(opset=23).check(carrier)
    OnnxExporter(opset=23, target="tensorrt").check(carrier)


def test_bfloat16_does_not_run_on_the_cpu() -> None:
    import ml_dtypes

    made = Builder()
    x = ir.val("x", ir.DataType.BFLOAT16, ["batch", FEATURES])
    weight = made.constant("fc.weight", np.ones((FEATURES, 8), ml_dtypes.bfloat16))
    value = made.node("MatMul", [x, weight], "product")
    model = made.model([x], made.node("Cast", [value], "y", to=int(ir.DataType.FLOAT)), 8)
    with pytest.raises(SpecError, match=r"layer 'fc': 'fc.weight' is bfloat16.*computes in double"):
        OnnxExporter().check(OnnxCarrier(model))
    OnnxExporter(target="tensorrt").check(OnnxCarrier(model))


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="ort-cpu"):
        OnnxExporter.model_validate({"target": "abacus"})


@pytest.mark.parametrize("batch", ["n", 1])
def test_a_transform_for_openvino_needs_a_fixed_batch(
    batch: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan passed it, and the run ended with two remedies that did not work."""
    graph = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 21]>
        g (float[{batch}, 64, 1] wave) => (float[{batch}, frames, bins, 2] y)
        <int64 step = {{8}}, int64 length = {{16}}>
        {{ y = STFT (wave, step, , length) }}
    """)
    onnx.save(shape_inference.infer_shapes(graph), tmp_path / "m.onnx")
    carrier = open_onnx(tmp_path / "m.onnx", 21)
    monkeypatch.setattr(OpenvinoExporter, "need_package", lambda *_: None)
    OnnxExporter().check(carrier)
    for exporter in (OnnxExporter(target="openvino"), OpenvinoExporter()):
        if batch == 1:
            exporter.check(carrier)
            continue
        with pytest.raises(SpecError, match=r"STFT.*input 'wave' are open; .*every axis of 'wave'"):
            exporter.check(carrier)
