"""Rows of the plan's table for layers that only a pass makes, as fuse makes those of an LSTM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.train.qat.networks import placeholders
from compressor.passes.train.qat.qat import Qat
from compressor.run.layer_rows import LayerRow, layer_rows
from compressor.types.carrier import Carrier
from compressor.types.passes import Pass, PassContext
from compressor.types.tensors import TensorSpec

CONTEXT = PassContext(0, frozenset({"ort-cpu"}), "mse")
RECURRENT = ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, past: Tensor) -> Tensor:
        forecast: Tensor = self.head(self.lstm(past)[0][:, -1])
        return forecast


def planned(*steps: Pass) -> dict[str, LayerRow]:
    torch.manual_seed(0)
    whole = TorchCarrier(Forecaster().eval(), (TensorSpec("past", ("n", 5, 6), "float32"),))
    carrier: Carrier = whole
    previews, plans = [], []
    for step in steps:
        survey = step.survey(carrier, CONTEXT)
        plans.append(survey.layers)
        carrier = step.preview(carrier, CONTEXT, placeholders(survey.requests))
        previews.append(carrier)
    return {row.name: row for row in layer_rows(whole, previews, plans)}


def test_a_layer_that_a_pass_makes_has_a_row_behind_the_others():
    rows = planned(Fuse(), QuantizeDynamic())
    assert list(rows) == ["head", *RECURRENT]
    for name in RECURRENT:
        assert rows[name].actions[0] == "-"
        assert rows[name].actions[1].startswith("int8")
    inputs = rows[RECURRENT[0]]
    assert inputs.bytes_before == 4 * 64 * 6
    assert 64 * 6 <= inputs.bytes_after < inputs.bytes_before / 2


@pytest.mark.parametrize("steps", [(Qat(),), (Fuse(), Qat())])
def test_qat_keeps_recurrent_layers_and_says_so(steps: tuple[Pass, ...]):
    rows = planned(*steps)
    assert list(rows) == ["head", *RECURRENT]
    assert rows["head"].actions[-1].endswith("trained")
    for name in RECURRENT:
        assert rows[name].actions[-1] == "keep"
        assert rows[name].reasons[-1].startswith("not trained; quantize-static behind it")
        assert rows[name].bytes_after == rows[name].bytes_before
