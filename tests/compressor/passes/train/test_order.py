"""Which samples a step has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.train.job import Micro, Order

ORDERS = st.builds(
    Order,
    samples=st.integers(1, 60),
    batch=st.integers(1, 4).map(lambda n: 2 * n),
    seed=st.integers(0, 3),
    held_out=st.sampled_from([0.0, 0.1, 0.5]),
    parts=st.sampled_from([1, 2]),
    whole=st.booleans(),
)


@given(ORDERS)
def test_an_epoch_has_every_sample_once_at_most(order: Order) -> None:
    steps = order.steps_in_epoch
    for epoch in range(2):
        seen = [order.rows(step) for step in range(epoch * steps, (epoch + 1) * steps)]
        rows = np.concatenate([np.zeros(0, np.int64), *seen])
        assert len(set(rows.tolist())) == len(rows)
        assert set(rows.tolist()) <= set(order.trained.tolist())
        left_out = len(order.trained) - len(rows)
        fewest = min(2 * order.parts, order.batch)  # batch norm needs two in each process
        assert left_out < (order.batch if order.whole else fewest)
        assert all(len(r) >= fewest for r in seen)
        assert all(len(r) == order.batch for r in (seen if order.whole else seen[:-1]))


@given(ORDERS)
def test_held_out_samples_are_never_trained_on(order: Order) -> None:
    both = np.concatenate([order.validation, order.trained])
    assert sorted(both.tolist()) == list(range(order.samples))
    assert len(order.validation) == round(order.held_out * order.samples)


@given(ORDERS, st.integers(0, 20))
def test_processes_share_a_step(order: Order, step: int) -> None:
    if not order.steps_in_epoch:
        return
    parts = [order.part(step, rank) for rank in range(order.parts)]
    assert sorted(np.concatenate(parts).tolist()) == sorted(order.rows(step).tolist())
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 80), st.integers(1, 40))
def test_no_part_of_a_step_is_a_single_sample(samples: int, size: int) -> None:
    """Batch norm ended a training with 33 samples in a step and ``micro-batch: 32``."""
    numbers = np.arange(samples)
    parts = Micro(numbers, {"x": torch.from_numpy(numbers)}).divided(size)
    assert np.array_equal(np.concatenate([part.rows for part in parts]), numbers)
    assert all(part.tensors["x"].tolist() == part.rows.tolist() for part in parts)
    sizes = [len(part.rows) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(2, samples, size)
    assert max(sizes) <= max(size, 3 if size == 2 else 1)


def test_epochs_and_seeds_differ() -> None:
    order, other = Order(50, 50, 0), Order(50, 50, 1)
    assert not np.array_equal(order.rows(0), order.rows(1))
    assert not np.array_equal(order.rows(0), other.rows(0))
    assert np.array_equal(order.rows(1), Order(50, 50, 0).rows(1))
