"""What prune-structured refuses, and what it then says."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError
from torch import nn

from compressor.errors import SpecError
from compressor.graph.inference import infer_shapes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.types.carrier import Capability
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.prune.structured_models import (
    CONTEXT,
    Plain,
    Residual,
    carrier,
    declared,
)


@pytest.fixture(scope="module")
def residual() -> TorchCarrier:
    return carrier(Residual())


@pytest.fixture(scope="module")
def plain() -> TorchCarrier:
    return carrier(Plain())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": {"ratio": 1.0}}, "less than 1"),
        ({"target": {"ratio": 0.0}}, "greater than 0"),
        ({"target": {"macs": 1.2}}, "less than or equal to 1"),
        ({"target": {"latency": -1.0}}, "greater than 0"),
        ({"target": {}}, "give one of ratio, macs, parameters, latency"),
        ({"target": {"ratio": 0.5, "macs": 0.5}}, "give one of ratio, macs"),
        ({}, "Field required"),
        ({"target": {"ratio": 0.5}, "minimum": 0}, "greater than"),
        ({"target": {"ratio": 0.5}, "minimum": 1.5}, "less than or equal to 1"),
        ({"target": {"ratio": 0.5}, "round_to": 0}, "greater than or equal to 1"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(ValidationError, match=message):
        declared(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": {"macs": 1.0}},
            r"target.macs: is 1: nothing would be removed; set less than 1",
        ),
        (
            {"target": {"ratio": 0.95}},
            r"target.ratio: is 0.95, and minimum 0.1 allows 0.9 at most",
        ),
        (
            {"target": {"ratio": 0.5}, "layers": [{"match": "wide", "ratio": 0.95}]},
            r"layers.ratio: is 0.95, and minimum",
        ),
        (
            {"target": {"ratio": 0.01}},
            "touches no layer: .*the target leaves its",
        ),
        (
            {"target": {"ratio": 0.5}, "scope": "local"},
            "scope: is local, but a ratio applies to each",
        ),
        (
            {"target": {"ratio": 0.5}, "layers": [{"match": "steem", "skip": True}]},
            r"layer rule 'steem': matches no layer; did you mean 'stem'\?",
        ),
        (
            {"target": {"ratio": 0.5}, "layers": [{"match": "*", "skip": True}]},
            r"touches no layer: .*skipped by the rule '\*'",
        ),
        (
            {"target": {"ratio": 0.5}, "round_to": 64},
            "touches no layer: .*round-to 64 leaves",
        ),
    ],
)
def test_options_that_do_not_fit_the_model(residual, options, message):
    with pytest.raises(SpecError, match=message):
        declared(**options).survey(residual, CONTEXT)


@pytest.mark.parametrize("kind", ["macs", "parameters"])
def test_out_of_reach_says_what_is_reachable(residual, kind):
    rules = [{"match": "wide", "skip": True}]
    with pytest.raises(SpecError, match=rf"target.{kind}: is 0.01, and 0\.\d+ of the") as raised:
        declared(target={kind: 0.01}, layers=rules).survey(residual, CONTEXT)
    said = float(raised.value.remedy.split()[3])
    declared(target={kind: said}, layers=rules).survey(residual, CONTEXT)
    with pytest.raises(SpecError):
        declared(target={kind: said - 0.002}, layers=rules).survey(residual, CONTEXT)


MORE = r"set it to 0\.\d+ or more"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"minimum": 1}, MORE),
        ({"minimum": 0.1}, MORE),  # one of eight channels, as with 1
        ({"minimum": 3}, f"{MORE}, or lower minimum"),
        ({"minimum": 8}, "touches no layer"),
        ({"minimum": 1, "round_to": 4}, f"{MORE}, or lower round-to"),
        ({"minimum": 3, "round_to": 4}, f"{MORE}, or lower round-to"),
        ({"minimum": 0.9, "round_to": 2}, "touches no layer"),
        ({"minimum": 1, "layers": [{"match": "first", "skip": True}]}, f"{MORE}, or skip fewer .*"),
        (
            {"minimum": 1, "layers": [{"match": "first", "ratio": 0.1}]},
            f"{MORE}, or raise the ratios of its rules",
        ),
    ],
)
def test_what_is_at_its_end_is_no_remedy(plain, options, remedy):
    """It advised to lower minimum at 1, and skipped layers where none was skipped."""
    with pytest.raises(SpecError) as raised:
        declared(target={"parameters": 0.05}, **options).survey(plain, CONTEXT)
    assert re.fullmatch(remedy, raised.value.remedy) or raised.value.problem.startswith(remedy)


def stored_flat() -> OnnxCarrier:
    """Return two convolutions whose weights are stored flat and reshaped in the graph."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[n, 4, 8, 8] x) => (float[n, 4, 8, 8] y)
        {
            w1 = Reshape (flat1, wide)
            h = Conv <pads = [1, 1, 1, 1]> (x, w1)
            r = Relu (h)
            w2 = Reshape (flat2, narrow)
            y = Conv <pads = [1, 1, 1, 1]> (r, w2)
        }
    """
    arrays = {
        "flat1": np.ones(32 * 36, np.float32),
        "flat2": np.ones(4 * 288, np.float32),
        "wide": np.array([32, 4, 3, 3]),
        "narrow": np.array([4, 32, 3, 3]),
    }
    tensors = [ir.tensor(array, name=name) for name, array in arrays.items()]
    model = ir.from_onnx_text(text, initializers=tensors)
    infer_shapes(model)
    return OnnxCarrier(model)


@pytest.mark.parametrize("target", [{"macs": 0.5}, {"ratio": 0.5}, {"latency": 0.5}])
def test_weights_that_the_graph_computes_need_fuse_first(target):
    network, step = stored_flat(), declared(target=target, round_to=1)
    with pytest.raises(SpecError, match=r"put the pass fuse first, .* such as that of 'flat1'"):
        step.survey(network, CONTEXT)
    fused = Fuse().apply(network, CONTEXT, {}).carrier
    assert step.survey(fused, CONTEXT).layers


def test_outputs_never_vanish():
    alone = TorchCarrier(nn.Linear(6, 4), [TensorSpec("input", ("batch", 6), "float32")])
    with pytest.raises(SpecError, match=r"touches no layer: 1 of 1: .*output"):
        declared(target={"ratio": 0.5}).survey(alone, CONTEXT)


def test_norm_scales_need_norms(plain):
    with pytest.raises(SpecError, match=r"touches no layer: .*no normalization scales"):
        declared(target={"ratio": 0.5}, criterion="batch-norm").survey(plain, CONTEXT)
    with pytest.raises(SpecError, match="re-estimate: is true, but the model has no batch norm"):
        declared(target={"ratio": 0.5}, re_estimate=True).survey(plain, CONTEXT)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"criterion": "random"}, ""),
        ({"criterion": "taylor"}, "to score by taylor"),
        ({"re_estimate": True}, "to re-estimate batch-norm statistics"),
        (
            {"sensitivity": True, "re_estimate": True},
            "to measure sensitivity and to re-estimate batch-norm statistics",
        ),
    ],
)
def test_what_reads_data_says_so_and_needs_a_runtime(residual, options, text):
    step = declared(target={"ratio": 0.5}, **options)
    step.survey(residual, CONTEXT)
    assert step.replays == text
    assert (Capability.RUN in step.required) == bool(text)
    if text:
        with pytest.raises(SpecError, match="has options that need calibration data"):
            step.apply(residual, CONTEXT, {})


def test_activations_are_asked_for(residual):
    step = declared(target={"ratio": 0.5}, criterion="activation")
    survey = step.survey(residual, CONTEXT)
    assert Capability.RUN in step.required
    assert survey.requests
    assert {r.observer for r in survey.requests} == {"channel-magnitude"}
