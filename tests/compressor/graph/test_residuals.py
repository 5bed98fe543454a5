"""Residual blocks: which there are, and that dropping one is the same as a branch of zeros."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from compressor.graph.residuals import drop_blocks, gated, residual_blocks, stands_for
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.tensors import TensorSpec

X = TensorSpec("x", ("batch", 6), "float32")


def branch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))


class Blocks(nn.Module):
    """What may be dropped, and what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = branch(), branch(), branch()
        self.norm = nn.LayerNorm(6)
        self.shared = nn.Linear(6, 6)
        self.wide, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.first(x)
        x = self.norm(x + self.second(x))  # a norm behind the sum
        x = self.wide(x) + self.other(x)  # neither is the skip
        inner = self.shared(x)
        x = x + torch.relu(inner)  # the branch's layer is an output, too
        x = x + torch.relu(x)  # no layer
        return x + self.last(x), inner


@pytest.fixture(scope="module")
def carrier() -> TorchCarrier:
    torch.manual_seed(0)
    return TorchCarrier(Blocks().eval(), [X])


def test_identities_with_a_layer_of_their_own_are_found(carrier):
    blocks = residual_blocks(carrier.graph())
    assert [b.name for b in blocks] == ["first.0", "second.0", "last.0"]
    assert blocks[0].layers == ("first.0", "first.2")
    assert blocks[0].parameters == {
        "first.0.weight",
        "first.0.bias",
        "first.2.weight",
        "first.2.bias",
    }


def runs(carrier: Carrier, graph: ir.Model, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(carrier.with_graph(graph).runner().run(feed).values())


@pytest.mark.parametrize("chosen", [c for n in (1, 2, 3) for c in combinations(range(3), n)])
def test_without_blocks_is_as_with_branches_of_zero(carrier, chosen):
    graph = carrier.graph()
    blocks = residual_blocks(graph)
    x = {"x": np.random.default_rng(1).standard_normal((3, 6), np.float32)}
    masked, gates = gated(graph, blocks)
    feed = {n: np.asarray(i not in chosen, np.float32) for i, n in enumerate(gates)}
    smaller = drop_blocks(graph, [blocks[i] for i in chosen])
    for ours, theirs in zip(
        runs(carrier, masked, {**x, **feed}), runs(carrier, smaller, x), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-5)
    gone = {name for i in chosen for name in blocks[i].parameters}
    assert gone.isdisjoint(smaller.graph.initializers)
    assert [v.name for v in smaller.graph.outputs] == [v.name for v in graph.graph.outputs]
    whole = {n: np.ones((), np.float32) for n in gates}
    for ours, theirs in zip(
        runs(carrier, masked, {**x, **whole}), runs(carrier, graph, x), strict=True
    ):
        assert (ours == theirs).all()


def test_blocks_inside_a_block_count(carrier):
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.end = branch(), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            return x + self.end(y + self.inner(y))

    torch.manual_seed(0)
    blocks = residual_blocks(TorchCarrier(Nested().eval(), [X]).graph())
    assert [b.name for b in blocks] == ["inner.0"]


def test_a_chain_of_dropped_blocks_stands_for_the_first_skip(carrier):
    first, second, last = residual_blocks(carrier.graph())
    assert stands_for(first.output, [first, second]) == first.skip
    assert stands_for(last.output, [first]) == last.output


class Projected(nn.Module):
    """Skips that are made of what the branch reads, and sums of which neither side is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip = branch(), nn.Linear(6, 6)
        self.inner, self.other = branch(), branch()
        self.apart, self.beside, self.last = branch(), nn.Linear(6, 6), branch()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.skip(x) + self.first(x)
        z = z + (self.inner(z) + self.other(z))  # the identity counts, and no block inside it
        z = z.flip(1) + self.last(z)
        return self.beside(y) + self.apart(z)  # of other values


def test_a_skip_may_be_a_projection_with_fewer_layers_or_none():
    torch.manual_seed(0)
    made = TorchCarrier(Projected().eval(), [X, TensorSpec("y", ("batch", 6), "float32")])
    blocks = residual_blocks(made.graph())
    assert [b.name for b in blocks] == ["first.0", "inner.0", "last.0"]
    assert blocks[0].layers == ("first.0", "first.2")
    feed = {n: np.random.default_rng(1).standard_normal((3, 6), np.float32) for n in "xy"}
    masked, gates = gated(made.graph(), blocks)
    zero, one = np.zeros((), np.float32), np.ones((), np.float32)
    (ours,) = runs(made, masked, {**feed, gates[0]: zero, gates[1]: one, gates[2]: zero})
    (theirs,) = runs(made, drop_blocks(made.graph(), [blocks[0], blocks[2]]), feed)
    assert ours == pytest.approx(theirs, abs=1e-5)
