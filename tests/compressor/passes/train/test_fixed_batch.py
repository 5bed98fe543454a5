"""Trainings of models that take whole batches only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.distill.distill import Distill
from compressor.passes.train.job import Order
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.train.small_training import Small, SmallData, small, training
from tests.compressor.passes.train.test_finetune import tuned

BATCH = 8


class Fixed(Small):
    """A network whose forward names the size of its batch, as many an exported one does."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[8, 2, 6, 6]`` to logits."""
        return super().forward(x.reshape(BATCH, 2, 6, 6))


def fixed() -> TorchCarrier:
    torch.manual_seed(7)
    return TorchCarrier(Fixed(), (TensorSpec("x", (BATCH, 2, 6, 6), "float32"),))


def test_held_out_samples_need_not_fill_a_batch(tmp_path: Path) -> None:
    """Thirteen of them ended in an internal error after the first epoch."""
    data = SmallData(53, noisy=False)
    outcome = tuned(tmp_path, fixed(), data=data, validation=0.25, steps=20)
    assert outcome.training is not None
    found = dict(outcome.training["validations"])
    rows = Order(53, BATCH, 3, 0.25).validation
    assert len(rows) == 13
    assert isinstance(outcome.carrier, TorchCarrier)
    alike = small().module.eval()
    alike.load_state_dict(outcome.carrier.module.state_dict())
    with torch.no_grad():
        chosen = alike(torch.from_numpy(data.images[rows])).argmax(1).numpy()
    hits = 100 * float(np.mean(chosen == data.labels[rows]))
    assert found[outcome.training["best_step"]] == pytest.approx(hits), "each of them counts once"


def test_a_teacher_gets_whole_batches_too(tmp_path: Path) -> None:
    """Its outputs of all samples are computed before the first step."""
    data = SmallData(43, noisy=False)
    chosen = Distill.model_validate({"epochs": 3, "validation": 0.25, "cache": True})
    given = training(tmp_path, fixed(), data=data)
    outcome = chosen.apply_training(fixed(), PassContext(seed=3, metric="accuracy"), {}, given)
    assert any("read from the cache" in note for note in outcome.notes)
