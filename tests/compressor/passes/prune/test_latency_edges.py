"""``target: {latency: …}`` where networks or data are degenerate: right results or clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.graph.costs import model_macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import latency
from compressor.types.passes import PassContext
from tests.compressor.passes.prune.structured_models import (
    Given,
    carrier,
    data,
    declared,
    output,
    timed_by,
)


@pytest.fixture(scope="module", autouse=True)
def _timed_by_work() -> Iterator[None]:
    """Times are those of a machine whose kernels take as long as they have products."""

    with pytest.MonkeyPatch.context() as patch:
        timed_by(patch, lambda model: 1e-3 + sum(t.size for t in _weights(model)))
        yield


def _weights(model):
    values = model.graph.initializers.values()
    return [v.const_value for v in values if v.const_value is not None and len(v.shape) > 1]


class Grouped(nn.Module):
    """Grouped and depthwise convolutions between others, and a layer of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 24, 1)
        self.one = nn.Conv2d(24, 1, 1)
        self.head = nn.Linear(1, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.grouped(torch.relu(self.first(image))))
        x = torch.relu(self.one(torch.relu(self.wide(torch.relu(self.depthwise(x))))))
        return self.head(x.mean((2, 3)))


class Stack(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.second = nn.Conv2d(16, 32, 3)
        self.head = nn.Linear(32, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(image)))).mean((2, 3)))


def dead() -> TorchCarrier:
    """Half of the first layer's channels are always zero."""
    model = carrier(Stack())
    with torch.no_grad():
        model.module.first.weight[8:] = 0
        model.module.first.bias[8:] = -1
    return model


def equal() -> TorchCarrier:
    """The first layer's channels are all the same: its outputs have rank one."""
    model = carrier(Stack())
    with torch.no_grad():
        model.module.first.weight[:] = model.module.first.weight[:1]
        model.module.first.bias[:] = model.module.first.bias[:1]
    return model


def few() -> Given:
    """One sample of one batch: fewer than any layer has channels."""
    return Given(tuple({"image": b["image"][:1]} for b in data(1).data))


CASES = {
    "grouped": (lambda: carrier(Grouped()), data(1)),
    "dead": (dead, data()),
    "equal": (equal, data()),
    "few": (lambda: carrier(Stack()), few()),
    "constant": (
        lambda: carrier(Stack()),
        Given(tuple({"image": np.ones_like(b["image"])} for b in data().data)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_degenerate_networks_and_data_are_pruned_and_proved(case: str) -> None:
    make, given = CASES[case]
    model = make()
    step = declared(target={"latency": 0.7}, minimum=1)
    outcome = step.apply(model, PassContext(samples=given), {})
    text = " ".join(outcome.notes)
    assert "were proved on calibration data" in text
    assert model_macs(outcome.carrier) < model_macs(model)
    before, after = (output(c, data().data[0]) for c in (model, outcome.carrier))
    assert np.isfinite(after).all()
    if case in ("dead", "equal"):  # what goes is dead, or another channel stands for it
        assert np.square(after - before).mean() < 0.3 * before.var()


def test_channels_that_do_nothing_go_first() -> None:
    step = declared(target={"latency": 0.6}, minimum=1, criterion="reconstruction")
    outcome = step.apply(dead(), PassContext(samples=data()), {})
    before, after = (output(c, data().data[0]) for c in (dead(), outcome.carrier))
    assert np.square(after - before).mean() < 0.01 * before.var()


def test_a_target_out_of_reach_says_what_was_measured() -> None:
    step = declared(target={"latency": 0.2}, minimum=0.5)
    with pytest.raises(SpecError, match="of the time was measured with every removable unit"):
        step.apply(carrier(Stack()), PassContext(samples=data()), {})


def test_without_data_nothing_is_begun() -> None:
    with pytest.raises(SpecError, match="has options that need calibration data"):
        declared(target={"latency": 0.7}).apply(carrier(Stack()), PassContext(), {})


@pytest.mark.parametrize(
    ("targets", "missing", "runtime"),
    [
        ({"openvino"}, "", "OpenVINO"),
        ({"openvino", "ort-cpu"}, "", "ONNX Runtime"),
        ({"openvino"}, "openvino is not installed", "ONNX Runtime"),
        ({"tensorrt"}, "", "ONNX Runtime"),
    ],
)
def test_times_are_those_of_the_runtime_that_serves_the_export(
    targets: set[str], missing: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "why_elsewhere", lambda _: missing)
    context = PassContext(samples=data(), targets=frozenset(targets))
    step = declared(target={"latency": 0.7}, minimum=1)
    model = carrier(Stack())
    planned = " ".join(step.survey(model, context).notes)
    assert f"are timed in {runtime} on 1 thread" in planned
    notes = " ".join(step.apply(model, context, {}).notes)
    assert f"latency at batch 1 in {runtime} on 1 thread" in notes


def test_openvino_runs_the_parts_that_it_times() -> None:
    pytest.importorskip("openvino")
    graph, feed = carrier(Stack()).graph(), data(1).data[0]
    ours, theirs = (latency.opener(openvino)(graph).run(feed) for openvino in (True, False))
    for name, array in theirs.items():
        assert ours[name] == pytest.approx(array, abs=1e-4)
