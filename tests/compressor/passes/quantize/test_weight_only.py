"""quantize-weights: what it chooses, what it finds, and what it refuses."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compressor.errors import ModelError, SpecError
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.weights import weights as weight_only
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import QuantizedTensor
from compressor.types.passes import PassContext
from tests.compressor.passes.quantize.weight_only_models import (
    ANY,
    TENSORRT,
    VECTOR,
    Language,
    carrier,
    codes,
    plan,
    reasons,
    same,
    weights,
)

# --- what is chosen


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ({"preset": "int8"}, "int8/channel"),
        ({"preset": "int4-g32"}, "int4/group 32"),
        ({"preset": "int2-g32"}, "uint2/group 32 asym"),
        ({"preset": "fp8"}, "fp8-e4m3/channel"),
        ({"preset": "nvfp4"}, "nvfp4/group 16"),
        ({"preset": "mxfp4"}, "mxfp4/group 32"),
        ({"bits": 3}, "int3/channel"),
        ({"bits": 4, "group": 16, "symmetric": False}, "uint4/group 16 asym"),
        ({"format": "fp8-e4m3", "group": 64}, "fp8-e4m3/group 64"),
    ],
)
def test_options_name_a_scheme(language, tmp_path, options, action):
    found = plan(weights(**options), language)
    assert set(found.values()) == {action, "keep"}
    outcome = weights(**options).apply(language, ANY, {})
    assert {layer.scheme for layer in outcome.layers} == {action}
    for quantized_weight in codes(outcome.carrier).values():
        assert str(quantized_weight.scheme) == action


@pytest.mark.parametrize(
    ("options", "context", "action"),
    [
        ({"bits": 4, "group": 32}, ANY, "uint4/group 32 asym"),
        ({"preset": "int4-g32"}, ANY, "uint4/group 32 asym"),
        ({"bits": 4, "group": 32, "symmetric": True}, ANY, "int4/group 32"),
        ({"bits": 4, "group": 32}, TENSORRT, "int4/group 32"),
    ],
)
def test_hqq_fits_zero_points_where_it_may(language, options, context, action):
    found = plan(weights(method="hqq", **options), language, context)
    assert set(found.values()) == {action, "keep"}


def test_tables_and_the_output_layer_are_kept(language):
    found = reasons(weights(preset="int8"), language)
    assert found["embed_tokens"] == (
        "a table is looked up, not multiplied; embeddings: true stores it as codes"
    )
    assert found["lm_head"] == "it is the output layer"
    assert not any(found[name] for name in found if name[:2] in ("ga", "up", "do"))
    everything = plan(weights(preset="int8", embeddings=True), language)
    assert set(everything.values()) == {"int8/channel"}


def test_an_output_layer_that_is_the_table_is_kept():
    found = reasons(weights(preset="int8"), carrier(Language(tied=True)))
    assert "its weight is shared with a table" in found.values()
    assert not {"lm_head", "embed_tokens"} <= found.keys()


def test_a_preset_keeps_layers_that_do_not_divide(language, mixed):
    found = reasons(weights(), language)
    assert found["gate.0"] == "64 input columns do not divide into groups of 128"
    assert found["down.0"] == ""
    found = reasons(weights(preset="int4-g32"), mixed)
    assert found["fc"] == "100 input columns do not divide into groups of 32"
    assert "kernel" in found["conv"]
    assert not found["last"]


def test_rules_change_or_skip_single_layers(language):
    rules = [
        {"match": "down.0", "skip": True},
        {"match": "down.*", "bits": 8, "group": "channel"},
        {"match": "up.0", "symmetric": False},
        {"match": "up.*", "format": "nvfp4"},
    ]
    found = plan(weights(bits=4, group=32, layers=rules), language)
    assert found["down.0"] == "keep"
    assert found["down.1"] == "int8/channel"
    assert found["up.0"] == "uint4/group 32 asym"
    assert found["up.1"] == "nvfp4/group 16"
    assert found["gate.1"] == "int4/group 32"


def test_scales_have_the_type_of_the_weight():
    model = carrier(Language().to(torch.bfloat16))
    for weight in codes(weights(bits=4, group=32).apply(model, ANY, {}).carrier).values():
        assert weight.scheme.scale_type == "bfloat16"
        assert torch.equal(weight.scale, weight.scale.to(torch.bfloat16).to(torch.float32))


# --- what is refused, at plan time


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        (
            {"preset": "int8", "bits": 4, "group": 32},
            ANY,
            "preset 'int8': is given together with bits and group; set the preset",
        ),
        ({"group": 32}, ANY, "bits: is not given, group is"),
        ({"format": "nvfp4", "bits": 8}, ANY, "bits is 8, nvfp4 has 4"),
        ({"format": "fp8-e4m3", "symmetric": False}, ANY, "fp8-e4m3 has no zero point"),
        ({"format": "mxfp4", "group": 16}, ANY, "group is 16, mxfp4 has groups of 32"),
        (
            {"preset": "fp8", "layers": [{"match": "up.*", "bits": 4}]},
            ANY,
            "layer rule 'up.*': bits is 4, fp8-e4m3 has 8",
        ),
        ({"bits": 4, "layers": [{"match": "nope", "skip": True}]}, ANY, "matches no layer"),
        ({"bits": 4, "layers": [{"match": "*", "skip": True}]}, ANY, "touches no layer"),
        (
            {"bits": 4, "group": 48},
            ANY,
            "layer 'gate.0': 64 input columns do not divide into groups of 48; "
            "choose a divisor or skip the layer",
        ),
        (
            {"preset": "int4-g32", "layers": [{"match": "down.1", "group": 100}]},
            ANY,
            "layer 'down.1': 128 input columns do not divide into groups of 100",
        ),
        ({"method": "hqq", "range": "mse", "bits": 4}, ANY, "hqq finds ranges its own way"),
        ({"method": "hqq", "preset": "nvfp4"}, ANY, "hqq': rounds to integers, layer 'gate.0'"),
        ({"method": "reconstruct", "preset": "nvfp4"}, ANY, "float32 to integers, layer 'gate.0'"),
        ({"bits": 4, "symmetric": False}, TENSORRT, "tensorrt takes zero point 0 only"),
        ({"bits": 4}, TENSORRT, "takes 4 bits in groups only"),
        ({"bits": 3}, TENSORRT, "has integers of 8 and 4 bits"),
    ],
)
def test_options_that_do_not_fit_are_refused(language, options, context, message):
    with pytest.raises(SpecError) as caught:
        weights(**options).survey(language, context)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "targets", "signed"),
    [
        ({"preset": "int4-g32"}, {"compressed-tensors", "ort-cpu"}, True),
        ({"preset": "int4-g32"}, {"gguf"}, True),
        ({"preset": "int4-g32"}, {"tensorrt"}, False),
        ({"preset": "int4-g32"}, {"ort-cpu", "litert"}, False),
        ({"preset": "int8"}, (), False),
        ({"preset": "int2-g32"}, (), False),
        ({"bits": 2, "group": 32}, (), True),
    ],
)
def test_scales_have_signs_where_all_targets_take_them(language, options, targets, signed):
    context = PassContext(targets=frozenset(targets))
    treatments = weights(**options).choose(language, context).treatments.values()
    schemes = [treatment.scheme for treatment in treatments if treatment.scheme is not None]
    assert {scheme.signed_scale for scheme in schemes} == {signed}
    found = weights(**options).apply(language, context, {}).carrier
    assert any(bool((each.scale < 0).any()) for each in codes(found).values()) is signed


def test_awq_wants_a_scale_to_move(mixed):
    with pytest.raises(SpecError, match="finds no layer whose input scale can be moved"):
        weights(method="awq", bits=8).survey(mixed, ANY)


def test_calibrated_methods_need_a_model_that_runs():
    assert weights(method="rtn").required == {Capability.WEIGHTS}
    for method in ("gptq", "awq", "reconstruct"):
        assert weights(method=method).required >= {Capability.RUN, Capability.GRAPH}


# --- weights alone


@pytest.fixture(scope="module")
def perceptron() -> TorchCarrier:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16, bias=False))
    return TorchCarrier(module, [VECTOR])


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "group": 16},
        {"bits": 2, "group": 16, "symmetric": False, "range": "mse"},
        {"bits": 3, "group": 32, "method": "hqq"},
        {"preset": "nvfp4"},
        {"preset": "mxfp4"},
        {"preset": "fp8"},
    ],
)
def test_torch_onnx_and_checkpoint_give_identical_codes(perceptron, tmp_path, options):
    names = ("0.weight", "2.weight")
    state = perceptron.module.state_dict()
    save_file(state, tmp_path / "model.safetensors")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 64]))
    held = {
        "0.weight": state["0.weight"],
        "0.bias": state["0.bias"],
        "2.weight": state["2.weight"].T.contiguous(),  # MatMul reads [columns, rows]
    }
    values = {
        name: ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(tuple(tensor.shape)),
            const_value=ir.tensor(tensor.numpy(), name=name),
        )
        for name, tensor in held.items()
    }
    gemm = ir.node("Gemm", [x, values["0.weight"], values["0.bias"]], {"transB": 1})
    relu = ir.node("Relu", gemm.outputs)
    last = ir.node("MatMul", [relu.outputs[0], values["2.weight"]])
    last.outputs[0].name = "y"
    last.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x],
        last.outputs,
        nodes=[gemm, relu, last],
        initializers=list(values.values()),
        opset_imports={"": 21},
    )
    declared = weights(**options)
    carriers: list[Carrier] = [
        perceptron,
        OnnxCarrier(ir.Model(graph, ir_version=10)),
        open_checkpoint(tmp_path / "model.safetensors"),
    ]
    torch_codes, onnx_codes, file_codes = (
        codes(declared.apply(model, ANY, {}).carrier) if i != 1 else from_graph(declared, model)
        for i, model in enumerate(carriers)
    )
    for name in names:
        same(torch_codes[name], file_codes[name])
        same(torch_codes[name], onnx_codes[name])


def from_graph(declared: QuantizeWeights, model: Carrier) -> dict[str, QuantizedTensor]:
    """The codes that an ONNX carrier is told to hold."""
    told = {}

    class Listening(OnnxCarrier):
        def with_codes(self, changes: Any) -> OnnxCarrier:
            told.update(changes)
            return super().with_codes(changes)

    declared.apply(Listening(model.graph()), ANY, {})
    return {n: c.compute(c.layer.canonical(model.weight(c.layer))) for n, c in told.items()}


def test_little_of_a_streamed_model_is_read(tmp_path, monkeypatch):
    torch.manual_seed(0)
    save_file({"fc.weight": torch.randn(4096, 32)}, tmp_path / "model.safetensors")
    seen: list[int] = []
    real = weight_only.round_to_nearest

    def counted(matrix: torch.Tensor, **options: Any) -> QuantizedTensor:
        seen.append(len(matrix))
        return real(matrix, **options)

    monkeypatch.setattr(weight_only, "round_to_nearest", counted)
    outcome = weights(bits=4, group=32).apply(
        open_checkpoint(tmp_path / "model.safetensors"), ANY, {}
    )
    assert seen == [32]
    (layer,) = outcome.layers
    assert layer.details == {"weight_sqnr_rows": 32}
    assert layer.weight_sqnr_db == pytest.approx(20.6, abs=0.7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, bad):
    weight = torch.randn(16, 32)
    weight[3, 4] = bad
    save_file({"fc.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layer 'fc': its weight holds values that are NaN"):
        weights(bits=8).apply(open_checkpoint(tmp_path / "model.safetensors"), ANY, {})


def test_a_preview_reads_no_weight(language, monkeypatch):
    def refuse(matrix: torch.Tensor, **options: Any) -> QuantizedTensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(weight_only, "round_to_nearest", refuse)
    for method in ("rtn", "gptq", "awq"):
        after = weights(method=method, bits=4, group=32).preview(language, ANY, {})
        assert {layer.dtype for layer in after.layers()} >= {"int4", "float32"}
