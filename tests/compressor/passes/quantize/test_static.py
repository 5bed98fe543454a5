"""quantize-static: what it writes, how well it keeps the outputs, and what it refuses."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.static.options import StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.tensors import TensorSpec
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.quantize.static_models import (
    IMAGE,
    ORT,
    TENSORRT,
    Perceptron,
    Residual,
    Shortcut,
    carrier,
    data,
    outputs,
    quantized,
    runtime_operators,
    shared,
    sqnr,
    statistics,
)

VECTOR = TensorSpec("image", ("batch", 12), "float32")
INT8 = QuantizeStatic(layers=(StaticRule(match="*"),))  # small layers are faster as floats
EVERY = {"first-last": "same"}


@cache
def plain() -> TorchCarrier:
    """The module itself, not fused."""
    torch.manual_seed(0)
    return TorchCarrier(Residual(), [IMAGE])


def static(**options: object) -> QuantizeStatic:
    return QuantizeStatic.model_validate({"layers": [{"match": "*"}], **options}, strict=False)


@pytest.mark.parametrize("context", [ORT, TENSORRT])
@pytest.mark.parametrize("module", [Residual, Shortcut])
def test_outputs_stay_close_to_the_float_model(module, context):
    model = shared(module)
    after = quantized(INT8, model, context).carrier
    batch = data(seed=7)[0]
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 28


def test_weights_are_int8_and_nothing_float_is_left_beside_them():
    after = quantized(INT8, shared(Residual)).carrier
    floats = {
        name: value.const_value.size
        for name, value in after.graph().graph.initializers.items()
        if value.dtype == ir.DataType.FLOAT
    }
    assert all(name.endswith("_scale") for name in floats), floats
    assert {layer.dtype for layer in after.layers()} == {"int8"}


def test_onnx_runtime_fuses_everything_into_integer_kernels(tmp_path):
    found = runtime_operators(quantized(INT8, shared(Residual)).carrier, tmp_path)
    assert found["QLinearConv"] == 3
    assert found["QLinearAdd"] == 1
    assert found["QGemm"] == 1
    assert not found["Conv"] + found["Add"] + found["Gemm"] + found["Relu"]
    assert found["QuantizeLinear"] == 1, "only the input is quantized at run time"
    assert found["DequantizeLinear"] == 0, "the head's kernel writes float by itself"


def test_slices_and_pads_of_a_shortcut_move_codes(tmp_path):
    after = quantized(INT8, shared(Shortcut)).carrier
    found = runtime_operators(after, tmp_path)
    assert found["QuantizeLinear"] == 1
    assert found["QLinearAdd"] == 1
    moved = [n for n in after.graph().graph if n.op_type in ("Slice", "Pad")]
    assert moved
    assert {n.outputs[0].dtype for n in moved} == {ir.DataType.UINT8}


def test_linear_layers_become_integer_products(tmp_path):
    model = shared(Perceptron, VECTOR)
    after = quantized(INT8, model, spec=VECTOR).carrier
    found = runtime_operators(after, tmp_path)
    assert found["QGemm"] == 2
    batch = data(VECTOR, seed=7)[0]
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 28


def test_tensorrt_gets_symmetric_codes_and_float_biases():
    graph = quantized(INT8, shared(Residual), TENSORRT).carrier.graph().graph
    for node in graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        assert ir.DataType.INT32 not in {v.dtype for v in node.inputs if v is not None}
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            zero = node.inputs[2].const_value
            assert zero is not None
            assert zero.dtype == ir.DataType.INT8
            assert not np.any(zero.numpy())


def test_gptq_rounding_beats_nearest_rounding():
    # Few activations are lost at 8 bits; at 4 bits the weights' rounding is what counts.
    model = shared(Residual)
    batch = data(seed=7)[0]
    found = {
        rounding: sqnr(
            outputs(model, batch),
            outputs(
                quantized(static(weights={"bits": 4, "rounding": rounding}), model).carrier, batch
            ),
        )
        for rounding in ("nearest", "gptq")
    }
    assert found["gptq"] > found["nearest"] + 1


@pytest.mark.parametrize("inputs", [16, 1000])  # by themselves, and by their second moment
def test_a_wide_layer_is_rounded_by_few_inputs(inputs):
    spec = TensorSpec("image", ("batch", 1030), "float32")
    model = carrier(nn.Linear(1030, 8), spec)
    random = np.random.default_rng(0)  # inputs that depend on each other, or rounding gains little
    few, mixed = (random.standard_normal(s, np.float32) for s in ((inputs, 16), (16, 1030)))
    batch = {"image": few @ mixed}
    levels = {}
    for rounding in ("nearest", "gptq"):
        declared = static(weights={"rounding": rounding, "bits": 4}, activations={"bits": 8})
        collected = statistics(declared, model, ORT, [batch])
        assert any(getattr(s, "vectors", None) is not None for s in collected.values()) == (
            rounding == "gptq"
        )
        after = declared.apply(model, ORT, collected).carrier
        levels[rounding] = sqnr(outputs(model, batch), outputs(after, batch))
    assert levels["gptq"] > levels["nearest"] + 10


def test_per_channel_is_better_than_per_tensor():
    module = Residual()
    model = carrier(module)
    with torch.no_grad():
        module.first.weight.mul_(torch.linspace(0.05, 2.0, 8)[:, None, None, None])
    batch = data(seed=7)[0]
    plain = {"rounding": "nearest"}
    channel, tensor = (
        sqnr(
            outputs(model, batch),
            outputs(quantized(static(weights={**plain, "granularity": g}), model).carrier, batch),
        )
        for g in ("channel", "tensor")
    )
    assert channel > tensor


def test_rules_skip_and_give_bits():
    declared = static(
        layers=[{"match": "head", "skip": True}, {"match": "fir*", "bits": 4}],
        weights={"rounding": "nearest"},
    )
    model = shared(Residual)
    rows = {row.name: row for row in declared.survey(model, ORT).layers}
    assert rows["head"].action == "keep"
    assert not rows["head"].touched
    assert rows["first"].action.startswith("int4")
    dtypes = {layer.name: layer.dtype for layer in quantized(declared, model).carrier.layers()}
    assert dtypes == {"stem": "int8", "first": "int4", "second": "int8", "head": "float32"}


def test_rules_give_bits_to_what_a_layer_reads():
    """In four bits codes are clipped."""

    def clipped(*layers):
        options = {"weights": {"rounding": "nearest"}, "activations": {"bits": 4}}
        declared = static(layers=layers, **options, **EVERY)
        model = shared(Residual)
        after = quantized(declared, model).carrier
        found = {v.name for n in after.graph().graph if n.op_type == "Clip" for v in n.inputs[:1]}
        batch = data(seed=7)[0]
        rows = {row.name: row.action for row in declared.survey(model, ORT).layers}
        return found, sqnr(outputs(model, batch), outputs(after, batch)), rows

    everywhere, least, _ = clipped()
    without, more, rows = clipped({"match": "stem", "activation-bits": 8})
    assert everywhere - without == {"image"}
    assert more > least
    assert rows["stem"].endswith("x uint8")
    assert rows["first"].endswith("x uint4")


def test_what_two_layers_read_has_the_wider_of_two_widths():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, image):
            return self.wide(image) + self.narrow(image)

    for rules, clips in (((), True), (({"match": "wide", "activation-bits": 8},), False)):
        declared = static(activations={"bits": 4}, layers=rules, **EVERY)
        after = quantized(declared, shared(Two)).carrier.graph().graph
        clipped = {n.inputs[0].name for n in after if n.op_type == "Clip"}
        assert clipped - {"image"}
        assert ("image" in clipped) == clips


def test_preview_has_the_structure_and_bytes_of_the_result():
    model = shared(Residual)
    found = statistics(INT8, model, ORT, data())
    after = INT8.apply(model, ORT, found).carrier.graph().graph
    planned = INT8.preview(model, ORT, found).graph().graph
    assert [n.op_type for n in planned] == [n.op_type for n in after]
    sizes = [{k: v.const_value.nbytes for k, v in g.initializers.items()} for g in (planned, after)]
    assert sizes[0] == sizes[1]


def test_the_given_model_is_not_changed():
    model = shared(Residual)
    before = ir.to_proto(model.graph()).SerializeToString(deterministic=True)
    quantized(INT8, model)
    assert ir.to_proto(model.graph()).SerializeToString(deterministic=True) == before


def test_the_same_input_gives_the_same_bytes():
    made = [
        ir.to_proto(quantized(INT8, carrier(Residual())).carrier.graph()).SerializeToString()
        for _ in range(2)
    ]
    assert made[0] == made[1]


class Hidden(nn.Module):
    """Gives the value that its last layer reads, as a model does that carries a state."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, image):
        hidden = self.first(image)
        return self.last(hidden), hidden


def test_an_output_that_a_layer_reads_is_quantized():
    model = carrier(Hidden(), VECTOR)
    after = quantized(INT8, model, spec=VECTOR).carrier
    batch = data(VECTOR, seed=7)[0]
    have, want = (c.runner().run(batch) for c in (after, model))
    assert all(sqnr(want[name], have[name]) > 25 for name in want)  # measured: 27 and 29


def test_a_bias_that_dwarfs_its_channel_does_not_overflow():
    weight, bias = torch.randn(8, 8, 3, 3) / 5, torch.zeros(8)
    weight[0], bias[0] = 1e-9, 3.0
    model = plain().with_weights({"first.weight": weight, "first.bias": bias})
    batch = data(seed=7)[0]
    after = quantized(INT8, model).carrier
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 25


@pytest.mark.parametrize("form", [(8,), (1, 8)])
def test_a_bias_becomes_the_layers_own_vector(form, tmp_path):
    """Exporters share equal biases; scikit-learn's have two axes."""
    text = """(float[N,12] x) => (float[N,8] y) {
        h = Gemm(x, w, b) r = Relu(h) y = Gemm(r, v, b)
    }"""
    model = OnnxCarrier(graph(text, {"w": (12, 8), "v": (8, 8), "b": form}))
    spec = TensorSpec("x", ("batch", 12), "float32")
    after = quantized(INT8, model, spec=spec).carrier
    batch = data(spec)[0]
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 30
    assert runtime_operators(after, tmp_path) == {"QuantizeLinear": 1, "QGemm": 2}


def test_a_layer_with_all_zero_weights_is_quantized():
    model = plain().with_weights({"first.weight": torch.zeros(8, 8, 3, 3)})
    batch = data(seed=7)[0]
    after = quantized(INT8, model).carrier
    assert np.isfinite(outputs(after, batch)).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_four_bit_activations_have_sixteen_levels(symmetric):
    model = shared(Residual)
    declared = static(activations={"bits": 4, "symmetric": symmetric}, **EVERY)
    after = quantized(declared, model).carrier
    batch = data(seed=7)[0]
    codes = [
        v.name for n in after.graph().graph for v in n.outputs if n.op_type == "QuantizeLinear"
    ]
    found = after.runner(codes).run(batch)
    levels = {name: np.unique(found[name]).size for name in codes}
    assert max(levels.values()) == (15 if symmetric else 16), levels
    assert sqnr(outputs(model, batch), outputs(after, batch)) > 8


def test_values_behind_a_gate_are_observed_where_they_matter():
    model = shared(Residual)
    requests = INT8.survey(model, ORT).requests
    gated = [r for r in requests if r.where is not None]
    assert len({(r.tensor, r.where) for r in gated}) == 1
    producer = {o.name: n.op_type for n in model.graph().graph for o in n.outputs}
    assert producer[gated[0].tensor] == "Conv"
    assert producer[gated[0].where] == "Relu"


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(SpecError, match="matches no layer; did you mean 'head'"):
        static(layers=[{"match": "heap", "skip": True}]).survey(shared(Residual), ORT)


def test_skipping_everything_is_an_error():
    with pytest.raises(SpecError, match="touches no layer"):
        static(layers=[{"match": "*", "skip": True}]).survey(shared(Residual), ORT)


def test_double_precision_is_named():
    """The reason was that layers read no float value."""
    double = TorchCarrier(nn.Linear(4, 4).double(), [TensorSpec("x", ("batch", 4), "float64")])
    with pytest.raises(SpecError, match=r"in float64.*; put \{pass: cast, dtype: fp32\} before"):
        QuantizeStatic().survey(double, ORT)


def test_a_model_without_layers_is_an_error():
    class Nothing(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.relu(image)

    message = "touches no layer: the model has none with weights; remove it; fuse and the exports"
    with pytest.raises(SpecError, match=message):
        QuantizeStatic().survey(TorchCarrier(Nothing(), [IMAGE]), ORT)


@pytest.mark.parametrize("part", ["activations", "weights"])
def test_tensorrt_refuses_zero_points(part):
    with pytest.raises(SpecError, match=f"{part}.symmetric"):
        static(**{part: {"symmetric": False}}).survey(shared(Residual), TENSORRT)


def test_percentile_without_its_observer_is_an_error():
    with pytest.raises(SpecError, match="observer is auto"):
        static(activations={"percentile": 99.0}).survey(shared(Residual), ORT)


class Branches(nn.Module):
    """Layers that read the same value, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(12, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.last(torch.relu(self.first(image)) * self.second(image))
        return answer


def test_moments_are_factorized_once_for_all_layers_that_read_a_value(monkeypatch):
    sizes = []
    factorize = torch.linalg.cholesky_ex

    def counted(matrix: torch.Tensor, out: object) -> object:
        sizes.append(len(matrix))
        return factorize(matrix, out=out)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    model = shared(Branches, VECTOR)
    after = quantized(static(prepare="none"), model, spec=VECTOR)
    assert len(after.layers) == 3
    assert sorted(sizes) == [8, 12]  # on several threads in any order
