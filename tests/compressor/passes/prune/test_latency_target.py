"""``target: {latency: …}`` on small networks: widths, dropped blocks, the table that is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.graph.channels.analysis import analyse
from compressor.graph.costs import macs, model_macs
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import clock
from compressor.passes.prune.structured.choices import State
from compressor.passes.prune.structured.fastest import Found
from compressor.passes.prune.structured.latency import LatencyTarget, droppable_blocks, plan_notes
from compressor.passes.prune.structured.segments import Segments, Variant
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from tests.compressor.passes.prune.structured_models import (
    Given,
    Residual,
    carrier,
    data,
    declared,
    output,
    shapes,
    timed_by,
)
from tests.compressor.run.played_clock import BATCH, Clock, Timed

measured_times, measured_share = clock.TimingTable._timed, clock.TimingTable._compared


class Kept:
    """A store in memory; see compressor.types.passes.Kept."""

    def __init__(self) -> None:
        self.content: dict[str, Mapping[str, Any]] = {}

    def read(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self.content.get(str(identity))

    def write(self, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        self.content[str(identity)] = dict(content)


class Killing(Kept):
    """A store that ends a run once it has written so often."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        super().write(identity, content)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class Deep(nn.Module):
    """Three residual blocks, the second of which hardly does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


@cache
def deep() -> TorchCarrier:
    model = carrier(Deep())
    with torch.no_grad():
        for parameter in model.module.blocks[1][2].parameters():
            parameter.mul_(1e-6)
    return model


def chosen(model: Carrier, kept: Kept, given: Given | None = None, **options: Any) -> Outcome:
    context = PassContext(samples=given or data(), kept=kept)
    step = declared(**{"target": {"latency": 0.8}, "minimum": 1, **options})
    step.survey(model, replace(context, samples=None, kept=None))
    return step.apply(model, context, {})


@pytest.fixture(scope="module", autouse=True)
def _timed_by_work() -> Iterator[None]:
    """A product takes a nanosecond, and an operator 50 microseconds: to drop a block saves them."""

    with pytest.MonkeyPatch.context() as patch:
        timed_by(patch, lambda model: 5e-5 * len(model.graph) + 1e-9 * macs(model))
        yield


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is timed."""

    def timed(*_: object) -> None:
        raise AssertionError("a time was measured that the table holds")

    monkeypatch.setattr(clock.TimingTable, "_timed", timed)
    monkeypatch.setattr(clock.TimingTable, "_compared", timed)


@pytest.fixture(scope="module")
def outcome(kept: Kept) -> Outcome:
    return chosen(deep(), kept)


def test_a_block_that_does_nothing_goes_and_the_rest_can_be_trained(outcome):
    layers = shapes(outcome.carrier)
    assert "blocks.1.0" not in layers
    assert "blocks.0.0" in layers
    assert outcome.carrier.trainable() is not None
    before = output(deep(), data().data[0])
    assert output(outcome.carrier, data().data[0]).shape == before.shape
    text = " ".join(outcome.notes)
    assert "latency at batch 1 in ONNX Runtime on 1 thread" in text
    assert "1 dropped block was proved: the smaller model differs by" in text
    assert "the module still has the blocks that were dropped" in text


def check_same(first: Outcome, second: Outcome) -> None:
    assert first.notes == second.notes
    assert first.carrier.tensors().keys() == second.carrier.tensors().keys()
    for name, tensor in first.carrier.tensors().items():
        assert torch.equal(tensor.read(), second.carrier.tensors()[name].read())


def test_a_second_run_decides_by_the_same_table(outcome, kept, untimed):
    check_same(outcome, chosen(deep(), kept))


@pytest.mark.parametrize("writes", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_run_that_was_killed_ends_in_the_same_bytes(outcome, writes):
    store = Killing(writes)
    with pytest.raises(KeyboardInterrupt):
        chosen(deep(), store)
    again = chosen(deep(), store)
    assert "blocks.1.0" not in shapes(again.carrier), "a block was dropped"
    check_same(outcome, again)


def test_no_more_is_timed_by_a_run_that_finds_a_full_table(request, monkeypatch):
    """What the first run had to estimate, a second would have timed, and decided otherwise."""
    monkeypatch.setattr(clock, "MOST_TIMINGS", 20)
    store = Kept()
    first = chosen(deep(), store)
    request.getfixturevalue("untimed")
    check_same(first, chosen(deep(), store))


def test_an_onnx_file_gets_the_same(outcome, kept, untimed):
    result = chosen(OnnxCarrier(deep().graph()), kept)
    assert shapes(result.carrier) == shapes(outcome.carrier)
    assert output(result.carrier, data().data[0]) == pytest.approx(
        output(outcome.carrier, data().data[0]), abs=1e-5
    )


@pytest.mark.parametrize(
    "options", [{"drop_blocks": False}, {"layers": ({"match": "blocks.*.0", "skip": True},)}]
)
def test_blocks_stay_on_request(kept, options):
    result = chosen(deep(), kept, target={"latency": 0.97}, **options)
    assert {f"blocks.{i}.0" for i in range(3)} <= shapes(result.carrier).keys()
    assert model_macs(result.carrier) < model_macs(deep())


def test_a_target_below_all_work_that_can_go_is_a_plan_error():
    step = declared(target={"latency": 0.01}, minimum=8, drop_blocks=False)
    with pytest.raises(SpecError, match="of the multiply-accumulates remain") as raised:
        step.survey(carrier(Residual()), PassContext())
    assert "time falls no faster" in raised.value.problem


def test_the_plan_states_what_will_be_measured():
    step = declared(target={"latency": 0.5}, scope="global")
    notes = step.survey(deep(), PassContext(targets=frozenset({"tensorrt"}))).notes
    assert notes == (
        "sizes are an estimate until parts of the network are timed in ONNX Runtime on 1 thread, "
        "at most 600 timings of about 20 ms, and losses measured on the calibration data",
        "3 residual blocks may be dropped, those that begin with 'blocks.0.0', 'blocks.1.0', "
        "'blocks.2.0'",
        "a TensorRT engine is not timed here: ONNX Runtime's times are used instead, and channels "
        "remain in multiples of 8, for its float16 kernels",
        "scope global has no say: a latency weighs losses that are measured",
    )
    (one, *_) = droppable_blocks(deep().graph(), ())
    assert plan_notes((one,), PassContext(), None, untimed=False)[1] == (
        "1 residual block may be dropped, the one that begins with 'blocks.0.0'"
    )
    assert "no residual block may be dropped" in " ".join(
        declared(target={"latency": 0.9}, drop_blocks=False).survey(deep(), PassContext()).notes
    )


def target_of(model: TorchCarrier) -> LatencyTarget:
    step = declared(target={"latency": 0.5})
    analysis = analyse(model.graph())
    selector = step.selector(model, analysis.channels)
    blocks = droppable_blocks(model.graph(), ())
    return LatencyTarget(model, analysis, selector, blocks, selector.plain(), data(), PassContext())


class Played:
    """A model on a machine that others use: one of three runs is interrupted, and one is slow.

    Of an interrupted run, the processor's clock shows less than it took.
    """

    def __init__(self, machine: Clock, seconds: float, *, always: bool = False):
        self.machine, self.seconds, self.always = machine, seconds, always
        self.runs = 0

    def run(self, _: object) -> None:
        self.runs += 1
        if self.always or self.runs % 3 == 0:
            self.machine.now += self.seconds * (0.3 if self.runs % 3 == 0 else 1)
            self.machine.away += 1.0
        else:
            self.machine.now += self.seconds * (1 if self.runs % 3 == 1 else 1.5)


def test_a_time_is_the_least_of_runs_that_nothing_interrupted(monkeypatch: pytest.MonkeyPatch):
    """20 ms of runs, but 5 to 400, and two before."""
    machine = Clock()
    monkeypatch.setattr(clock, "time", machine)
    models = [Played(machine, s) for s in (1e-5, 1e-3, 0.1)] + [Played(machine, 1e-3)] * 13
    table = clock.TimingTable(None, lambda model: model, None, {})  # type: ignore[arg-type, return-value]  # what it opens
    found = measured_times(table, [(m, None) for m in models])  # type: ignore[misc]  # of which it is run
    assert found[:3] == pytest.approx([1e-5, 1e-3, 0.1])
    assert [m.runs for m in models[:3]] == [2 + 400, 2 + 20, 2 + 5]


def test_few_models_are_timed_as_long_as_many(monkeypatch: pytest.MonkeyPatch):
    machine = Clock()
    monkeypatch.setattr(clock, "time", machine)
    models = [Played(machine, 1e-3), Played(machine, 2e-3)]
    table = clock.TimingTable(None, lambda model: model, None, {})  # type: ignore[arg-type, return-value]  # what it opens
    assert measured_times(table, [(m, None) for m in models]) == pytest.approx([1e-3, 2e-3])  # type: ignore[misc]  # of which it is run
    assert [m.runs for m in models] == [2 + 160, 2 + 80]


def test_a_time_is_the_median_on_the_processor_if_every_run_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
):
    machine = Clock()
    monkeypatch.setattr(clock, "time", machine)
    model = Played(machine, 0.1, always=True)
    table = clock.TimingTable(None, lambda model: model, None, {})  # type: ignore[arg-type, return-value]  # what it opens
    assert measured_times(table, [(model, None)]) == pytest.approx([0.1])  # type: ignore[misc]  # of which it is run


def test_a_share_is_that_of_most_sessions(monkeypatch: pytest.MonkeyPatch):
    """One session in four of the smaller network is slow for as long as it is open."""
    machine = Clock()
    monkeypatch.setattr(clock, "time", machine)
    monkeypatch.setattr(clock.TimingTable, "_timed", measured_times)
    opened = {"smaller": 0, "whole": 0}

    def start(name: str) -> Timed:
        opened[name] += 1
        slow = 1.8 if name == "smaller" and opened[name] % 4 == 1 else 1
        seconds = (1e-3 if name == "smaller" else 2e-3) * slow
        return Timed(machine, lambda _: seconds)

    table = clock.TimingTable(SimpleNamespace(batch=BATCH), start, None, {})  # type: ignore[arg-type]  # what it opens
    assert measured_share(table, "smaller", "whole") == pytest.approx(0.5)  # type: ignore[arg-type]  # what is opened
    assert min(opened.values()) >= 7


def test_a_choice_is_described():
    target = target_of(deep())
    found = Found(State((12, 16, 16, 8), frozenset({1})), 0.489, 0.502, ((4, 12, 16),) * 4)
    assert target.notes(found, 0.5) == [
        "latency at batch 1 in ONNX Runtime on 1 thread: 0.49 of the time before pruning by the "
        "table of its parts, 0.50 measured; the target is 0.5",
        "channels and heads remain in the numbers that the kernels tell apart (in brackets; any "
        "other takes as long as the next of them): stem 12 (4/12/16), blocks.0.0 16 (4/12/16), "
        "blocks.1.0 16 (4/12/16), blocks.2.0 8 (4/12/16)",
        "1 of 3 residual blocks were dropped, those that begin with 'blocks.1.0': their additions "
        "are their skips",
    ]


def test_segments_in_sequence_compute_the_network():
    """Each segment's model, run on what the one before gave, ends in the network's outputs."""
    model = deep()
    analysis, blocks = analyse(model.graph()), droppable_blocks(model.graph(), ())
    batch = {"image": data().data[0]["image"][:2]}
    segments = Segments(model, analysis, blocks, batch)
    removed = np.zeros(analysis.channels.count, dtype=bool)
    for group in analysis.channels.groups:
        if not group.frozen:
            removed[group.units[::2]] = True
    for variant in (
        Variant(np.zeros_like(removed)),
        Variant(removed),
        Variant(removed, frozenset({1})),
    ):
        values = dict(batch)
        models = segments.models([(s, variant) for s in segments.all])
        for segment, made in zip(segments.all, models, strict=True):
            if made is None:  # the block was all of it
                values[segment.exits[0]] = values[segment.entries[0]]
                continue
            graph, feed = made
            assert {n: a.shape for n, a in feed.items()} == {n: values[n].shape for n in feed}
            values |= model.with_graph(graph).runner().run({n: values[n] for n in feed})
        whole = model.with_graph(segments.smaller(variant)).runner().run(batch)
        for name, array in whole.items():
            assert values[name] == pytest.approx(array, abs=1e-4)
    assert len(segments.all) == 5
    keys = [segments.key(s, Variant(removed)) for s in segments.all]
    assert keys[2] == keys[3], "equal blocks are timed once"
    assert len(set(keys)) == 4
