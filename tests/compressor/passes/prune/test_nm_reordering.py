"""prune-nm with permute: the same function in another order, and channels that must stay."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.graph.channels.analysis import map_channels
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.sparse.passes import PruneNm, PruneSparsegpt, PruneWanda
from compressor.passes.prune.sparse.patterns import n_of_m
from compressor.passes.prune.sparse.reordering import find_orders, plan_orders
from compressor.types.carrier import Carrier
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.prune.sparse_models import (
    ANY,
    IMAGE,
    TOKENS,
    applied,
    batches,
    reasons,
    weights,
)

TWO_OF_FOUR = n_of_m(2, 4)


class Residual(nn.Module):
    """Convolutions with batch-norm around a sum, one of them depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.first = nn.Conv2d(16, 24, 3, padding=1)
        self.depth = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.second = nn.Conv2d(24, 16, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(image)))
        x = x + self.second(torch.relu(self.depth(torch.relu(self.first(x)))))
        return self.fc(x.mean((2, 3)))


class Gated(nn.Module):
    """A residual stream with layer norms and a gated MLP, between a table and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(19, 24)
        self.norm = nn.LayerNorm(24)
        self.gate, self.up = nn.Linear(24, 32), nn.Linear(24, 32, bias=False)
        self.down = nn.Linear(32, 24)
        self.last = nn.LayerNorm(24)
        self.lm_head = nn.Linear(24, 19, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        y = self.norm(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return self.lm_head(self.last(x))


class Plain(nn.Module):
    """Layers one after another; behind ``flatten`` a channel lies at many places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 12, 2, stride=2)
        self.down = nn.Conv2d(12, 4, 3, stride=2, padding=1)
        self.fc = nn.Linear(64, 32)
        self.mid = nn.Linear(32, 32)
        self.last = nn.Linear(32, 6)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.down(torch.relu(self.up(torch.relu(self.conv(image))))))
        return self.last(torch.tanh(self.mid(torch.relu(self.fc(x.flatten(1))))))


class Divided(nn.Module):
    """Channels whose halves go different ways, and a convolution with groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.split = nn.Conv2d(16, 16, 1)
        self.fc = nn.Linear(16, 8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.grouped(torch.relu(self.conv(image))))
        left, right = self.split(x).chunk(2, 1)
        return self.fc(torch.cat([torch.relu(left), right], 1).mean((2, 3)))


class Divisors(nn.Module):
    """Channels divided by themselves, by numbers of their own, and by what they add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(19, 24)
        self.up = nn.Linear(24, 32)
        self.norm = nn.Parameter(torch.ones(32))
        self.mid = nn.Linear(32, 16)
        self.down = nn.Linear(16, 24)
        self.lm_head = nn.Linear(24, 19, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        u = self.up(x)
        y = torch.sigmoid(self.mid(torch.tanh(u) / u / self.norm))
        return self.lm_head(x + self.down(y / y.sum(-1, keepdim=True)))


NETS: dict[type[nn.Module], TensorSpec] = {
    Residual: IMAGE,
    Gated: TOKENS,
    Plain: IMAGE,
    Divisors: TOKENS,
}


@cache
def skewed(build: type[nn.Module], spec: TensorSpec) -> TorchCarrier:
    """Neighbouring channels are alike in size, which is the worst for groups."""
    torch.manual_seed(3)
    module = build()
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if parameter.ndim > 1:
            sizes = torch.linspace(0.1, 2, parameter.shape[1]).reshape(
                -1, *[1] * (parameter.ndim - 2)
            )
            parameter.data = torch.randn(parameter.shape) * sizes / parameter[0].numel() ** 0.5
        elif parameter.is_floating_point():
            parameter.data = torch.rand(parameter.shape) + (0.5 if "norm" in name else -0.5)
    return TorchCarrier(module, [spec])


def outputs(model: Carrier, spec: TensorSpec) -> np.ndarray:
    return next(iter(model.runner().run(batches(spec, 1, seed=5)[0]).values()))


def reordered_only(model: TorchCarrier) -> tuple[Carrier, set[str]]:
    """Reorder as the pass would, and prune nothing."""
    declared = PruneNm(permute=True)
    touched = [row.name for row in declared.survey(model, ANY).layers if row.touched]
    orders = plan_orders(model, dict.fromkeys(touched, TWO_OF_FOUR))
    found = find_orders(model, orders)
    stored = model.tensors()
    changes = {name: found.applied(name, stored[name].read()) for name in found.axes}
    return model.with_weights(changes), set(found.channels)


@pytest.mark.parametrize("build", NETS)
def test_reordering_alone_leaves_the_function_as_it_is(build: type[nn.Module]):
    model, spec = skewed(build, NETS[build]), NETS[build]
    other, layers = reordered_only(model)
    assert len(layers) >= 2
    assert any(not torch.equal(weights(model)[n], weights(other)[n]) for n in layers)
    np.testing.assert_allclose(outputs(other, spec), outputs(model, spec), rtol=1e-4, atol=1e-5)
    assert isinstance(other, TorchCarrier)
    with torch.inference_mode():
        batch = torch.from_numpy(next(iter(batches(spec, 1, seed=5)[0].values())))
        np.testing.assert_allclose(other.module(batch), model.module(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", NETS)
def test_reordered_layers_are_sparse_and_keep_more(tmp_path: Path, build: type[nn.Module]):
    model = skewed(build, NETS[build])
    fixed = applied(PruneNm(), model, tmp_path)
    moved = applied(PruneNm(permute=True), model, tmp_path)
    before, after = (
        sum(float(w.abs().sum()) for w in weights(x.carrier).values()) for x in (fixed, moved)
    )
    assert after > 1.02 * before
    for layer in moved.carrier.layers():
        if layer.name in {x.name for x in moved.layers} and layer.kind != "ConvTranspose":
            weight = moved.carrier.weight(layer)
            grouped = weight.reshape(weight.shape[0], -1, 4, *weight.shape[2:])
            assert int(grouped.count_nonzero(dim=2).max()) == 2, layer.name
    assert "change places" in moved.notes[1]


@pytest.mark.parametrize("criterion", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("build", [Residual, Gated])
def test_it_is_what_pruning_the_reordered_model_gives(
    tmp_path: Path, build: type[nn.Module], criterion: Any
):
    """Statistics are those of the model before; they count for the channels' new places."""
    model = skewed(build, NETS[build])
    at_once = applied(PruneNm(criterion=criterion, permute=True), model, tmp_path)
    reordered, _ = reordered_only(model)
    assert isinstance(reordered, TorchCarrier)
    after = applied(PruneNm(criterion=criterion), reordered, tmp_path)
    want, found = weights(after.carrier), weights(at_once.carrier)
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-3, atol=1e-4)


def test_channels_that_stay_say_why():
    found = reasons(PruneNm(permute=True), skewed(Plain, IMAGE))
    assert found["conv"] == "3 input channels do not divide into groups of 4"
    assert found["fc"].startswith("channels stay: they ")
    assert found["mid"] == found["up"] == ""
    found = reasons(PruneNm(permute=True), skewed(Divided, IMAGE))
    assert found["grouped"].startswith("channels stay: ")
    assert found["fc"].startswith("channels stay: ")
    assert found["split"].startswith("channels stay: ") or found["split"] == ""


def test_channels_that_go_different_ways_do_not_meet():
    """Whatever the map finds in it, the function stays."""
    model = skewed(Divided, IMAGE)
    other, _ = reordered_only(model)
    np.testing.assert_allclose(outputs(other, IMAGE), outputs(model, IMAGE), rtol=1e-4, atol=1e-5)


def test_operators_that_add_channels_up_or_divide_by_them_let_them_change_places():
    model = skewed(Divisors, TOKENS)
    assert {g.mixed for g in map_channels(model.graph()).groups} >= {"Div", "ReduceSum"}
    found = reasons(PruneNm(permute=True), model)
    assert found["up"] == found["mid"] == found["down"] == ""


def test_it_needs_a_graph():
    assert "graph" in PruneNm(permute=True).required
    assert "graph" in PruneNm(permute=True).required - CheckpointCarrier.offers


def test_unlike_patterns_of_readers_keep_channels_where_they_are():
    declared = PruneNm.model_validate(
        {"permute": True, "layers": [{"match": "gate", "n": 1}]}, strict=False
    )
    found = reasons(declared, skewed(Gated, TOKENS))
    assert found["gate"] == found["up"] == "channels stay: its readers have different n and m"
    assert found["down"] == ""


def test_nothing_to_gain_is_said(tmp_path: Path):
    model = skewed(Gated, TOKENS)
    even = {
        name: torch.ones_like(t.read()) for name, t in model.tensors().items() if len(t.shape) > 1
    }
    outcome = applied(PruneNm(permute=True), model.with_weights(even), tmp_path)
    assert outcome.notes[1] == "no other order of channels keeps more"


@pytest.mark.parametrize(
    ("own", "criterion"), [(PruneWanda, "wanda"), (PruneSparsegpt, "sparsegpt")]
)
def test_three_names_have_one_pruner(
    tmp_path: Path, own: type[PruneWanda | PruneSparsegpt], criterion: Any
):
    model = skewed(Residual, NETS[Residual])
    general = applied(PruneNm(criterion=criterion, permute=True), model, tmp_path)
    special = applied(own(n=2, m=4, permute=True), model, tmp_path)
    for name, tensor in weights(general.carrier).items():
        assert torch.equal(tensor, weights(special.carrier)[name]), name
    assert general.notes == special.notes


def test_single_weights_have_no_groups_to_reorder_for():
    with pytest.raises(SpecError, match="permute: has no effect where single weights are pruned"):
        PruneWanda(permute=True).survey(skewed(Residual, NETS[Residual]), ANY)
