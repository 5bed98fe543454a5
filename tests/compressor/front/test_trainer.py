"""The Trainer of ``transformers`` as the loop: it saves states with safetensors, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compressor
from compressor import PreparedModule

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 10, (32, 6), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.amax(1)
PRUNED = {"loss": "cross-entropy", "prune": {"target": 0.5, "every": 1}, "steps": 8}


class Tied(nn.Module):
    """Its output layer has the weight of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 10, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.out(self.inner(self.table(tokens).mean(1)).relu())
        return made


def prepared_for(keys: dict[str, Any]) -> PreparedModule:
    torch.manual_seed(0)
    return compressor.prepare(Tied(), [keys], (TOKENS, LABELS))


def trainer_of(prepared: PreparedModule, folder: Path, steps: int) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, remove_unused_columns=False, use_cpu=True, disable_tqdm=True,
        save_steps=4, report_to="none", learning_rate=0.01, lr_scheduler_type="constant",
    )  # fmt: skip
    return transformers.Trainer(
        model=prepared,
        args=arguments,
        train_dataset=[{"tokens": t, "labels": y} for t, y in zip(TOKENS, LABELS, strict=True)],
        compute_loss_func=lambda _, labels, **__: prepared.loss(labels),
    )


@pytest.mark.parametrize(
    "keys", [{"pass": "qat", "loss": "cross-entropy"}, {"pass": "finetune", **PRUNED}]
)
def test_what_the_trainer_saved_goes_on_as_if_it_had_not_stopped(
    keys: dict[str, Any], tmp_path: Path
):
    whole, first, second = (prepared_for(keys) for _ in range(3))
    trainer_of(whole, tmp_path / "whole", 8).train()
    trainer_of(first, tmp_path / "parts", 4).train()
    trainer_of(second, tmp_path / "parts", 8).train(resume_from_checkpoint=True)
    states = whole.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if "prune" in keys:
        weight = second.get_parameter("network.module.inner.weight")
        assert int((weight == 0).sum()) == weight.numel() // 2
