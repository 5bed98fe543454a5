"""Activations computed again in backward: the same result, and less of them kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.altered_modules import checkpoint_blocks
from compressor.passes.train.finetune import Finetune
from compressor.types.passes import PassContext
from tests.compressor.passes.train.small_training import INPUTS, training


class Blocks(nn.Module):
    """Linear blocks in a list, and a head."""

    def __init__(self, norm: bool = False):
        super().__init__()
        norms = (nn.BatchNorm1d(72) if norm else nn.Dropout(0.2) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(72, 72), n, nn.ReLU()) for n in norms)
        self.head = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        x = x.flatten(1)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found


def trained(folder: Path, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    start = TorchCarrier(Blocks(), INPUTS)
    weight = start.module.state_dict()["blocks.1.0.weight"].clone()
    weight[:, ::2] = 0
    start = start.with_weights({"blocks.1.0.weight": weight})
    chosen = Finetune.model_validate({"steps": 6, "learning_rate": 0.01, **options})
    context = PassContext(seed=1, metric="accuracy")
    outcome = chosen.apply_training(start, context, {}, training(folder, start))
    assert isinstance(outcome.carrier, TorchCarrier)
    return dict(outcome.carrier.module.state_dict())


def test_the_result_is_the_same(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain")
    again = trained(tmp_path / "again", checkpointing=True, layers=())
    assert plain.keys() == again.keys()
    for name, tensor in plain.items():
        assert torch.equal(again[name], tensor), name
    assert not again["blocks.1.0.weight"][:, ::2].any()  # masks and names survive the wrapping


def test_blocks_keep_their_inputs_alone() -> None:
    def kept(module: nn.Module) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.ones(8, 2, 6, 6))
        return sum(sizes)

    wrapped = Blocks()
    checkpoint_blocks(wrapped)
    assert kept(wrapped) < 0.5 * kept(Blocks())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Blocks(norm=True), "batch norms, whose statistics would be updated twice"),
        (nn.Linear(2, 2), "no list of blocks"),
    ],
)
def test_what_cannot_be_done_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checkpoint_blocks(module)
