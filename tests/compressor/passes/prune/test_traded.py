"""What solved layers lose, traded for what is saved: the default where there are data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.criteria import allowed_counts, by_score
from compressor.passes.prune.structured import (
    memory,
    moments,
    recent,
    shuffled,
    solved,
    structured,
)
from compressor.passes.prune.structured.consumers import possible_consumers
from compressor.passes.prune.structured.moments import Moments
from compressor.passes.prune.structured.remaining import remaining_scores
from compressor.passes.prune.structured.shuffled import Shuffled, with_shuffled
from compressor.passes.prune.structured.solved import solved_losses
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec, samples_in
from tests.compressor.passes.prune.structured_models import (
    Given,
    Plain,
    Residual,
    carrier,
    data,
    declared,
    output,
    pruned,
    timed_by,
)


def error(before: TorchCarrier, options: dict[str, Any], given: Given) -> float:
    """Return the outputs' error after pruning as a share of their variance."""
    outcome = pruned(declared(target={"macs": 0.4}, **options), before, given)
    assert macs(outcome.carrier.graph()) <= 0.4 * macs(before.graph())
    wanted, found = (
        np.concatenate([next(iter(c.runner().run(b).values())) for b in given.data])
        for c in (before, outcome.carrier)
    )
    return float(np.square(found - wanted).sum() / np.square(wanted - wanted.mean(0)).sum())


def test_the_default_loses_less_than_norms():
    before, given = carrier(Residual()), data(16)
    assert error(before, {}, given) < 0.9 * error(before, {"criterion": "l2"}, given)


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        ({"target": {"macs": 0.5}}, "reconstruction"),
        ({"target": {"parameters": 0.5}, "scope": "sensitivity"}, "reconstruction"),
        ({"target": {"macs": 0.5}, "scope": "global"}, "l2"),
        ({"target": {"macs": 0.5}, "reconstruct": False}, "l2"),
        ({"target": {"ratio": 0.5}}, "l2"),
        *(
            pytest.param(options, criterion, marks=pytest.mark.slow)
            for options, criterion in (
                ({"target": {"latency": 0.6}}, "reconstruction"),
                ({"target": {"latency": 0.6}, "scope": "global"}, "reconstruction"),
                ({"target": {"latency": 0.6}, "reconstruct": False}, "l2"),
            )
        ),
    ],
    ids=str,
)
def test_what_ranks_if_that_is_left_out(
    options: dict[str, Any], criterion: str, monkeypatch: pytest.MonkeyPatch
):
    timed_by(monkeypatch, lambda model: 1e-9 * macs(model))
    before = carrier(Residual())
    left_out, named = (
        pruned(declared(**options, **given), before, data(16))
        for given in ({}, {"criterion": criterion})
    )
    assert left_out.notes == named.notes
    for ours, theirs in zip(
        left_out.carrier.tensors().values(), named.carrier.tensors().values(), strict=True
    ):
        assert torch.equal(ours.read(), theirs.read())


def test_a_layer_that_is_read_too_widely_is_ranked_by_norms(monkeypatch: pytest.MonkeyPatch):
    before, given = carrier(Residual()), data(16)
    channels = map_channels(before.graph())
    groups = [g for g in channels.groups if not g.frozen]
    plain = [np.full(len(g.units), -1.0) for g in groups]
    sums = Moments(before, given.batches)
    consumers, _ = possible_consumers(before, groups)
    work = [sum(c.layer.columns**3 for c in r) for r in moments.readers_of(groups, consumers)]
    most = sorted(work)[1]
    found = remaining_scores(before, channels, groups, sums, plain, most)
    assert [(s == -1).all() for s in found] == [w > most for w in work]
    monkeypatch.setattr(structured, "QUICK", 0)
    step = declared(target={"macs": 0.4})
    named = step.model_copy(update={"criterion": "reconstruction"})
    narrow, wide = (pruned(s, before, given) for s in (step, named))
    assert narrow.notes != wide.notes, "who asks for it waits for it"


def test_losses_are_those_of_solved_layers_while_moments_fit(monkeypatch: pytest.MonkeyPatch):
    before, given = carrier(Plain()), data(16)
    with torch.no_grad():
        for parameter in before.module.first.parameters():
            parameter[4:] = 2 * parameter[:4]  # either half stands for the other
    channels = map_channels(before.graph())
    group = next(g for g in channels.groups if not g.frozen)
    count = len(group.units)
    queue = by_score(group.units, np.arange(count), allowed_counts(count, 1, count // 4))

    def found() -> tuple[float, ...]:
        sums = Moments(before, given.batches)
        (cost,) = solved_losses(before, channels, [group], [queue], given, sums)
        assert cost.most is not None
        return (*cost.losses, cost.most)

    fitted = found()
    assert fitted[1] < 1e-3
    assert fitted[3] == fitted[2], "three quarters are the most that can go"
    monkeypatch.setattr(solved, "AT_ONCE", 0)
    assert found()[1] > 0.01


class Narrow(nn.Module):
    """Two channels: three quarters of them are both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 3), nn.Conv2d(2, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(image)))).mean((2, 3)))


def test_no_group_is_tried_without_any_unit():
    after = pruned(declared(target={"macs": 0.6}), carrier(Narrow()), data()).carrier
    assert macs(after.graph()) < macs(carrier(Narrow()).graph())


def test_data_are_read_once_for_moments_that_fit(monkeypatch: pytest.MonkeyPatch):
    before, given = carrier(Residual()), data(4)
    groups = [g for g in map_channels(before.graph()).groups if not g.frozen]
    consumers, _ = possible_consumers(before, groups)
    reads = []

    def batches() -> Iterator[Batch]:
        reads.append(1)
        return given.batches()

    def sums() -> list[torch.Tensor]:
        kept = Moments(before, batches)
        kept.of(consumers[:2])
        return [s.inputs for s in (*kept.of(consumers[:2]).values(), *kept.of(consumers).values())]

    once = sums()
    assert len(reads) == 3, "to count samples, for the first two, then for the others"
    monkeypatch.setattr(moments, "AT_ONCE", 1)
    for ours, theirs in zip(once, sums(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


def test_the_note_says_that_layers_were_solved():
    step, before = declared(target={"macs": 0.5}), carrier(Residual())
    outcome = pruned(step, before, data())
    (note,) = [n for n in outcome.notes if n.startswith("signal to noise")]
    assert "units gone and the layers that read them solved: " in note
    known = {x.name for x in outcome.layers if "sensitivity_db" in x.details}
    assert known == {"stem", "inner", "wide"}


def test_the_plan_counts_moments_and_solutions_that_are_held(monkeypatch: pytest.MonkeyPatch):
    before = carrier(Residual())
    groups = [g for g in map_channels(before.graph()).groups if not g.frozen]
    squares = sum(moments.moment_bytes(c) for c in possible_consumers(before, groups)[0])
    changing, _ = possible_consumers(before, groups, changed=True)
    solutions = 16 * sum(4 * c.layer.rows * c.layer.columns for c in changing)
    monkeypatch.setattr(memory, "partition", lambda *_, **__: ())  # no block's moments
    _, alone = memory.planned(before, groups)
    _, scored = memory.planned(before, groups, scored=True)
    assert scored - alone == squares + solutions
    _, dropping = memory.planned(before, groups, scored=True, dropping=True)
    assert dropping - scored == solutions
    monkeypatch.setattr(memory, "AT_ONCE", 1)
    assert memory.planned(before, groups, scored=True, dropping=True)[1] == alone + 3


def test_a_plan_of_a_latency_counts_what_changes_for_dropped_blocks():
    context = PassContext(shapes={"image": (8, 3, 10, 10)})
    steps = (declared(target={"latency": 0.7}, drop_blocks=drops) for drops in (True, False))
    drops, keeps = (step.survey(carrier(Residual()), context).memory for step in steps)
    assert drops > keeps


def test_solutions_that_were_looked_at_last_are_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recent, "AT_ONCE", 8)
    held, made = recent.Recent(), list[str]()

    def of(key: str) -> Batch:
        return held.of(key, lambda: made.append(key) or {"w": np.zeros(1, np.float32)})  # type: ignore[func-returns-value]  # notes the key

    for key in ("a", "b", "a", "c", "b", "a"):
        assert of(key)["w"].size == 1
    assert made == ["a", "b", "c", "a"], "two fit, and the oldest went for the third"


def one_sample() -> Given:
    return Given(({"image": data().data[0]["image"][:1]},))


def test_one_sample_is_joined_by_others_of_its_values():
    """A layer that reads one place loses nothing on it by any choice: all of it went."""
    before = carrier(Residual())
    ours = pruned(declared(target={"macs": 0.6}), before, one_sample())
    (note,) = [n for n in ours.notes if "Give more samples" in n]
    assert "4 of 4 layers, such as 'inner', fewer than 4 values for each input" in note
    joined = Given(tuple(Shuffled(one_sample(), seed=0).batches()))
    theirs = pruned(declared(target={"macs": 0.6}), before, joined)
    for name, tensor in ours.carrier.tensors().items():
        assert torch.equal(tensor.read(), theirs.carrier.tensors()[name].read())


def test_of_one_sample_others_lose_less(monkeypatch: pytest.MonkeyPatch):
    before, others = carrier(Residual()), data(16, seed=7)

    def lost() -> float:
        after = pruned(declared(target={"macs": 0.6}), before, one_sample()).carrier
        wanted, found = (
            np.concatenate([output(c, batch) for batch in others.data]) for c in (before, after)
        )
        return float(np.square(found - wanted).sum() / np.square(wanted - wanted.mean(0)).sum())

    joined = lost()
    monkeypatch.setattr(shuffled, "ADDED", 0)
    assert joined < 0.5 * lost()


def test_samples_are_shuffled_each_by_itself_and_the_same_at_each_call():
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    given = Given(
        (
            {"x": values, "columns": values[:, 0], "ids": np.arange(12).reshape(2, 2, 3)},
            {"x": values[:1] + 50, "columns": values[:1, 0], "ids": np.arange(6).reshape(1, 2, 3)},
        )
    )
    joined = Shuffled(given, seed=0)
    first, second = list(joined.batches()), list(joined.batches())
    assert sum(map(samples_in, first)) == 3 + shuffled.ADDED + 2, "a whole number of times three"
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(first, second, strict=True))
    for place, batch in enumerate(first):
        whole = given.data[place % 2]
        for name in ("columns", "ids"):  # of units, or of tables, of their own
            assert np.array_equal(batch[name], whole[name])
        ours, theirs = (b["x"].reshape(len(b["x"]), -1) for b in (batch, whole))
        assert np.array_equal(np.sort(ours, 1), theirs)
        assert np.array_equal(ours, theirs) == (place < 2)
    assert np.array_equal(joined.probe(1)["x"], given.probe(1)["x"])


class Tables(nn.Module):
    """Looks its two whole numbers up in tables of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = nn.Embedding(500, 16), nn.Embedding(3, 16)
        self.inner, self.head = nn.Linear(32, 48), nn.Linear(48, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.cat([self.long(ids[:, 0]), self.short(ids[:, 1])], 1)
        return self.head(torch.relu(self.inner(found)))


def test_whole_numbers_stay_in_their_tables():
    """They were shuffled too: the lookup in the shorter table failed."""
    torch.manual_seed(0)
    before = TorchCarrier(Tables(), (TensorSpec("ids", ("batch", 2), "int64"),))
    given = Given(({"ids": np.array([[499, 2], [400, 1], [300, 0]])},))
    ours = pruned(declared(target={"macs": 0.6}), before, given)
    (note,) = [n for n in ours.notes if "Give more samples" in n]
    assert "were added" not in note
    assert with_shuffled(given, 0) == (given, False)
    assert len(ours.carrier.tensors()["inner.weight"].read()) < 48


def test_few_large_images_show_layers_enough():
    """Of two images, 64 places each were looked at, and 64 shuffled images added in vain."""
    images = np.random.default_rng(0).standard_normal((2, 3, 48, 48), np.float32)
    torch.manual_seed(0)
    before = TorchCarrier(Plain(), (TensorSpec("image", ("batch", 3, 48, 48), "float32"),))
    given = Given(({"image": images},))
    consumers, _ = possible_consumers(before, map_channels(before.graph()).groups)
    sums = Moments(before, given.batches)
    sums.of([c for c in consumers if c.window is not None])
    assert not sums.few


def test_enough_samples_choose_without_a_note():
    notes = pruned(declared(target={"macs": 0.6}), carrier(Residual()), data(16)).notes
    assert not [n for n in notes if "Give more samples" in n]


@pytest.mark.slow
def test_a_latency_weighs_what_is_lost_on_joined_samples(monkeypatch: pytest.MonkeyPatch):
    timed_by(monkeypatch, lambda model: 1e-9 * macs(model))
    step, before = declared(target={"latency": 0.8}), carrier(Residual())
    ours = pruned(step, before, one_sample())
    joined = Given(tuple(Shuffled(one_sample(), seed=0).batches()))
    assert ours.notes[1:] == pruned(step, before, joined).notes


class Twins(nn.Module):
    """Two layers multiply the same vectors; a third sees the same value through another window."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.one, self.two, self.wide = (nn.Conv2d(8, 4, n) for n in (1, 1, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.first(image))
        narrow = self.one(seen).mean((2, 3)) + self.two(seen).amax((2, 3))
        return narrow + self.wide(seen)[..., 0, 0]


def test_layers_that_read_the_same_share_their_moments():
    before, given = carrier(Twins()), data(4)
    groups = [g for g in map_channels(before.graph()).groups if not g.frozen]
    consumers, _ = possible_consumers(before, groups)
    sums = Moments(before, given.batches).of(consumers)
    assert sums["one"] is sums["two"]
    assert len(sums["wide"].inputs) == 9 * len(sums["one"].inputs) == 72
    (alone,) = (Moments(before, given.batches).of([c]) for c in consumers if c.layer.name == "two")
    assert torch.equal(alone["two"].inputs, sums["two"].inputs)
