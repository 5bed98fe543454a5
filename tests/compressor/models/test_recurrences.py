"""Recurrent layers of PyTorch become one operator each, for sequences of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import TensorSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),  # is slower
    pytest.mark.usefixtures("lowered_each_time"),
]

X = TensorSpec("x", ("batch", "time", 5), "float32")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("RNN", {}),
    "relu, both ways, deep": (
        "RNN",
        {"nonlinearity": "relu", "bidirectional": True, "num_layers": 2},
    ),
    "no biases": ("RNN", {"bias": False, "num_layers": 2}),
    "projected": ("LSTM", {"proj_size": 3}),
    "projected, both ways, deep": (
        "LSTM",
        {"proj_size": 3, "bidirectional": True, "num_layers": 2, "bias": False},
    ),
    "usual": ("LSTM", {"num_layers": 2}),
}


class Reader(nn.Module):
    """A layer with all that it returns; with ``own``, it starts with a state of its own."""

    def __init__(self, kind: str, options: dict[str, Any], *, own: bool = False):
        super().__init__()
        first = not options.get("bidirectional")
        self.first = first
        self.layer = getattr(nn, kind)(5, 4, batch_first=first, **options)
        self.own = own

    def forward(self, x: Tensor) -> Any:
        given = x if self.first else x.transpose(0, 1)
        if not self.own:
            return self.layer(given)
        return self.layer(given, (x.new_ones(1, len(x), 3), x.new_zeros(1, len(x), 4)))


QUICK = {"plain", "relu, both ways, deep", "projected, both ways, deep"}


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_a_layer_gives_what_pytorch_gives(kind: str) -> None:
    torch.manual_seed(0)
    name, options = KINDS[kind]
    carrier = TorchCarrier(Reader(name, options), [X])
    nodes = [node.op_type for node in carrier.graph().graph]
    assert nodes.count(name) == options.get("num_layers", 1)
    runner = carrier.runner()
    for batch, time in ((1, 1), (2, 7), (3, 4)):
        x = np.random.default_rng(time).standard_normal((batch, time, 5)).astype(np.float32)
        have, want = runner.run({"x": x}).values(), carrier.module_outputs({"x": x})
        for ours, theirs in zip(have, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_projections_with_a_state_to_start_with_are_refused() -> None:
    with pytest.raises(ModelError, match="projections that starts with a state of its own"):
        TorchCarrier(Reader("LSTM", {"proj_size": 3}, own=True), [X]).graph()
