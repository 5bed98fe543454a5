"""prune-structured: what it removes, what it promises beforehand, and what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compressor.passes.prune.structured.removal as module_under_test
from compressor.errors import ModelError
from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import macs, model_macs, model_parameters
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch import carrier as torch_carrier
from compressor.models.torch import smaller_module as agreement
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.types.carrier import Capability
from tests.compressor.models.smaller_modules import VECTOR, Rigid, shaken
from tests.compressor.passes.prune.random_graphs import random_network
from tests.compressor.passes.prune.structured_models import (
    CONTEXT,
    LayerNormed,
    Plain,
    Residual,
    carrier,
    data,
    declared,
    output,
    pruned,
    shapes,
    timed_by,
)

HALF = declared(target={"ratio": 0.5})


@pytest.fixture(scope="module")
def residual() -> TorchCarrier:
    return carrier(Residual())


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), pieces=st.integers(1, 9), ratio=st.floats(0.2, 0.8))
def test_random_graphs_without_units_equal_those_with_zeros(seed, pieces, ratio):
    """The zeros are put in here, one parameter after the other, and not by the pass's own code."""
    model = random_network(seed, pieces)
    step = declared(target={"ratio": ratio}, criterion="random", minimum=1)
    channels = map_channels(model.graph())
    flags = step.selector(model, channels).planned()
    changes = {}
    for name, axes in channels.parameters.items():
        tensor = model.tensors()[name].read().clone()
        roles = {m.role for g in channels.groups for m in g.members if m.parameter == name}
        if "norm-variance" in roles:
            continue
        for axis, units in enumerate(axes):
            if units is not None:
                gone = np.flatnonzero((units >= 0) & flags[units])
                tensor.index_fill_(axis, torch.from_numpy(gone), 0.0)
        changes[name] = tensor
    smaller, _ = module_under_test.remove_channels(model.graph(), channels, flags)
    batch = {"image": np.random.default_rng(seed).standard_normal((2, 3, 6, 6), np.float32)}
    wanted = output(model.with_weights(changes), batch)
    found = output(OnnxCarrier(smaller), batch)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert "removed units were proved" in " ".join(pruned(step, model, seed=seed).notes)


def test_a_ratio_is_predicted_layer_by_layer(residual):
    rows = {row.name: row for row in HALF.survey(residual, CONTEXT).layers}
    assert rows["stem"].action == "8 of 16 channels"
    assert rows["inner"].action == "6 of 12 channels"
    assert rows["head"].action == "keep"
    assert "output" in rows["head"].reason
    outcome = pruned(HALF, residual)
    schemes = {layer.name: layer.scheme for layer in outcome.layers}
    for name, row in rows.items():
        if row.touched:
            assert schemes[name] == f"float32, {row.action}"
    assert schemes["head"] == "float32, 16 of 32 inputs"
    assert shapes(outcome.carrier) == {
        "stem": (8, 3, 3, 3),
        "inner": (6, 8, 3, 3),
        "outer": (8, 6, 3, 3),
        "wide": (16, 8, 3, 3),
        "head": (5, 16),
    }
    details = {layer.name: layer.details for layer in outcome.layers}
    assert details["wide"] == {
        "channels_before": 32,
        "channels_after": 16,
        "inputs_before": 16,
        "inputs_after": 8,
    }


def test_a_preview_runs_nothing(residual, monkeypatch):
    def run(*_):
        raise AssertionError("something was run")

    expected = shapes(pruned(HALF, residual).carrier)
    monkeypatch.setattr(agreement, "Agreement", run)
    monkeypatch.setattr(torch_carrier, "Agreement", run)
    preview = HALF.preview(residual, CONTEXT, {})
    assert shapes(preview) == expected
    assert Capability.TRAIN in preview.offers
    fused = Fuse().preview(preview, CONTEXT, {})
    again = HALF.preview(fused, CONTEXT, {})
    assert model_parameters(again) < model_parameters(fused) < model_parameters(residual)


def test_a_preview_has_the_sizes_of_the_result_and_ignores_weights(residual):
    assert shapes(HALF.preview(residual, CONTEXT, {})) == shapes(pruned(HALF, residual).carrier)
    unread = carrier(Residual())
    with torch.no_grad():
        for parameter in unread.module.parameters():
            parameter.fill_(float("nan"))
    step = declared(target={"macs": 0.5})
    preview = step.preview(OnnxCarrier(unread.graph()), CONTEXT, {})
    result = pruned(step, residual).carrier
    assert model_macs(preview) == pytest.approx(model_macs(result), rel=0.1)
    assert model_parameters(preview) == pytest.approx(model_parameters(result), rel=0.3)


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize(
    ("kind", "count"), [("macs", model_macs), ("parameters", model_parameters)]
)
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_what_remains_is_just_under_the_target(residual, kind, count, share, scope):
    outcome = pruned(declared(target={kind: share}, scope=scope), residual)
    # The largest step, a channel of the residual stream, is less than 7 % of the whole.
    assert share - 0.07 < count(outcome.carrier) / count(residual) <= share
    name = "MACs" if kind == "macs" else "parameters"
    assert any(note.startswith(f"{name} {count(residual):,} -> ") for note in outcome.notes)


def test_module_and_graph_lose_the_same_channels(residual):
    step = declared(target={"macs": 0.5}, criterion="l1")
    ours = pruned(step, residual).carrier
    theirs = pruned(step, OnnxCarrier(residual.graph())).carrier
    assert Capability.TRAIN in ours.offers
    for name, tensor in theirs.tensors().items():
        if name in ours.tensors():
            assert torch.equal(tensor.read(), ours.tensors()[name].read()), name
    batch = data().probe(4)
    assert output(ours, batch) == pytest.approx(output(theirs, batch), abs=1e-5)


@pytest.mark.parametrize(
    "criterion",
    [
        *("taylor", "reconstruction", "random"),  # what needs data, solves, or draws
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("l2", "l1", "batch-norm", "activation")
        ),
    ],
)
def test_every_criterion_gives_the_same_bytes_twice(criterion, residual):
    step = declared(target={"macs": 0.6}, criterion=criterion)
    first, second = (pruned(step, residual, data(1)).carrier.tensors() for _ in range(2))
    assert all(torch.equal(first[n].read(), second[n].read()) for n in first)


@pytest.mark.parametrize(
    "criterion", ["l2", "l1", "batch-norm", "taylor", "activation", "reconstruction"]
)
def test_every_criterion_finds_the_channels_that_do_nothing(criterion):
    module = Residual()
    model = carrier(module)
    idle = [1, 4, 5, 10]
    with torch.no_grad():
        for tensor in (module.inner.weight, module.inner.bias):
            tensor[idle] *= 1e-3
        for tensor in (module.inner_norm.weight, module.inner_norm.bias):
            tensor[idle] *= 1e-3
        module.inner_norm.running_mean[idle] = 0.0
        module.outer.weight[:, idle] *= 1e-3
    rules = [{"match": "stem", "skip": True}, {"match": "wide", "skip": True}]
    step = declared(target={"ratio": 1 / 3}, criterion=criterion, layers=rules)
    after = pruned(step, model, data()).carrier
    stay = [i for i in range(12) if i not in idle]
    assert torch.equal(after.tensors()["inner.weight"].read(), module.inner.weight[stay])
    batch = data().probe(8)
    wanted = output(model, batch)
    assert np.abs(output(after, batch) - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_random_depends_on_the_seed(residual):
    step = declared(target={"ratio": 0.5}, criterion="random")
    first, second = (
        pruned(step, residual, seed=s).carrier.tensors()["stem.weight"].read() for s in (0, 1)
    )
    assert not torch.equal(first, second)


def test_rules_protect_all_channels_that_a_layer_writes(residual):
    rules = [{"match": "outer", "skip": True}, {"match": "wid*", "ratio": 0.75}]
    step = declared(target={"ratio": 0.5}, layers=rules)
    rows = {row.name: row for row in step.survey(residual, CONTEXT).layers}
    assert rows["stem"].reason == "skipped by the rule 'outer'", "they are added to the stem's"
    assert rows["wide"].action == "8 of 32 channels"
    found = shapes(pruned(step, residual).carrier)
    assert found["stem"] == (16, 3, 3, 3)
    assert found["inner"] == (6, 16, 3, 3)
    assert found["wide"] == (8, 16, 3, 3)


def test_a_rules_ratio_holds_under_a_target_for_the_whole(residual):
    rules = [{"match": "wide", "ratio": 0.25}]
    for scope in ("global", "local"):
        step = declared(target={"macs": 0.4}, layers=rules, scope=scope)
        after = pruned(step, residual).carrier
        assert shapes(after)["wide"][0] == 24
        assert model_macs(after) <= 0.4 * model_macs(residual)


def test_channels_remain_in_multiples(residual):
    step = declared(target={"macs": 0.5}, round_to=4)
    after = shapes(pruned(step, residual).carrier)
    assert all(after[name][0] % 4 == 0 for name in ("stem", "inner", "outer", "wide"))
    step = declared(target={"ratio": 0.4}, round_to=16)
    rows = {row.name: row for row in step.survey(residual, CONTEXT).layers}
    assert rows["inner"].reason == "round-to 16 leaves its 12 channels whole"
    assert rows["wide"].action == "16 of 32 channels"


def test_a_minimum_stays(residual):
    after = shapes(pruned(declared(target={"macs": 0.2}, minimum=5), residual).carrier)
    assert min(shape[0] for shape in after.values()) >= 5
    after = shapes(pruned(declared(target={"ratio": 0.75}, minimum=0.25), residual).carrier)
    assert after["wide"][0] == 8


def test_a_wrong_removal_stops_the_run(residual, monkeypatch):
    right = module_under_test.remove_channels

    def wrong(model, found, removed):
        group = next(g for g in found.channels.groups if g.name == "inner")
        other = removed.copy()
        other[group.units] = removed[group.units][::-1]
        return right(model, found, other)

    monkeypatch.setattr(module_under_test, "remove_channels", wrong)
    with pytest.raises(ModelError, match="the channels of 'inner': cannot be removed"):
        pruned(declared(target={"macs": 0.5}), residual)


def test_a_note_says_where_a_graph_takes_the_modules_place(residual):
    note = "a module that executes the graph takes its place"
    rigid = TorchCarrier(shaken(Rigid()), VECTOR)
    outcome = pruned(HALF, rigid)
    assert outcome.carrier.executes_graph
    assert any(text.endswith(note) for text in outcome.notes)
    again = pruned(HALF, outcome.carrier)
    for adapted in (pruned(HALF, residual), again):
        assert not any(note in text for text in adapted.notes)


def test_what_a_layer_norm_mixes_is_pruned_and_said_to_be_unproved():
    model = carrier(LayerNormed())
    outcome = pruned(HALF, model)
    assert shapes(outcome.carrier) == {"first": (8, 10), "hidden": (12, 8), "head": (4, 12)}
    assert any(n.startswith("12 removed units were proved on random inputs") for n in outcome.notes)
    assert any("1 groups that LayerNormalization mixes" in n for n in outcome.notes)


class Chaotic(Plain):
    """Magnifies the rounding of its sums a million times."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(image)))
        return torch.sin(1e6 * self.head(x.mean((2, 3))))


def test_what_magnifies_rounding_is_proved_in_doubles():
    outcome = pruned(declared(target={"ratio": 0.5}), carrier(Chaotic()))
    (note,) = [n for n in outcome.notes if "units were proved on random inputs" in n]
    assert "in double precision the smaller model differs by at most" in note
    assert "rounding in the model's own makes that" in note


def test_without_a_runtime_nothing_is_proved():
    outcome = HALF.apply(carrier(Plain()), CONTEXT, {})
    assert "no removal was proved: the model was not run" in outcome.notes


def test_statistics_are_estimated_anew_on_request(residual):
    given_data = data(4)
    half = {"target": {"ratio": 0.5}, "reconstruct": False}
    plain = pruned(declared(**half), residual, given_data)
    fitted = pruned(declared(**half, re_estimate=True), residual, given_data)
    assert "batch-norm statistics were re-estimated" in " ".join(fitted.notes)
    batch = given_data.data[0]
    before, after = (
        o.carrier.runner([o.carrier.layers()[0].output]).run(batch) for o in (plain, fitted)
    )
    first = fitted.carrier.layers()[0].output
    assert (before[first] == after[first]).all(), "the first layer sees the same"
    everything = np.concatenate([b["image"] for b in given_data.data])
    seen = fitted.carrier.runner([first]).run({"image": everything})[first]
    tensors = fitted.carrier.tensors()
    mean, variance = (tensors[f"stem_norm.running_{n}"].read() for n in ("mean", "var"))
    assert mean.numpy() == pytest.approx(seen.mean((0, 2, 3)), abs=1e-5)
    assert variance.numpy() == pytest.approx(seen.var((0, 2, 3)), rel=1e-4)


def test_sensitivity_is_reported_and_balances(residual):
    step = declared(target={"macs": 0.5}, sensitivity=True)
    outcome = pruned(step, residual, data())
    assert any(n.startswith("signal to noise with half of a group") for n in outcome.notes)
    known = {x.name for x in outcome.layers if "sensitivity_db" in x.details}
    assert known == {"stem", "inner", "wide"}
    # A group whose channels hardly matter loses most of them, though its norms say otherwise.
    module = Residual()
    model = carrier(module)
    with torch.no_grad():
        module.outer_norm.weight.fill_(1e-4)
    step = declared(target={"macs": 0.6}, scope="sensitivity")
    after = shapes(pruned(step, model, data()).carrier)
    assert after["inner"][0] <= 2
    assert after["stem"][0] >= 14


def test_a_latency_is_measured_and_said(monkeypatch: pytest.MonkeyPatch):
    timed_by(monkeypatch, lambda part: 1e-6 + 1e-9 * macs(part))
    model = carrier(Plain())
    outcome = pruned(declared(target={"latency": 0.95}, minimum=1), model, data())
    note = next(n for n in outcome.notes if n.startswith("latency at batch 1 in ONNX Runtime"))
    assert "the target is 0.95" in note
    assert model_macs(outcome.carrier) < model_macs(model)


def test_global_takes_weak_channels_where_they_are_and_local_the_same_everywhere():
    module = Residual()
    model = carrier(module)
    with torch.no_grad():
        for tensor in (module.wide.weight, module.wide_norm.weight):
            tensor[:24] *= 1e-2
        module.head.weight[:, :24] *= 1e-2
    found = {
        scope: shapes(pruned(declared(target={"macs": 0.6}, scope=scope), model).carrier)
        for scope in ("global", "local")
    }
    assert found["global"]["wide"][0] < 20
    assert found["global"]["stem"][0] > found["local"]["stem"][0]
    assert found["local"]["wide"][0] / 32 == pytest.approx(found["local"]["stem"][0] / 16, abs=0.07)
