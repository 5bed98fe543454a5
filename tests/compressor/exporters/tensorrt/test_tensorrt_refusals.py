"""What cannot be built is refused at plan time, with a name and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.errors import ArtifactError, SpecError
from compressor.exporters import TensorrtExporter
from compressor.exporters.tensorrt import building as builders
from compressor.exporters.tensorrt import exporter as exporter_module
from compressor.exporters.tensorrt.building import Settings, build
from compressor.exporters.tensorrt.graph_form import form_of
from compressor.exporters.tensorrt.profiles import check_types
from compressor.models.onnx.carrier import OnnxCarrier
from tests.compressor.exporters.hand_made import CONTEXT, Builder, quantized
from tests.compressor.exporters.tensorrt.engines import exporter, needs_rtx

FP8, FP4, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4
KNOWN = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


def determinant() -> OnnxCarrier:
    """Return a graph with an operator that TensorRT's parser does not have."""
    made = Builder()
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 4, 4])
    value = made.node("Relu", [x], "first")
    model = made.model([x], made.node("Det", [value], "determinant"))
    model.graph.outputs[0].shape = ir.Shape(["batch"])
    return OnnxCarrier(model)


def test_an_element_type_that_a_target_lacks() -> None:
    graph = form_of(quantized(FP8, FP8)).model
    message = (
        r"layer 'first': is fp8, which GPUs of compute capability 8\.0, 8\.6 do not support; "
        r"build for 8\.9, 12\.0, 12\.1, or choose another type"
    )
    with pytest.raises(SpecError, match=message):
        check_types(graph, ["8.9", "8.0", "8.6"], KNOWN)
    check_types(graph, ["8.9", "12.0"], KNOWN)
    check_types(graph, [], KNOWN)


@pytest.mark.parametrize(("dtype", "able"), [(INT4, "8.0"), (FP8, "8.9"), (FP4, "12.0")])
def test_the_first_capability_of_a_type(dtype: ir.DataType, able: str) -> None:
    graph = quantized(dtype, None, blocks=True).graph()
    for target in KNOWN:
        if KNOWN.index(target) >= KNOWN.index(able):
            check_types(graph, [target], KNOWN)
        else:
            with pytest.raises(SpecError, match=r"is (int4|fp8|fp4), which GPUs"):
                check_types(graph, [target], KNOWN)


@needs_rtx
@pytest.mark.parametrize(
    ("made", "carrier", "message"),
    [
        (
            exporter("8.6"), determinant(),
            r"node 'node_determinant' \(Det\): operator Det is not known to TensorRT's ONNX "
            r"parser; write that part",
        ),
        (TensorrtExporter(), quantized(), r"input 'x': has dynamic .*add batch: \{min: 1"),
        (exporter("8.6"), quantized(FP8, FP8), r"layer 'first': is fp8, .* 8\.6 do not support"),
        (exporter("9.9"), quantized(), r"compute-capability: '9\.9' is not one .*choose from 7\.5"),
        (
            exporter("8.6"), quantized(activations=ir.DataType.UINT8, activation_zero=3),
            "layer 'first'.*is uint8 with zero point 3",
        ),
        (exporter("8.6"), quantized(activation_zero=3), "zero point is 3, TensorRT takes 0 only"),
        (exporter(sparse_weights=True), quantized(), "sparse-weights: is not for builder 'rtx'"),
        (exporter(strip_weights=True), quantized(), "strip-weights: is not for builder 'rtx'"),
        (exporter(timing_cache="x"), quantized(), "timing-cache: is not for .*measures nothing"),
        (
            exporter(hardware_compatibility="ampere-plus"), quantized(),
            "hardware-compatibility: is not for builder 'rtx'.* set builder: gpu",
        ),
        (exporter("7.5"), quantized(), r"cannot build an engine for 7\.5 \(.*FP32 GEMM is not"),
    ],
)  # fmt: skip
def test_refused_at_plan_time(made: TensorrtExporter, carrier: OnnxCarrier, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made.check(carrier)


@needs_rtx
def test_a_later_runtime_may_be_allowed_to_load_it(tmp_path: Path) -> None:
    path = exporter("8.6", version_compatible=True).write(quantized(), tmp_path, CONTEXT)[0]
    assert path.stat().st_size > 1000


@needs_rtx
def test_large_models_are_asked_about_their_operators_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter_module, "_TRIED", 1000)
    made = exporter("7.5")
    made.check(quantized())  # which building would refuse
    held = quantized().graph().graph.initializers.values()
    assert made.predict(quantized()) == sum(v.const_value.nbytes for v in held if v.const_value)
    with pytest.raises(SpecError, match="operator Det is not known"):
        made.check(determinant())


@needs_rtx
def test_an_operator_that_is_refused_by_its_attributes(tmp_path: Path) -> None:
    """The parser knows TopK, but not over more than 3840 values."""
    made = Builder()
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 8000])
    count = made.constant("k", np.array([4000]))
    node = ir.node("TopK", [x, count], name="node_top", num_outputs=2)
    node.outputs[0].name, node.outputs[1].name = "values", "indices"
    made.nodes.append(node)
    model = made.model([x], node.outputs[0], 4000)
    with pytest.raises(SpecError, match="node_top: K exceeds the maximum"):
        exporter("8.6").check(OnnxCarrier(model))


@pytest.mark.parametrize("name", ["rtx", "gpu"])
def test_a_builder_that_is_not_installed(
    name: builders.BuilderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=f"'{name}': needs tensorrt.*not installed; pip install"):
        TensorrtExporter(builder=name).check(quantized())


def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "deadly"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(package.parent)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ArtifactError, match="ended with code -6 before it answered"):
        build(tmp_path / "model.onnx", Settings("deadly"))


@pytest.mark.usefixtures("no_gpu")
def test_why_it_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reason: Any = "TensorRT engines run on NVIDIA GPUs only, and this machine has none"
    assert exporter("8.6").cannot_run == reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert exporter("8.9").cannot_run == ""
    assert exporter().cannot_run == ""
    assert exporter("8.6").cannot_run == (
        "the engine is for compute capability 8.6, the GPU here has 8.9"
    )
