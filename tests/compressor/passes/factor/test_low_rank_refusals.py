"""What low-rank refuses, and what it then says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compressor.errors import DataError, ModelError, SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.factor.low_rank_models import CONTEXT, declared, pictures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of rank, energy, target"),
        ({"rank": 2, "energy": 0.5}, "give one of rank, energy"),
        ({"rank": 2, "energy": 0.5, "target": {"macs": 0.5}}, "give one of rank, energy, target"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"rank": 1.5}, "less than or equal to 1"),
        ({"rank": 0.0}, "greater than 0"),
        ({"energy": 0.0}, "greater than 0"),
        ({"energy": 1.1}, "less than or equal to 1"),
        ({"target": {}}, "give one of macs, parameters"),
        ({"target": {"macs": 0.5, "parameters": 0.5}}, "give one of macs, parameters"),
        ({"target": {"macs": 1.0}}, "less than 1"),
        ({"target": {"macs": 0.0}}, "greater than 0"),
        ({"rank": 2, "layers": [{"match": "fc", "rank": 0}]}, "greater than or equal to 1"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        declared(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank": 2, "layers": [{"match": "sterm", "skip": True}]},
            r"layer rule 'sterm': matches no layer; did you mean 'stem'\?",
        ),
        (
            {"rank": 2, "layers": [{"match": "fc", "rank": 13}]},
            r"layer 'fc': its rule says rank 13, and its full rank is 12; give at most 7",
        ),
        ({"rank": 400}, "touches no layer: .*rank 400 is above its full rank"),
        ({"rank": 1.0}, "touches no layer: .*two layers are no smaller"),
        (
            {"energy": 0.5, "layers": [{"match": "*", "skip": True}]},
            r"touches no layer: 9 of 9: skipped by the rule '\*'",
        ),
    ],
)
def test_options_that_do_not_fit_the_model(options: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        declared(**options).survey(pictures(), CONTEXT)


def test_a_directory_of_transformers_cannot_state_two_layers(tmp_path: Path):
    network, x = nn.Linear(64, 64), TensorSpec("x", ("batch", 64), "float32")
    directory = PassContext(targets=frozenset({"compressed-tensors"}))
    declared(rank=2).survey(TorchCarrier(network, [x]), directory)
    model = TorchCarrier(network, [x], folder=tmp_path)
    declared(rank=2).survey(model, CONTEXT)
    with pytest.raises(SpecError, match=r"it splits layers, .*; use layout: graph$"):
        declared(rank=2).survey(model, directory)


@pytest.mark.parametrize("kind", ["macs", "parameters"])
@pytest.mark.parametrize("rules", [[], [{"match": "fc", "rank": 5}]])
def test_out_of_reach_says_what_is_reachable(kind: str, rules: list[dict[str, Any]]):
    message = rf"target.{kind}: is 0.01, and 0\.\d+ of the .* remain with every layer at rank 1"
    with pytest.raises(SpecError, match=message) as raised:
        declared(target={kind: 0.01}, layers=rules).survey(pictures(), CONTEXT)
    said = float(raised.value.remedy.split()[3])
    step = declared(target={kind: said}, layers=rules)
    step.survey(pictures(), CONTEXT)
    step.preview(pictures(), CONTEXT, {})
    step.apply(pictures(), CONTEXT, {})
    with pytest.raises(SpecError):
        declared(target={kind: said - 0.002}, layers=rules).survey(pictures(), CONTEXT)


class CalledOften(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(256, 256), nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.relu(self.inner(x))
        return self.head(x)


def test_what_cannot_be_reached_by_any_target_says_why():
    """Its message said to set the target to 1, which is refused."""
    model = TorchCarrier(CalledOften(), [TensorSpec("x", ("batch", 256), "float32")])
    with pytest.raises(SpecError, match=r"0\.999 of .* 'inner' stays whole \(its weight") as raised:
        declared(target={"macs": 0.5}).survey(model, CONTEXT)
    assert raised.value.remedy.startswith("prune or quantize")


def test_an_energy_with_which_nothing_is_smaller():
    torch.manual_seed(0)
    model = TorchCarrier(nn.Linear(8, 8), [TensorSpec("x", ("batch", 8), "float32")])
    with pytest.raises(SpecError, match=r"touches no layer: layer 'weight' stays whole: energy 1"):
        declared(energy=1.0).apply(model, CONTEXT, {})


def test_weighted_needs_a_model_that_runs_and_data():
    step = declared(rank=2, weighted=True)
    assert Capability.RUN in step.required
    assert Capability.RUN not in declared(rank=2).required
    survey = step.survey(pictures(), CONTEXT)
    assert step.by_block
    assert survey.requests
    with pytest.raises(SpecError, match="weighted: needs calibration data"):
        step.apply(pictures(), CONTEXT, {})


def test_weighted_without_an_input_that_is_seen():
    model = TorchCarrier(nn.Conv1d(4, 8, 3), [TensorSpec("x", ("batch", 4, 9), "float32")])
    with pytest.raises(SpecError, match="calibration sees the input of no layer"):
        declared(rank=2, weighted=True).survey(model, CONTEXT)


class Empty:
    """A block in which nothing was observed."""

    statistics: ClassVar[dict[str, Any]] = {}

    def __init__(self, carrier: Carrier) -> None:
        self.weights = tuple(layer.weight for layer in carrier.layers())


def test_calibration_that_found_nothing():
    model = pictures()
    with pytest.raises(DataError, match="layer 'stem': calibration found nothing about its input"):
        declared(rank=2, weighted=True).apply(model, replace(CONTEXT, blocks=[Empty(model)]), {})


def test_weights_that_are_not_finite():
    broken = torch.full((20, 12), torch.nan)
    model = pictures().with_weights({"fc.weight": broken})
    with pytest.raises(ModelError, match="layer 'fc': its weight holds values that are NaN"):
        declared(rank=2).apply(model, CONTEXT, {})


class Odd(nn.Module):
    """A table whose weight is also multiplied, a shared layer, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.twice = nn.Linear(16, 16)
        self.scaled = nn.Parameter(torch.randn(16, 16))
        self.own = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.own(self.twice(torch.relu(self.twice(self.table(x)))))
        return (h @ (self.scaled * 2)) @ self.table.weight.T


def test_shared_weights_and_tables_stay_whole():
    model = TorchCarrier(Odd(), [TensorSpec("x", ("batch", "time"), "int64")])
    rows = {row.name: row.reason for row in declared(rank=2).survey(model, CONTEXT).layers}
    (computed,) = (name for name in rows if name.startswith("mul"))
    assert rows == {
        computed: "",
        "table": "a table is looked up, not multiplied",
        "twice": "its weight is computed, or read by others as well",
        "own": "",
    }


def test_quantized_layers_stay_whole(tmp_path: Path):
    quantize = QuantizeWeights.model_validate(
        {"bits": 8, "layers": ({"match": "fc", "skip": True},)}
    )
    coded = quantize.apply(pictures(), CONTEXT, {}).carrier
    step = declared(rank=2)
    rows = {row.name: row for row in step.survey(coded, CONTEXT).layers}
    assert rows["body"].reason == "its weight is int8"
    assert [name for name, row in rows.items() if row.touched] == ["fc"]
    after = step.apply(coded, CONTEXT, {}).carrier
    assert {"fc.down", "fc.up", "body"} <= {layer.name for layer in after.layers()}
    assert Capability.TRAIN not in after.offers
