"""Weights of 16 bits are moved as float32 copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.master_weights import step_in_float32
from compressor.types.tensors import Batch
from compressor.types.training import Rows
from tests.compressor.passes.train.small_training import INPUTS, Small, SmallData
from tests.compressor.passes.train.test_finetune import Killed, ending_at, same, state, tuned


def test_steps_are_those_of_float32() -> None:
    """Each of these steps alone is too small for bfloat16 to show."""
    generator = torch.Generator().manual_seed(0)
    narrow = torch.nn.Parameter(torch.randn(4, 3, generator=generator).bfloat16())
    wide = torch.nn.Parameter(narrow.detach().float())
    optimizers = [torch.optim.AdamW([p], lr=1e-4) for p in (narrow, wide)]
    for optimizer in optimizers:
        step_in_float32(optimizer)
    for _ in range(60):
        narrow.grad = torch.randn(4, 3, generator=generator).bfloat16()
        wide.grad = narrow.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(narrow, wide.bfloat16())
    with torch.no_grad():  # as pruning does
        narrow[0], wide[0] = 0, 0
    narrow.grad, wide.grad = torch.ones(4, 3).bfloat16(), torch.ones(4, 3)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(narrow, wide.bfloat16())


class Halves(SmallData):
    """The same images in float16."""

    def batch(self, rows: Rows, seed: Any) -> Batch:
        """Return samples."""
        batch = super().batch(rows, seed)
        return {**batch, "x": batch["x"].astype(np.float16)}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_module_of_float16_is_trained_and_resumed(tmp_path: Path, optimizer: str) -> None:
    """AdamW divided by squares that are zero in float16: the second loss was NaN."""
    torch.manual_seed(7)
    inputs = [replace(INPUTS[0], dtype="float16")]
    module = Small(dropout=0.0).half()
    options = {"optimizer": optimizer, "learning_rate": 0.01, "save_every": 1, "data": Halves()}

    def trained(name: str, **others: Any) -> dict[str, torch.Tensor]:
        outcome = tuned(tmp_path / name, TorchCarrier(module, inputs), **options, **others)
        return state(outcome)

    whole = trained("whole")
    assert whole["conv.weight"].dtype == torch.float16
    assert not torch.equal(whole["conv.weight"], module.conv.weight)
    with pytest.raises(Killed):
        trained("broken", stage=ending_at(5, "killed"))
    assert same(trained("broken"), whole)
