"""Widths that ONNX Runtime's convolutions read in blocks of channels."""

from __future__ import annotations

import pytest
from torch import nn

from compressor.graph.channels.analysis import map_channels
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from tests.compressor.passes.prune.structured_models import carrier, declared

CPU = PassContext(targets=frozenset({"ort-cpu"}))


class Mixed(nn.Module):
    """Channels that a dense convolution reads, and others that grouped and linear layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 30, 3)
        self.second = nn.Conv2d(30, 20, 1)
        self.depthwise = nn.Conv2d(20, 20, 3, groups=20)
        self.head = nn.Linear(20, 5)

    def forward(self, image):
        hidden = self.depthwise(self.second(self.first(image).relu()).relu()).relu()
        return self.head(hidden.mean((2, 3)))


@pytest.fixture(scope="module")
def mixed() -> TorchCarrier:
    return carrier(Mixed())


def widths(model: Carrier, context: PassContext, **options) -> dict[str, list[int]]:
    step = declared(**{"target": {"macs": 0.5}, **options})
    prunable = step.selector(model, map_channels(model.graph()), context).prunable
    return {p.group.name: p.remaining.tolist() for p in prunable}


def test_what_a_dense_convolution_reads_stays_in_blocks(mixed: TorchCarrier) -> None:
    found = widths(mixed, CPU)
    assert found["first"] == [3, 4, 5, 6, 7, 8, 16, 24, 30]
    assert found["second"] == list(range(2, 21))


@pytest.mark.parametrize(
    ("context", "options"),
    [
        (PassContext(), {}),
        (PassContext(targets=frozenset({"openvino"})), {}),
        (CPU, {"round_to": 1}),
        (CPU, {"target": {"latency": 0.5}}),
    ],
)
def test_other_runtimes_and_stated_multiples_take_any(
    mixed: TorchCarrier, context: PassContext, options: dict
) -> None:
    assert widths(mixed, context, **options)["first"] == list(range(3, 31))


def test_the_fewest_remain_whatever_they_are(mixed: TorchCarrier) -> None:
    """So every target that can be reached at all can be reached."""
    assert widths(mixed, CPU, minimum=9)["first"][:3] == [9, 16, 24]


class Sixteen(nn.Module):
    """One group of 16 channels, which remain in blocks of eight or as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, image):
        hidden = self.first(image).relu()
        hidden = hidden + self.middle(hidden).relu()
        return self.head(hidden.mean((2, 3)))


@pytest.mark.parametrize(
    ("target", "left", "free"),
    [
        ({"macs": 0.9}, 15, True),
        ({"macs": 0.5}, 10, True),
        ({"macs": 0.29}, 8, False),  # eight of sixteen leave 0.2875
        ({"ratio": 0.5}, 8, False),
        ({"ratio": 0.42}, 8, False),
        ({"ratio": 0.3}, 11, True),
    ],
)
def test_blocks_that_miss_the_target_by_far_are_left(
    target: dict[str, float], left: int, free: bool
) -> None:
    model = carrier(Sixteen())
    selector = declared(target=target).selector(model, map_channels(model.graph()), CPU)
    removed = selector.planned()
    assert [len(p.group.units) - removed[p.group.units].sum() for p in selector.prunable] == [left]
    (note,) = selector.notes(removed) if free else ("",)
    assert (f"first ({left} of 16)" in note) == free
    if "macs" in target:
        share = selector.cost(removed) / selector.cost(selector.nothing)
        assert share <= target["macs"]
