"""What the outputs lose once layers are solved: by maths, and on small networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import macs
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.maths.least_squares import Start, Sums, without_columns
from compressor.passes.prune.structured import moments
from compressor.passes.prune.structured.removal import GatedModel
from compressor.passes.prune.structured.segments import Variant
from compressor.passes.prune.structured.solved import OutputLoss, SolvedModel, first_batches
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch
from tests.compressor.graph.channels.channel_graphs import graph
from tests.compressor.passes.prune.structured_models import (
    Given,
    LayerNormed,
    Plain,
    Residual,
    carrier,
    data,
    declared,
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(2, 8),
    count=st.integers(1, 40),
    shifts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_remains_comes_nearest_to_what_the_layer_gave(rows, columns, count, shifts, seed):
    """Also with fewer samples than columns, and with a column that is always zero."""
    torch.manual_seed(seed)
    inputs = torch.randn(count, columns, dtype=torch.float64)
    inputs[:, 0] = 0.0
    weight, bias = torch.randn(rows, columns).double(), torch.randn(rows).double()
    sums = Sums(columns, 0)
    sums.add(inputs, inputs[:, :0])
    gone = torch.arange(columns) >= max(1, columns // 2)
    start = Start(weight, bias, shifts, torch.ones(rows).double())
    found, shifted = without_columns(start, sums, gone, penalty=1e-9)
    wanted = inputs @ weight.T + bias
    plain = torch.where(gone, 0.0, weight)

    def error(weights: torch.Tensor, constant: torch.Tensor) -> float:
        return float((inputs @ weights.T + constant - wanted).square().sum())

    design = inputs[:, ~gone]
    missing = wanted - bias
    if shifts:
        design = torch.cat([design, torch.ones(count, 1).double()], 1)
    best = torch.linalg.lstsq(design, missing, driver="gelsd").solution
    least = float((design @ best - missing).square().sum())
    assert not found[:, gone].any()
    assert error(found, shifted) <= error(plain, bias) + 1e-9
    assert error(found, shifted) <= least + 1e-5 * (1 + error(plain, bias))
    assert shifts or torch.equal(shifted, bias)


def twins() -> TorchCarrier:
    """Channels in pairs that are equal but for their size: either stands for the other."""
    model = carrier(Plain())
    with torch.no_grad():
        for parameter in model.module.first.parameters():
            parameter[4:] = 2 * parameter[:4]
    return model


def losses(model: TorchCarrier, removed: np.ndarray, given: Given) -> tuple[float, float]:
    """Return the loss with zeros in place of units, and with the layers that read them solved."""
    channels = map_channels(model.graph())
    batches = first_batches(given, 16)

    def gated(others):
        return GatedModel(model, channels, (), others=others)

    groups = [g for g in channels.groups if not g.frozen]
    solved = SolvedModel(model, channels, groups, gated, moments.Moments(model, given.batches))
    runner, variant = model.runner(), Variant(removed)
    loss = OutputLoss([runner.run(b) for b in batches])
    zeroed = gated(())
    return (
        loss(zeroed.run(b, variant) for b in batches),
        loss(solved.run(b, variant) for b in batches),
    )


def test_a_channel_that_another_stands_for_costs_nothing(monkeypatch):
    model = twins()
    removed = np.zeros(map_channels(model.graph()).count, dtype=bool)
    removed[[0, 1, 6]] = True
    plain, solved = losses(model, removed, data())
    assert plain > 0.01
    assert solved < 1e-3 * plain
    monkeypatch.setattr(moments, "AT_ONCE", 0)
    assert losses(model, removed, data()) == (plain, solved), "however many fit into memory"


@pytest.mark.parametrize("module", [Plain, Residual, LayerNormed])
def test_solving_loses_less(module):
    model = carrier(module())
    removed = np.zeros(map_channels(model.graph()).count, dtype=bool)
    for group in map_channels(model.graph()).groups:
        if not group.frozen:
            removed[group.units[::3]] = True
    plain, solved = losses(model, removed, data())
    assert solved < plain


def test_nothing_removed_is_the_model_itself():
    model = carrier(Residual())
    removed = np.zeros(map_channels(model.graph()).count, dtype=bool)
    assert losses(model, removed, data()) == pytest.approx((0.0, 0.0), abs=1e-9)


def outputs(constant: float, count: int = 32) -> list[Batch]:
    signal = np.random.default_rng(0).standard_normal((count, 5))
    return [{"a": (constant + signal).astype(np.float32)}]


@pytest.mark.parametrize("constant", [0.0, 100.0])
def test_a_constant_part_of_an_output_does_not_count(constant):
    loss = OutputLoss(outputs(constant))
    (batch,) = outputs(constant)
    centred = batch["a"] - batch["a"].mean(0)
    # An error of a tenth of the signal's power, over the nine tenths that are still explained.
    near = {"a": batch["a"] + np.sqrt(0.1) * centred}
    assert loss([near]) == pytest.approx(0.1 / 0.9, rel=1e-3)
    assert loss([{"a": np.full_like(batch["a"], batch["a"].mean(0))}]) == pytest.approx(
        20, rel=0.01
    )
    assert loss([batch]) == 0.0


def test_each_output_counts_the_same_however_large_it_is():
    (batch,) = outputs(0.0)
    both = {**batch, "b": 1000 * batch["a"]}
    one = OutputLoss([both])([{**both, "a": 0 * batch["a"]}])
    other = OutputLoss([both])([{**both, "b": 0 * batch["a"]}])
    assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("lengths", [(3, 3), (3, 5)])
def test_outputs_of_any_length_compare(lengths):
    batches = [{"a": np.ones((1, n), np.float32)} for n in lengths]
    loss = OutputLoss(batches)
    assert loss(batches) == 0
    assert loss([{"a": 0 * b["a"]} for b in batches]) > 1


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_that_only_one_model_has_are_compared_with_zeros(rows):
    """The boxes of a detector are as many as it sees."""
    loss = OutputLoss([{"a": np.ones((3, 4), np.float32)}])
    extended = {"a": np.ones((rows, 4), np.float32)}
    lost = abs(rows - 3) / 3
    assert loss([extended]) == pytest.approx(lost / max(1 - lost, 0.05))


@dataclass(frozen=True)
class Fixed(Given):
    """A model that takes one sample at a time."""

    def probe(self, count: int) -> Batch:
        """Return the first sample, whatever is asked for."""
        return super().probe(min(count, 1))


def test_where_the_batch_is_fixed_many_are_looked_at():
    """A detector's first image may hold nothing to detect."""
    whole = data(3).data
    singles = tuple({n: a[i : i + 1] for n, a in b.items()} for b in whole for i in range(8))
    assert [len(b["image"]) for b in first_batches(Fixed(singles), 16)] == [1] * 16
    assert [len(b["image"]) for b in first_batches(Fixed(singles[:3]), 16)] == [1] * 3
    assert [len(b["image"]) for b in first_batches(Given(whole), 8)] == [8]
    assert [len(b["image"]) for b in first_batches(Given(whole), 16)] == [8, 8]
    assert len(first_batches(Fixed(singles, made_up=True), 16)) == 1


OPEN = """(float[batch, 3, height, width] image) => (float[batch, 4] output) {
    fine = Conv<pads = [1, 1, 1, 1]>(image, fine_weight)
    rectified = Relu(fine)
    finer = Conv<pads = [1, 1, 1, 1]>(rectified, finer_weight)
    positive = Relu(finer)
    few = MaxPool<kernel_shape = [8, 8], strides = [8, 8]>(positive)
    coarse = Conv<pads = [1, 1, 1, 1]>(few, coarse_weight)
    active = Relu(coarse)
    mean = GlobalAveragePool(active)
    flat = Flatten(mean)
    output = MatMul(flat, head)
}"""


def test_work_counts_at_the_lengths_of_the_data() -> None:
    """A position of a fine and of a coarse image counted alike where their sides are open."""
    form = {"fine_weight": (12, 3, 3, 3), "finer_weight": (12, 12, 3, 3)}
    model = OnnxCarrier(graph(OPEN, {**form, "coarse_weight": (96, 12, 3, 3), "head": (96, 4)}))
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32), np.float32)
    given = Given(({"image": images},))
    context = PassContext(shapes={"image": (1, 3, 32, 32)}, samples=given)
    step = declared(target={"macs": 0.5})
    step.survey(model, context)
    after = step.apply(model, context, {}).carrier
    before, left = (macs(c.graph(), context.shapes) for c in (model, after))
    assert before > 1e6
    assert left <= 0.5 * before
