"""Recurrent layers begin at zero without being given zeros."""

import numpy as np
import pytest
import torch
from torch import nn


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


GRU = """
g (float[T, N, 4] x) => (float[T, 1, N, 3] y) {
  shape = Shape(x) one = Constant<value_ints = [1]>() three = Constant<value_ints = [3]>()
  two = Constant<value_ints = [2]>() batch = Slice(shape, one, two)
  lengths = Concat<axis=0>(one, batch, three)
  h = ConstantOfShape<value = float[1] {%s}>(lengths)
  y, last = GRU<hidden_size=3>(x, w, v, , , h)
}
"""


@pytest.mark.parametrize(("fill", "left"), [("0.0", {}), ("0.5", {"ConstantOfShape": 1})])
def test_zeros_are_not_computed_as_first_states(fill, left, parse, fuse, agree, ops, rng):
    weights = {"w": normal(rng, 1, 9, 4), "v": normal(rng, 1, 9, 3)}
    model = parse(GRU % fill, weights)
    fused = fuse(model).carrier.model
    assert ops(fused).keys() & {"GRU", "ConstantOfShape"} == {"GRU", *left}
    if not left:
        assert ops(fused) == {"GRU": 1}
    agree(model, fused, {"x": normal(rng, 5, 2, 4)}, 1e-6)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 5, batch_first=True)

    def forward(self, x):
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        return x


def test_layers_of_pytorch_become_little_but_themselves(lower, fuse, agree, ops, rng):
    """PyTorch expands and slices its zeros, and transposes an axis of one direction."""
    torch.manual_seed(0)
    dynamic = ({0: torch.export.Dim("batch")},)
    model = lower(Recurrent(), (torch.zeros(2, 7, 4),), dynamic)
    fused = fuse(model, kind="torch").carrier.model
    counts = ops(fused)
    assert counts.keys() == {"LSTM", "GRU", "Transpose", "Reshape"}
    assert counts["Transpose"] == 3
    agree(model, fused, {"x": normal(rng, 3, 7, 4)}, 1e-6)
