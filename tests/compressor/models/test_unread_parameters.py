"""Parameters that a module's graph does not read, where channels are removed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.smaller_module import with_unread
from compressor.types.tensors import TensorSpec
from tests.compressor.models.smaller_modules import Free, shaken, smaller

ROWS = {"x": np.linspace(-2, 2, 30, dtype=np.float32).reshape(5, 6)}


class TrainedOnly(Free):
    """Has a parameter that is read in training, and a layer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = nn.Parameter(torch.arange(8.0))
        self.aside = nn.Linear(8, 8)
        self.pooler = nn.Sequential(nn.Linear(8, 8))

    def hidden(self, x: Tensor) -> Tensor:
        y = super().hidden(x)
        self.pooler(y)  # nothing is made of it
        return y + self.masked if self.training else y


def test_parameters_for_training_follow_what_is_around_them() -> None:
    after = smaller(shaken(TrainedOnly()), 1, 3, 4, 7)
    assert not after.executes_graph
    whole = shaken(TrainedOnly())
    assert torch.equal(after.module.masked, whole.masked[[1, 3, 4, 7]])
    assert torch.equal(after.module.aside.weight, whole.aside.weight)
    rows = whole.pooler[0].weight[[1, 3, 4, 7]]
    assert torch.equal(after.module.pooler[0].weight, rows[:, [1, 3, 4, 7]])
    after.module.train()(torch.from_numpy(ROWS["x"]))  # not of the whole width


class Pooled(nn.Module):
    """A stream as wide as the inner channels of its layers, and a pooler that gives nothing."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(blocks))
        self.pooler = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        self.pooler(x)
        return x


def test_what_a_stream_of_the_same_width_keeps_stays() -> None:
    """As many axes lose channels as keep all: BERT's pooler was cut like its heads."""
    units = np.array([0, 2, 5])
    module, inputs = Pooled(2), (TensorSpec("x", ("batch", 8), "float32"),)
    kept = {f"ups.{i}.weight": {0: units} for i in range(2)}
    kept |= {f"downs.{i}.weight": {1: units} for i in range(2)}
    read = TorchCarrier(module, inputs).graph().graph.initializers
    assert "pooler.weight" not in read
    assert with_unread(module, kept, read, inputs) == kept
    narrow = {f"{name}.{i}.weight": {0: units, 1: units} for i in range(2) for name in ("ups",)}
    narrow |= {f"downs.{i}.weight": {1: units} for i in range(2)}
    cut = with_unread(module, narrow, read, inputs)
    assert cut["pooler.weight"].keys() == {0, 1}
    assert cut["pooler.bias"][0].tolist() == [0, 2, 5]
