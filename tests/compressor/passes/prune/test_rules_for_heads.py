"""prune-structured: which rule keeps the class of a module that cannot lose heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import remove_parametrizations

from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.prune.structured_models import declared, pruned

HALF = declared(target={"ratio": 0.5})


class Attending(nn.Module):
    """PyTorch's attention on what is an output, too, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


def test_a_rule_keeps_the_heads_that_a_module_cannot_lose():
    torch.manual_seed(0)
    model = TorchCarrier(Attending(), [TensorSpec("x", ("batch", 5, 12), "float32")])
    lost = pruned(HALF, model)
    assert lost.carrier.executes_graph
    (note,) = [text for text in lost.notes if "takes the place" in text]
    assert "which stay at 'attention': a module that executes the graph" in note
    assert "A rule that skips 'attention.*' keeps its heads" in note
    rules = [{"match": "attention.*", "skip": True}]
    kept = pruned(declared(target={"ratio": 0.5}, layers=rules), model).carrier
    assert type(kept.module) is Attending
    assert kept.module.up.out_features == 8


class Sloped(nn.Module):
    """Attention that computes a slope for each head, as ALiBi does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 4, 3
        self.query, self.key, self.value, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(-1, 5, self.heads, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        slopes = 2.0 ** -torch.arange(1, self.heads + 1).view(-1, 1, 1)
        distances = slopes * torch.arange(5).view(1, 1, 5)
        mixed = (q @ k.transpose(2, 3) + distances).softmax(3) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_a_rule_keeps_heads_for_which_forward_computes_numbers():
    torch.manual_seed(0)
    network = nn.Sequential(Sloped(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
    model = TorchCarrier(network, [TensorSpec("x", ("batch", 5, 12), "float32")])
    lost = pruned(HALF, model)
    assert lost.carrier.executes_graph
    (note,) = [text for text in lost.notes if "takes its place" in text]
    assert "forward computes numbers for the outputs of '0.query', other ones for each" in note
    assert "A rule that skips '0.query' keeps them" in note
    rules = [{"match": "0.query", "skip": True}]
    kept = pruned(declared(target={"ratio": 0.5}, layers=rules), model).carrier
    assert isinstance(kept.module[0], Sloped)
    assert kept.module[1].out_features == 8


def test_weights_that_are_computed_from_others_stay_once_they_are_weights():
    """A rule that skips the layer was advised, and the same advice came again."""
    torch.manual_seed(0)
    normed = spectral_norm(nn.Linear(12, 16))
    network = nn.Sequential(normed, nn.ReLU(), nn.Linear(16, 12)).eval()
    inputs = [TensorSpec("x", ("batch", 12), "float32")]
    lost = pruned(HALF, TorchCarrier(network, inputs))
    (note,) = [text for text in lost.notes if "takes its place" in text]
    assert note.startswith("the weights of '0' are computed from other tensors: a module that")
    remove_parametrizations(normed, "weight")
    kept = pruned(HALF, TorchCarrier(network, inputs)).carrier
    assert kept.module[0].out_features == 8
