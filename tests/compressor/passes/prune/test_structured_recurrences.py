"""Hidden units of recurrent layers removed from a module: it stays what it is, and reloads."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.tensors import Batch, TensorSpec
from tests.compressor.models.smaller_modules import shaken
from tests.compressor.passes.prune.structured_models import CONTEXT, Given, declared, pruned
from tests.zoo_pruning import opened_export, reload_errors, worst

INPUTS = (TensorSpec("x", ("batch", "time", 5), "float32"),)
HALF = declared(target={"ratio": 0.5})


class Listener(nn.Module):
    """A stack of two LSTMs, and a GRU of whose states the last one is read."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.gru = nn.GRU(6, 10, batch_first=True, bias=False)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        heard, _ = self.lstm(torch.relu(self.entry(x)))
        _, state = self.gru(heard)
        logits: Tensor = self.head(state[0])
        return logits


def batch(seed: int = 0) -> Batch:
    return {"x": np.random.default_rng(seed).standard_normal((3, 7, 5)).astype(np.float32)}


@cache
def whole() -> TorchCarrier:
    return TorchCarrier(shaken(Listener()), INPUTS)


@cache
def halved() -> Carrier:
    outcome = pruned(HALF, whole(), Given((batch(1),)))
    assert any("12 removed units were proved on calibration data" in n for n in outcome.notes)
    return outcome.carrier


def test_the_module_keeps_its_class_and_all_layers_one_state() -> None:
    small = halved()
    assert isinstance(small, TorchCarrier)
    assert not small.executes_graph
    assert isinstance(small.module, Listener)
    lstm, gru = small.module.lstm, small.module.gru
    assert (lstm.input_size, lstm.hidden_size, gru.input_size, gru.hidden_size) == (4, 3, 3, 5)
    assert lstm.weight_ih_l1.shape == (12, 3)
    assert small.module.head.in_features == 5


@pytest.mark.slow
def test_a_second_recurrent_module_is_lowered_with_any_length() -> None:
    """The smaller module, as any other; its sequences are longer than the first one's."""
    small = halved()
    assert isinstance(small, TorchCarrier)
    again = TorchCarrier(small.module, INPUTS)
    longer = {"x": np.ones((2, 11, 5), np.float32)}
    assert worst(again.runner().run(longer), small.runner().run(longer)) < 1e-6


def test_artifacts_and_the_file_reload(tmp_path: Path) -> None:
    errors = reload_errors(halved(), batch(), tmp_path)
    assert set(errors) == {"safetensors", "onnx", "load", "module"}
    assert max(errors.values()) < 1e-6
    file = opened_export(whole(), tmp_path / "file")
    outputs = pruned(HALF, file, Given((batch(1),))).carrier.runner().run(batch())
    assert worst(outputs, halved().runner().run(batch())) < 1e-6


def test_a_target_counts_the_work_of_recurrences() -> None:
    step = declared(target={"macs": 0.5})
    rows = {row.name: row for row in step.survey(whole(), CONTEXT).layers}
    assert rows["entry"].touched
    note = next(n for n in pruned(step, whole(), Given((batch(1),))).notes if "MACs" in n)
    entry, heads = 5 * 8, 10 * 3
    stacked = 24 * (8 + 6) + 24 * (6 + 6)
    assert f"MACs {entry + heads + stacked + 30 * (6 + 10):,} -> " in note


class Projected(nn.Module):
    """Recurrent layers whose weights are stacked and multiplied until ``fuse`` has folded them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.RNN(5, 8, nonlinearity="relu", batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(16, 6, proj_size=4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heard, (state, _) = self.lstm(self.both(x)[0])
        return self.head(heard[:, -1]), state[0]


def test_units_that_no_layer_writes_are_planned_and_removed() -> None:
    carrier = TorchCarrier(shaken(Projected()), INPUTS)
    rows = {row.name: row for row in HALF.survey(carrier, CONTEXT).layers}
    assert {name for name, row in rows.items() if row.touched} == {
        "both.weight_ih_l0",
        "lstm.weight_ih_l0",
    }
    assert rows["both.weight_ih_l0"].action == "4 of 8 channels"
    graph = pruned(HALF, carrier, Given((batch(1),))).carrier.graph().graph
    units = {n.op_type: n.attributes.get_int("hidden_size") for n in graph}
    assert (units["RNN"], units["LSTM"]) == (4, 3)
