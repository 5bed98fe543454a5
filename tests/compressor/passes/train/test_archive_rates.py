"""The learning rate of ``archive``, and the networks whose batch norms stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.archive.coded_network import coded_network, float_network
from compressor.passes.train.archive.first_step import gentle_rate
from compressor.passes.train.archive.sensitivity import Sensitivities
from compressor.passes.train.job import Micro
from compressor.passes.train.qat.networks import make_networks
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.train.test_archive_pass import searched

WIDTH = 16


class Layers(nn.Module):
    """Layers that keep the size of what they read."""

    def __init__(self, count: int):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 16]`` to as much."""
        found: Tensor = self.layers(x)
        return found


def micros(*shape: int) -> list[Micro]:
    """Return four times eight random samples."""
    random = torch.Generator().manual_seed(1)
    return [Micro(np.arange(8), {"x": torch.randn(8, *shape, generator=random)}) for _ in range(4)]


def network(count: int) -> NamedModule:
    torch.manual_seed(0)
    carrier = TorchCarrier(Layers(count).eval(), (TensorSpec("x", ("N", WIDTH), "float32"),))
    graph, source = carrier.graph(), carrier.trainable()
    assert isinstance(source, NamedModule)
    return float_network(graph, tuple(graph.graph.initializers), source)


def test_the_deeper_a_network_is_the_smaller_its_steps() -> None:
    rates, taken = zip(*(gentle_rate(network(n), micros(WIDTH), 0.02) for n in (1, 8)), strict=True)
    assert rates[0] == 0.02
    assert taken[0] < 0.1 < taken[1]
    assert rates[1] < 0.02
    again, left = gentle_rate(network(8), micros(WIDTH), rates[1])
    assert again == rates[1]
    assert left <= 0.1
    _, twice = gentle_rate(network(8), micros(WIDTH), 2 * rates[1])
    assert twice > 0.1


class Last(nn.Module):
    """A layer, and a vector that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unread = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map ``[N, 16]`` to as much."""
        return {"y": self.layer(x)}


def last() -> NamedModule:
    torch.manual_seed(0)
    return NamedModule(Last(), ("x",), ("y",))


@pytest.mark.parametrize("rate", [0.3, 3.0, 30.0])
def test_a_rate_is_halved_as_often_as_needed(rate: float) -> None:
    """Of a layer, what a step takes grows with the square of its length."""
    found, first = gentle_rate(last(), micros(WIDTH), rate)
    _, of_one = gentle_rate(last(), micros(WIDTH), 1.0)
    assert first == pytest.approx(of_one * rate**2, rel=1e-3)
    halvings = np.log2(rate / found)
    assert halvings == pytest.approx(round(halvings))
    assert first * (found / rate) ** 2 <= 0.1 < first * (2 * found / rate) ** 2


def test_halving_has_an_end() -> None:
    found, first = gentle_rate(last(), micros(WIDTH), 1e6)
    assert found == 1e6 / 2**11
    assert first > 1e6


def test_a_step_follows_the_gradient_of_outputs_with_random_signs() -> None:
    module, given = last(), micros(WIDTH)
    _, first = gentle_rate(module, given, 0.1)
    assert gentle_rate(module, given, 0.1)[1] == first
    x = torch.cat([micro.tensors["x"] for micro in given])
    with torch.no_grad():
        y = module(x=x)["y"]
    variance = sum(float((part - part.mean(0)).square().sum()) for part in y.split(8))
    alike = 0.01 * float((x.sum(0).sign() * x).sum(1).add(1).square().sum()) * WIDTH / variance
    assert 0 < first < 0.9 * alike  # where all signs are the same, every step is that one


def test_a_network_is_left_as_it_was() -> None:
    module = network(8)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.train()
    gentle_rate(module, micros(WIDTH), 10.0)
    assert module.training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_search_takes_the_lower_rate_and_says_so(tmp_path: Path) -> None:
    found = searched(tmp_path, rounds=1, learning_rate=10.0)
    (note,) = [note for note in found.notes if note.startswith("learning rate ")]
    assert 0 < float(note.split()[2].rstrip(":")) <= 5
    assert "a first step at 10 would take" in note
    assert not any(n.startswith("learning rate ") for n in searched(tmp_path / "as it is").notes)


class NormFirst(nn.Module):
    """A batch norm that no layer before it can take up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, H, W]`` to ``[N, 4, H, W]``."""
        found: Tensor = self.conv(torch.relu(self.norm(x)))
        return found


def test_statistics_of_a_norm_that_stays_are_no_vectors_to_train() -> None:
    specs = (TensorSpec("x", ("N", 3, 6, 6), "float32"),)
    carrier = TorchCarrier(NormFirst().eval(), specs)
    folded, source = make_networks(carrier, live=False).folded, carrier.trainable()
    assert isinstance(source, NamedModule)
    layers = {x.weight: x for x in carrier.with_graph(folded).layers()}
    coded = coded_network(folded, layers, source, 4, 8)
    assert any("norm.weight" in name for name in coded.trained)
    assert not any("running" in name for name in coded.trained)
    felt = Sensitivities(coded)
    felt.measure(micros(3, 6, 6), lambda _: None)
    assert all(bool(torch.isfinite(felt.of(name)).all()) for name in coded.coded)


@pytest.mark.parametrize("rate", [1e-3, 1e-6])
def test_a_rate_that_takes_little_stays(rate: float) -> None:
    assert gentle_rate(network(2), micros(WIDTH), rate)[0] == rate
