"""low-rank on modules and graphs: ranks, sizes, targets, and what the inputs are good for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.graph.costs import model_bytes, model_macs, model_parameters
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch import carrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.smaller_module import Agreement
from compressor.types.carrier import Capability
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.passes.factor.low_rank_models import (
    CONTEXT,
    applied,
    declared,
    logits,
    pictures,
    pixels,
    ranks,
)
from tests.compressor.passes.prune.structured_models import Given
from tests.two_linears import drawn, on_onnx, on_torch

KEPT = {
    "grouped": "a convolution of 4 groups is not factored",
    "wide": "a transposed convolution is not factored",
    "thin": "1 x 20 is no smaller in two, at any rank",
}


def reasons(**options: Any) -> dict[str, str]:
    survey = declared(**options).survey(pictures(), CONTEXT)
    return {row.name: row.reason for row in survey.layers if row.reason}


def test_what_stays_whole_and_why() -> None:
    assert reasons(rank=2) == KEPT
    assert reasons(rank=7) == {
        **KEPT,
        "stem": "at rank 7 of 8 two layers are no smaller; at 6 they are",
        "last": "at rank 7 of 10 two layers are no smaller; at 6 they are",
        "point": "at rank 7 of 12 two layers are no smaller; at 6 they are",
    }
    assert reasons(rank=11) == {
        **reasons(rank=7),
        "stem": "rank 11 is above its full rank, 8",
        "point": "at rank 11 of 12 two layers are no smaller; at 6 they are",
        "narrow": "at rank 11 of 12 two layers are no smaller; at 8 they are",
        "fc": "at rank 11 of 12 two layers are no smaller; at 7 they are",
        "last": "rank 11 is above its full rank, 10",
    }
    skipped = reasons(rank=2, layers=[{"match": "stem", "skip": True}])
    assert skipped == {"stem": "skipped by the rule 'stem'", **KEPT}


def test_the_plan_names_ranks_and_parts() -> None:
    survey = declared(rank=0.25, layers=[{"match": "fc", "rank": 5}]).survey(pictures(), CONTEXT)
    rows = {row.name: row for row in survey.layers if row.touched}
    assert {name: row.action for name, row in rows.items()} == {
        "stem": "rank 2 of 8",
        "body": "rank 4 of 16",
        "point": "rank 3 of 12",
        "narrow": "rank 3 of 12",
        "fc": "rank 5 of 12",
        "last": "rank 2 of 10",
    }
    assert rows["fc"].parts == ("fc.down", "fc.up")
    energy = declared(energy=0.9).survey(pictures(), CONTEXT).layers[0]
    assert energy.action == "energy 0.9, rank up to 6 of 8"


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 3},
        {"rank": 0.3, "layers": [{"match": "body", "rank": 9}]},
        {"energy": 0.9},
        {"target": {"macs": 0.6}},
        {"target": {"parameters": 0.7}, "weighted": True},
    ],
)
def test_sizes_energies_and_errors_are_as_said(options: dict[str, Any], tmp_path: Path) -> None:
    model, step = pictures(), declared(**options)
    outcome = applied(step, model, tmp_path)
    after = outcome.carrier
    layers = {layer.name: layer for layer in model.layers()}
    for row in outcome.layers:
        if not row.name.endswith(".up"):
            continue
        layer = layers[row.name.removesuffix(".up")]
        parts = {x.name: x for x in after.layers()}
        up, down = (parts[f"{layer.name}.{end}"] for end in ("up", "down"))
        product = up.canonical(after.weight(up)) @ down.canonical(after.weight(down))
        matrix = layer.canonical(model.weight(layer))
        noise = float((product - matrix).square().sum() / matrix.square().sum())
        assert row.weight_sqnr_db == pytest.approx(-10 * np.log10(noise), abs=1e-2)
        if not step.weighted:
            assert row.details["energy"] == pytest.approx(1 - noise, abs=1e-5)
        assert up.columns == down.rows == row.details["rank"] < row.details["full_rank"]
        assert row.scheme == f"float32, rank {up.columns} of {row.details['full_rank']}"
        assert up.parameters + down.parameters < layer.parameters
        if step.energy is not None:
            assert row.details["energy"] >= 0.9
    macs, weights = model_macs(after), model_parameters(after)
    assert f"MACs {model_macs(model):,} -> {macs:,}" in " ".join(outcome.notes)
    assert f"parameters {model_parameters(model):,} -> {weights:,}" in " ".join(outcome.notes)
    if step.target is not None:
        whole = {"macs": model_macs(model), "parameters": model_parameters(model)}
        found = {"macs": macs, "parameters": weights}
        kind = step.target.kind
        assert 0.93 * step.target.value < found[kind] / whole[kind] <= step.target.value
    else:
        assert set(ranks(outcome)) <= {r.name for r in step.survey(model, CONTEXT).layers}


def test_a_rank_of_a_rule_counts_towards_the_target() -> None:
    step = declared(target={"macs": 0.6}, layers=[{"match": "body", "rank": 5}])
    outcome = step.apply(pictures(), CONTEXT, {})
    found = ranks(outcome)
    assert found["body"] == 5
    assert len(found) > 1
    assert 0.58 < model_macs(outcome.carrier) / model_macs(pictures()) <= 0.6


@pytest.mark.parametrize(
    ("options", "slack"),
    [({"rank": 3}, 0.0), ({"rank": 0.4}, 0.0), ({"target": {"parameters": 0.7}}, 0.06)],
)
def test_a_preview_has_the_sizes_of_the_result(
    options: dict[str, Any], slack: float, tmp_path: Path
) -> None:
    step, model = declared(**options), pictures()
    planned = step.preview(model, CONTEXT, {})
    after = applied(step, model, tmp_path).carrier
    assert planned.offers == after.offers
    assert abs(model_bytes(planned) - model_bytes(after)) <= slack * model_bytes(model)
    assert planned.inputs == after.inputs
    if not slack:
        assert [x.shape for x in planned.layers()] == [x.shape for x in after.layers()]


def test_a_preview_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(TorchCarrier, "weight", refuse)
    monkeypatch.setattr("compressor.models.torch.carrier.Agreement", refuse)
    for options in ({"rank": 2}, {"energy": 0.8}, {"target": {"macs": 0.5}}):
        step = declared(**options)
        step.survey(pictures(), CONTEXT)
        assert Capability.TRAIN in step.preview(pictures(), CONTEXT, {}).offers


def test_an_energy_that_a_layer_cannot_save_with_leaves_it_whole() -> None:
    outcome = declared(energy=0.9999).apply(pictures(), CONTEXT, {})
    whole = [note for note in outcome.notes if "stays whole" in note]
    assert whole[0].startswith("layer 'stem' stays whole: energy 0.9999 takes rank 8 of 8, and ")
    assert "stem" not in ranks(outcome)
    assert ranks(outcome)


def test_more_energy_keeps_the_outputs_closer() -> None:
    images = pixels(seed=9)
    want = logits(pictures(), images)
    errors = [
        float(
            np.square(
                logits(declared(energy=e).apply(pictures(), CONTEXT, {}).carrier, images) - want
            ).sum()
        )
        for e in (0.5, 0.9, 0.999)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


@pytest.mark.parametrize("name", ["body", "narrow", "fc", "last"])
def test_weighted_changes_what_a_layer_computes_less(name: str, tmp_path: Path) -> None:
    """On images that calibration did not see, one layer at a time."""
    model = pictures()
    others = [{"match": x.name, "skip": True} for x in model.layers() if x.name != name]
    (tap,) = (x.output for x in model.layers() if x.name == name)
    batch = {"image": pixels(seed=9)}
    want = model.runner([tap]).run(batch)[tap]
    errors = []
    for weighted in (False, True):
        step = declared(rank=3, weighted=weighted, layers=others)
        (folder := tmp_path / str(weighted)).mkdir()
        after = applied(step, model, folder).carrier
        errors.append(float(np.square(after.runner([tap]).run(batch)[tap] - want).sum()))
    assert errors[1] < 0.9 * errors[0]


def test_layers_whose_inputs_are_not_seen_are_named() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.Conv1d(8, 8, 1), Mean())
    model = TorchCarrier(
        torch.nn.Sequential(*module, torch.nn.Linear(8, 8)),
        [TensorSpec("x", ("batch", 4, 9), "float32")],
    )
    survey = declared(rank=2, weighted=True).survey(model, CONTEXT)
    assert len(survey.requests) == 1
    assert survey.notes == ("not weighted, since calibration does not see their inputs: '0', '1'",)


class Mean(torch.nn.Module):
    """The mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(2)


@pytest.mark.parametrize("options", [{"rank": 4}, {"energy": 0.8}, {"target": {"macs": 0.5}}])
def test_carriers_agree_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    weights = drawn(20, 24, 16)
    found = []
    for model in (on_torch(weights), on_onnx(weights, tmp_path)):
        after = declared(**options).apply(model, CONTEXT, {}).carrier
        assert isinstance(after, type(model))
        found.append({x.name: x.canonical(after.weight(x)) for x in after.layers()})
    assert found[0].keys() == found[1].keys() >= {"up.down", "up.up"}
    for name, matrix in found[0].items():
        assert torch.equal(matrix, found[1][name]), name


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    step = declared(target={"macs": 0.5}, weighted=True)
    results = []
    for place in ("first", "second"):
        (folder := tmp_path / place).mkdir()
        after = applied(step, pictures(), folder).carrier
        results.append({name: t.read() for name, t in after.tensors().items()})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(t, results[1][name]) for name, t in results[0].items())


def test_an_onnx_graph_stays_one() -> None:
    model = OnnxCarrier(pictures().graph())
    outcome = declared(rank=3).apply(model, CONTEXT, {})
    assert isinstance(outcome.carrier, OnnxCarrier)
    assert not any("trained" in note for note in outcome.notes)
    module = declared(rank=3).apply(pictures(), CONTEXT, {}).carrier
    images = pixels(seed=4)
    np.testing.assert_allclose(logits(outcome.carrier, images), logits(module, images), atol=1e-5)


def test_the_module_is_compared_with_its_graph_on_calibration_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made-up values may mask everything: then any module agrees."""
    probes: list[Batch | None] = []

    class Watched(Agreement):
        def __init__(self, graph: ir.Model, inputs: Sequence[TensorSpec], probe: Batch | None):
            probes.append(probe)
            super().__init__(graph, inputs, probe)

    monkeypatch.setattr(carrier, "Agreement", Watched)
    given, model = Given(({"image": pixels()},)), pictures()
    for samples in (given, replace(given, made_up=True)):
        declared(rank=2).apply(model, replace(CONTEXT, samples=samples), {})
    on_samples, made_up = probes
    assert on_samples is not None
    np.testing.assert_array_equal(on_samples["image"], pixels()[:4])
    assert made_up is None
