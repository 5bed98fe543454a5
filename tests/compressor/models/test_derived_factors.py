"""Factors that a class makes of the size of heads, when a head loses channels."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.smaller_module import random_batch
from compressor.types.tensors import TensorSpec
from tests.compressor.models.smaller_modules import Kept, at, lowered_cut, shaken, worst

INPUTS = (TensorSpec("x", ("batch", 5, 16), "float32"),)
HALF = at(0, 1, 4, 6, 9, 10, 13, 15)
"""Eight of sixteen channels."""
KEPT: Kept = {f"{name}.{own}": {0: HALF} for name in ("query", "key") for own in ("weight", "bias")}


class Stored(nn.Module):
    """Attention of one head, with a factor that it made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.key, self.query = (nn.Linear(16, 16) for _ in range(3))
        self.head_dim = 16
        self.scaling = self.head_dim**-0.5

    def factor(self) -> float:
        return self.scaling

    def forward(self, x: Tensor) -> Tensor:
        query, key = (f(x).view(-1, 5, 1, self.head_dim) for f in (self.query, self.key))
        scores = torch.einsum("bihc,bjhc->bij", query, key) * self.factor()
        mixed: Tensor = scores.softmax(2) @ self.value(x)
        return mixed


class Computed(Stored):
    """The same, with a factor that it makes as it runs."""

    def factor(self) -> float:
        return self.head_dim**-0.5


class Squared(Stored):
    """The same, with a factor that is no root of a size."""

    def factor(self) -> float:
        return 4 / self.head_dim**2 * 16


def smaller(kind: type[Stored]) -> TorchCarrier:
    torch.manual_seed(3)
    module = shaken(kind())
    whole = Stored().eval()
    whole.load_state_dict(module.state_dict())
    graph = lowered_cut(whole, INPUTS, KEPT, {"": {"head_dim": 8}})  # divides by the old root
    carrier = TorchCarrier(module, INPUTS).with_channels(graph, KEPT)
    assert isinstance(carrier, TorchCarrier)
    assert disagreement(carrier, graph) < 1e-5
    return carrier


def disagreement(carrier: TorchCarrier, graph: ir.Model) -> float:
    batch = random_batch(INPUTS)
    (wanted,) = graph_runner(graph).run(batch).values()
    return worst(carrier.module_outputs(batch)[0], wanted)


@pytest.mark.parametrize("kind", [Stored, Computed])
def test_a_layer_in_the_product_takes_up_the_changed_factor(
    kind: type[Stored], tmp_path: Path
) -> None:
    carrier = smaller(kind)
    assert isinstance(carrier.module, kind)
    assert carrier.module.head_dim == 8
    assert carrier.module.factor() == 8**-0.5
    before = shaken(kind())
    torch.testing.assert_close(carrier.module.key.bias, before.key.bias[HALF] * 0.5**0.5)
    assert torch.equal(carrier.module.query.bias, before.query.bias[HALF])
    assert torch.equal(carrier.module.value.weight, before.value.weight)  # was tried before
    torch.manual_seed(3)
    carrier.save(tmp_path)
    again = TorchCarrier(shaken(kind()), INPUTS).restore(tmp_path)
    assert isinstance(again, TorchCarrier)
    assert isinstance(again.module, kind)
    assert again.module.factor() == 8**-0.5
    assert torch.equal(again.module.key.weight, carrier.module.key.weight)
    assert disagreement(again, carrier.graph()) < 1e-6


def test_a_factor_of_another_form_leaves_the_class() -> None:
    assert smaller(Squared).executes_graph
