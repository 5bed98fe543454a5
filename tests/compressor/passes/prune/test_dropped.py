"""What the layers around a dropped block make up for, where losses are compared."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import ModelError
from compressor.graph.channels.analysis import map_channels
from compressor.graph.residuals import drop_blocks, residual_blocks
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import dropped
from compressor.passes.prune.structured.dropped import WithoutBlocks
from compressor.passes.prune.structured.moments import Moments
from compressor.passes.prune.structured.reconstruction import reconstructed
from compressor.passes.prune.structured.removal import GatedModel
from compressor.passes.prune.structured.segments import Variant
from compressor.passes.prune.structured.solved import OutputLoss, SolvedModel
from tests.compressor.passes.prune.structured_models import carrier, data


class Blocks(nn.Module):
    """Four residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 1))
            for _ in range(4)
        )
        self.head = nn.Linear(12, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def without(model: TorchCarrier) -> WithoutBlocks:
    return WithoutBlocks(model, residual_blocks(model.graph()), data().data)


def lost(model: TorchCarrier, gone: Collection[int], *, solved: bool, units: bool = False) -> float:
    """Return the loss without some blocks, and without every third unit."""
    channels, blocks = map_channels(model.graph()), residual_blocks(model.graph())
    groups = [g for g in channels.groups if not g.frozen]

    def gated(others: Any) -> GatedModel:
        return GatedModel(model, channels, blocks, others=others)

    sums = Moments(model, data().batches)
    made_up = SolvedModel(model, channels, groups, gated, sums, without(model) if solved else None)
    removed = np.zeros(channels.count, dtype=bool)
    for group in groups if units else ():
        removed[group.units[::3]] = True
    variant, runner = Variant(removed, frozenset(gone)), model.runner()
    loss = OutputLoss([runner.run(b) for b in data().data])
    return loss(made_up.run(b, variant) for b in data().data)


def finally_lost(model: TorchCarrier, gone: Collection[int]) -> float:
    """Return the loss of what the pass makes of a network without some blocks."""
    blocks = [residual_blocks(model.graph())[i] for i in sorted(gone)]
    smaller = model.with_trainable_graph(drop_blocks(model.graph(), blocks), ())
    graphs = (model.graph(), smaller.graph())
    after, _ = reconstructed(smaller, graphs, {}, blocks, data().batches(), required=True)
    runners = [c.runner() for c in (model, after)]
    exact, found = ([r.run(b) for b in data().data] for r in runners)
    return OutputLoss(exact)(found)


@pytest.mark.parametrize("gone", [{0}, {1}, {2}, {3}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_what_other_layers_make_up_for_is_not_lost(gone: set[int]):
    model = carrier(Blocks())
    zeroed, solved = (lost(model, gone, solved=s) for s in (False, True))
    final = finally_lost(model, gone)
    assert abs(np.log(solved / final)) < abs(np.log(zeroed / final)), "nearer to what is lost then"
    assert solved < 0.7 * zeroed
    assert lost(model, gone, solved=True, units=True) < lost(model, gone, solved=False, units=True)


def test_only_the_layers_around_a_block_change():
    """The one before it, which need not end in a sum, and those up to the next sum."""
    made = without(carrier(Blocks()))
    changed = [{n.rsplit(".", 1)[0] for n in made.changes(frozenset({i}))} for i in (0, 1, 3)]
    assert changed == [
        {"stem", "blocks.1.0", "blocks.1.2"},
        {"blocks.0.2", "blocks.2.0", "blocks.2.2"},
        {"blocks.2.2", "head"},
    ]
    assert {*made.changes(frozenset({0, 1, 3}))} <= {*made.names}
    assert not made.changes(frozenset())


class Projecting(nn.Module):
    """A block whose skip is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.branch = nn.Sequential(
            nn.Conv2d(12, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1)
        )
        self.skip, self.skip_norm = nn.Conv2d(12, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        x = torch.relu(self.skip_norm(self.skip(x)) + self.branch(x))
        return self.head(x.mean((2, 3)))


def test_a_projection_makes_up_for_its_branch():
    model = carrier(Projecting())
    assert [b.name for b in residual_blocks(model.graph())] == ["branch.0"]
    changed = {*without(model).changes(frozenset({0}))}
    assert changed == {"skip.weight", "skip_norm.running_mean", "head.weight", "head.bias"}
    zeroed, solved = (lost(model, {0}, solved=s) for s in (False, True))
    assert solved < 0.7 * zeroed
    assert finally_lost(model, {0}) < zeroed


def test_blocks_that_follow_each_other_go_together():
    made = without(carrier(Blocks()))
    assert made._rows([0, 1, 3]) == [(0, 1), (3,)]
    changed = {n.rsplit(".", 1)[0] for n in made.changes(frozenset({1, 2}))}
    assert changed == {"blocks.0.2", "blocks.3.0", "blocks.3.2"}


def test_changes_of_blocks_add_up():
    made = without(carrier(Blocks()))
    first, last, both = (made.changes(frozenset(g)) for g in ({1}, {3}, {1, 3}))
    own = made._own("blocks.2.2.weight")
    assert both["blocks.2.2.weight"] == pytest.approx(
        first["blocks.2.2.weight"] + last["blocks.2.2.weight"] - own, abs=1e-6
    )


def test_nothing_is_made_up_for_beyond_what_memory_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dropped, "AT_ONCE", 1000)
    made = without(carrier(Blocks()))
    assert made.names == ()
    assert made.changes(frozenset({1})) == {}


def test_a_model_that_is_not_run_block_by_block_has_no_changes(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any, **__: Any) -> None:
        raise ModelError("the block", "is not run", "do not run it")

    monkeypatch.setattr(dropped, "solved_layers", refused)
    assert without(carrier(Blocks())).changes(frozenset({1})) == {}
