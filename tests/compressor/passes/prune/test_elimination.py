"""Units that go one by one: what is lost is what remains once everything else is solved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from compressor.passes.prune.maths.elimination import Reader, eliminate


def reader(seed: int, owners: list[int], rows: int = 3) -> Reader:
    torch.manual_seed(seed)
    columns = len(owners)
    inputs = torch.randn(4 * columns, columns, dtype=torch.float64)
    inputs = inputs @ torch.randn(columns, columns, dtype=torch.float64)
    weight = torch.randn(rows, columns, dtype=torch.float64)
    return Reader((weight,), inputs.T @ inputs, torch.tensor(owners))


def share_lost(one: Reader, gone: list[int]) -> float:
    """Solve a weight without some units directly; the error's share of the output's power."""
    stays = torch.tensor([int(unit) not in gone for unit in one.owners])
    moment = one.moment + 1e-3 * one.moment.diagonal().mean() * torch.eye(len(one.moment))
    solved = torch.zeros_like(one.weights[0])
    cross = (one.weights[0] @ moment)[:, stays]
    solved[:, stays] = torch.linalg.solve(moment[stays][:, stays], cross.T).T
    change = solved - one.weights[0]
    power = ((one.weights[0] @ one.moment) * one.weights[0]).sum()
    return float(((change @ moment) * change).sum() / power)


@given(st.integers(0, 999), st.lists(st.integers(-1, 5), min_size=6, max_size=14))
def test_losses_are_those_of_weights_that_are_solved_anew(seed, owners):
    """Units have different numbers of columns, or none, and some columns are nobody's."""
    readers = [reader(seed, owners), reader(seed + 1, owners[::-1], rows=2)]
    order, losses = eliminate(readers, 6)
    assert sorted(order) == list(range(6))
    assert losses == sorted(losses)
    for count in range(1, 7):
        wanted = sum(share_lost(one, order[:count]) for one in readers)
        assert losses[count - 1] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    first = [sum(share_lost(one, [unit]) for one in readers) for unit in range(6)]
    assert losses[0] == pytest.approx(min(first), rel=1e-6, abs=1e-9)


def test_weights_that_read_the_same_lose_what_they_lose_one_by_one():
    """Each as a share of its own squares; the inverse is computed once."""
    one = reader(0, [0, 1, 1, -1, 2, 3])
    large = Reader((10 * one.weights[0][:2], one.weights[0][2:]), one.moment, one.owners)
    apart = [Reader((weight,), one.moment, one.owners) for weight in large.weights]
    order, losses = eliminate([large], 4)
    assert eliminate(apart, 4) == (order, pytest.approx(losses, rel=1e-9))
    assert losses[-1] == pytest.approx(sum(share_lost(part, order) for part in apart), rel=1e-6)


def test_a_moment_that_rounding_made_indefinite_is_inverted():
    one = reader(0, [0, 1, 2])
    values, vectors = torch.linalg.eigh(one.moment)
    values[0] = -0.01 * values.mean()  # beyond what damping adds
    indefinite = Reader(one.weights, (vectors * values) @ vectors.T, one.owners)
    order, losses = eliminate([indefinite], 3)
    assert sorted(order) == [0, 1, 2]
    assert losses == sorted(losses)


@pytest.mark.parametrize("units", [5, 6])
def test_the_order_is_the_same_where_a_state_is_made_smaller(units):
    """Once a fifth of the units have gone, which of six is after two, and of five too."""
    one = reader(3, [unit for unit in range(units) for _ in range(2)])
    order, losses = eliminate([one], units)
    for count, lost in enumerate(losses, 1):
        assert lost == pytest.approx(share_lost(one, order[:count]), rel=1e-6)
    left = list(range(units))
    for unit in order:
        done = [other for other in order if other not in left]
        costs = {u: share_lost(one, [*done, u]) for u in left}
        assert costs[unit] == pytest.approx(min(costs.values()), rel=1e-6)
        left.remove(unit)


def alike(units: int) -> tuple[Reader, Tensor]:
    """Return a reader of units of which each pair of neighbours is the same but for its size."""
    torch.manual_seed(0)
    inputs = torch.randn(3 * units, units // 2, dtype=torch.float64).repeat_interleave(2, 1)
    weight = 1.0 + torch.rand(4, units, dtype=torch.float64)
    return Reader((weight,), inputs.T @ inputs, torch.arange(units)), inputs


@pytest.mark.parametrize(("units", "at_once"), [(20, 1), (130, 2), (260, 3)])
def test_of_two_that_are_alike_one_goes_for_free_and_the_other_last(units, at_once):
    """Also where several go at a time: no pair may go together while others have both."""
    one, _ = alike(units)
    order, losses = eliminate([one], units)
    half = units // 2
    assert {unit // 2 for unit in order[:half]} == set(range(half))
    assert losses[half - 1] < 1e-2  # by damping: 5e-3 at most, measured
    assert losses[-1] == pytest.approx(1.0, abs=2e-2)
    assert sorted(order) == list(range(units))
    together = [1 + n for n in range(at_once)]  # units of a round share its loss
    assert losses[:at_once] == pytest.approx([losses[0] * n for n in together], rel=1e-9)
    assert losses[at_once] != pytest.approx(losses[0] * (at_once + 1), rel=1e-9)


def test_a_weight_of_zeros_and_inputs_of_zeros_lose_nothing():
    one = reader(0, [0, 1, 2])
    silent = Reader((torch.zeros_like(one.weights[0]),), one.moment, one.owners)
    unfed = Reader(one.weights, torch.zeros_like(one.moment), one.owners)
    assert eliminate([silent, unfed], 3)[1] == pytest.approx([0.0, 0.0, 0.0])


def test_damping_is_a_share_of_the_mean_power_of_inputs_that_are_not_always_zero():
    """So the scale of inputs, and columns that are always zero, change nothing."""
    assert eliminate([Reader((torch.ones(1, 1),), 3 * torch.ones(1, 1), torch.zeros(1))], 1) == (
        [0],
        [pytest.approx(1.001)],
    )
    one = reader(0, [0, 1, 2, 1, 0, 2])
    order, losses = eliminate([one], 3)
    small = Reader(one.weights, 1e-6 * one.moment, one.owners)
    dead = functional.pad(one.moment, (0, 2, 0, 2))
    weight, owners = (
        functional.pad(x, (0, 2), value=v) for x, v in ((one.weights[0], 1), (one.owners, -1))
    )
    more = Reader((weight,), dead, owners)
    for other in (small, more):
        assert eliminate([other], 3) == (order, pytest.approx(losses, rel=1e-9))


def test_what_is_given_in_float32_is_computed_in_float64():
    one = reader(0, [0, 1, 2, 1, 0, 2])
    short = Reader((one.weights[0].float(),), one.moment.float(), one.owners)
    same = Reader((short.weights[0].double(),), short.moment.double(), one.owners)
    assert eliminate([short], 3) == eliminate([same], 3)
