"""Which units go: targets, minimum, multiples, and the same answer every time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.criteria import (
    Queue,
    Ranking,
    Tensors,
    allowed_counts,
    by_loss,
    by_score,
    by_share,
    by_slope,
    unit_step,
)
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Member, Role, Units
from tests.compressor.passes.prune.channel_maps import chain, chains

MINIMA = st.one_of(st.integers(1, 5), st.floats(0.01, 0.9))
STEPS = st.sampled_from([1, 1, 2, 4, 8])


def queues(channels: ChannelMap, minimum: float, multiple: int, seed: int) -> list[Queue]:
    random = np.random.default_rng(seed)
    found = []
    for group in channels.groups:
        if group.frozen:
            continue
        count = len(group.units)
        step = unit_step(channels, group, multiple)
        # Few different scores, so that ties occur.
        scores = random.integers(0, 4, count).astype(float)
        found.append(by_score(group.units, scores, allowed_counts(count, step, minimum)))
    return found


def ranking(channels: ChannelMap, own: list[Queue]) -> Ranking:
    return Ranking(tuple(own), channels.count, np.zeros(0, np.int64))


@given(chains(), MINIMA, STEPS, st.integers(0, 9), st.floats(0.01, 1), st.booleans())
def test_the_target_is_met_as_closely_as_a_step_allows(
    channels, minimum, multiple, seed, share, local
):
    own = queues(channels, minimum, multiple, seed)
    order = ranking(channels, [by_share(q) for q in own] if local else own)
    target = share * channels.macs(order.removed(0))
    length = order.cut(channels.macs, target)
    if channels.macs(order.removed(len(order))) > target:
        assert length == len(order), "all that may go has gone"
        return
    assert channels.macs(order.removed(length)) <= target
    assert length == 0 or channels.macs(order.removed(length - 1)) > target


@given(chains(), MINIMA, STEPS, st.integers(0, 9), st.data())
def test_minimum_and_multiples_are_respected(channels, minimum, multiple, seed, data):
    own = queues(channels, minimum, multiple, seed)
    order = ranking(channels, own)
    removed = order.removed(data.draw(st.integers(0, len(order))))
    for group in channels.groups:
        stay = int((~removed[group.units]).sum())
        total = len(group.units)
        if group.frozen:
            assert stay == total
        least = minimum if isinstance(minimum, int) else minimum * total
        assert stay == total or stay >= max(least - 1e-9, 1)
        axis = channels.parameters[group.name][0]
        assert axis is not None
        left = int((~removed[axis]).sum())
        assert stay == total or left % multiple == 0


@given(chains(), MINIMA, STEPS, st.integers(0, 9), st.data())
def test_what_goes_under_a_mild_target_goes_under_a_hard_one(
    channels, minimum, multiple, seed, data
):
    order = ranking(channels, queues(channels, minimum, multiple, seed))
    low, high = sorted(data.draw(st.floats(0.01, 1)) for _ in range(2))
    whole = channels.macs(order.removed(0))
    hard, mild = (order.removed(order.cut(channels.macs, s * whole)) for s in (low, high))
    assert (hard | ~mild).all()
    assert channels.macs(hard) <= channels.macs(mild)


@given(chains(), STEPS, st.integers(0, 9), st.floats(0.05, 1))
def test_the_least_important_go_first_and_always_the_same(channels, multiple, seed, share):
    found: list[Flags] = []
    for _ in range(2):
        own = queues(channels, 1, multiple, seed)
        order = ranking(channels, own)
        found.append(
            order.removed(order.cut(channels.macs, share * channels.macs(order.removed(0))))
        )
        for queue in own:
            gone = found[-1][queue.units]
            assert not (np.diff(gone.astype(int)) > 0).any(), "a prefix of the queue"
    assert (found[0] == found[1]).all()


def test_global_order_takes_the_least_value_wherever_it_is():
    channels = chain([4, 4, 1], frozen=frozenset({2}))
    full = allowed_counts(4, 1, 1)
    own = [
        by_score(channels.groups[0].units, np.array([4.0, 1.0, 8.0, 9.0]), full),
        by_score(channels.groups[1].units, np.array([2.0, 3.0, 5.0, 6.0]), full),
    ]
    order = ranking(channels, own)
    gone = [set(np.flatnonzero(order.removed(n)).tolist()) for n in range(9)]
    assert gone[3] == {1, 4, 5}  # values 1, 2, 3
    assert gone[4] == {0, 1, 4, 5}
    assert gone[8] == {0, 1, 2, 4, 5, 6}, "one of each stays"


def test_equal_shares_go_of_groups_of_different_size():
    channels = chain([4, 12, 1], frozen=frozenset({2}))
    own = [
        by_share(by_score(g.units, np.zeros(len(g.units)), allowed_counts(len(g.units), 1, 1)))
        for g in channels.groups[:2]
    ]
    removed = ranking(channels, own).removed(8)
    assert [int(removed[g.units].sum()) for g in channels.groups] == [2, 6, 0]


def test_a_ratio_takes_the_nearest_number_that_may_remain():
    def stay(count: int, share: float, step: int = 1, minimum: float = 1) -> int:
        queue = by_score(np.arange(count), np.zeros(count), allowed_counts(count, step, minimum))
        return count - len(queue.nearest(share))

    assert stay(64, 0.5) == 32
    assert stay(10, 0.3) == 7
    assert stay(5, 0.5) == 3, "of 2 and 3, fewer go"
    assert stay(24, 0.5, step=8) == 16, "of 8 and 16, fewer go"
    assert stay(64, 0.99, minimum=0.25) == 16
    assert stay(64, 0.99, minimum=4) == 4
    assert stay(3, 0.99, minimum=4) == 3
    assert stay(6, 0.9, step=8) == 6


@pytest.mark.parametrize(
    ("count", "step", "minimum", "wanted"),
    [
        (4, 1, 1, [1, 2, 3, 4]),
        (4, 1, 0.5, [2, 3, 4]),
        (10, 1, 0.1, list(range(1, 11))),
        (20, 8, 1, [8, 16, 20]),
        (20, 8, 0.5, [16, 20]),
        (6, 8, 1, [6]),
        (1, 1, 1, [1]),
        (8, 1, 1.0, [8]),
    ],
)
def test_numbers_that_may_remain(count, step, minimum, wanted):
    assert allowed_counts(count, step, minimum).tolist() == wanted


def test_steps_count_positions_not_units():
    channels = chain([6, 6, 6, 2], spans=[1, 64, 6, 1], frozen=frozenset({3}))
    assert [unit_step(channels, g, 8) for g in channels.groups[:3]] == [8, 1, 4]


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(1, 20))
def test_losses_make_ascending_values(losses, count):
    queue = by_score(np.arange(count), np.zeros(count), allowed_counts(count, 1, 1))
    values = by_loss(queue, (0.25, 0.5, 0.75), losses).values
    assert (np.diff(values) >= -1e-12).all()
    assert (values >= 0).all()


def test_losses_are_interpolated_and_balance_groups():
    queue = by_score(np.arange(8), np.zeros(8), allowed_counts(8, 1, 1))
    robust = by_loss(queue, (0.25, 0.5, 0.75), (0.0, 0.1, 0.2))
    assert robust.values.tolist() == pytest.approx([0, 0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    units = np.arange(8, 16)
    fragile = by_loss(Queue(units, queue.values, queue.remaining), (0.25, 0.5, 0.75), (1, 2, 4))
    removed = Ranking((robust, fragile), 16, np.zeros(0, np.int64)).removed(7)
    assert removed[:8].sum() == 7
    assert removed[8:].sum() == 0


@given(
    points=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=8),
    scale=st.sampled_from([1.0, 1e-6, 1e6]),
)
def test_slopes_are_those_of_the_lower_hull(points, scale):
    """The hull is the greatest convex function below what was measured; infinite behind it."""
    losses = np.maximum.accumulate([float(loss) for loss, _ in points])
    saved = np.cumsum([float(step) for _, step in points]) * scale
    gone = range(1, len(points) + 1)
    queue = by_score(np.arange(9), np.zeros(9), allowed_counts(9, 1, 1))
    values = by_slope(queue, gone, losses, saved).values
    assert (values[1:] >= values[:-1]).all()
    assert (values >= 0).all()
    at, heights = np.array([0.0, *saved]), np.array([0.0, *losses])
    for index, value in enumerate(values[: len(points)]):
        # A chord over the unit's own savings, that no other undercuts.
        chords = [
            (heights[right] - heights[left]) / (at[right] - at[left])
            for left in range(index + 1)
            for right in range(index + 1, len(at))
            if at[right] > at[left]
        ]
        if not np.isinf(value):
            assert any(value == pytest.approx(chord) for chord in chords)
    assert np.isinf(values[len(points) :]).all()


def test_a_dear_first_half_is_judged_with_the_cheap_second_and_savings_count():
    queue = by_score(np.arange(8), np.zeros(8), allowed_counts(8, 1, 1))
    steep = by_slope(queue, (2, 4, 7), (4.0, 5.0, 20.0), (1.0, 4.0, 7.0))
    assert steep.values.tolist() == [1.25] * 4 + [5.0] * 3 + [np.inf]
    units = np.arange(8, 16)
    large = by_slope(
        Queue(units, queue.values, queue.remaining), (2, 4, 7), (8.0, 16.0, 28.0), (8, 16, 28)
    )
    removed = Ranking((steep, large), 16, np.zeros(0, np.int64)).removed(7)
    assert np.flatnonzero(removed).tolist() == [8, 9, 10, 11, 12, 13, 14], "twice as much for it"


def test_what_saves_nothing_goes_last():
    queue = by_score(np.arange(4), np.zeros(4), allowed_counts(4, 1, 1))
    assert np.isinf(by_slope(queue, (1, 2, 3), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)).values).all()


def test_weights_are_counted_over_all_axes():
    channels = chain([3, 4], spans=[2, 1], frozen=frozenset({1}))
    sizes = Tensors(
        7,
        tuple(
            (5, tuple(a for a in axes if a is not None)) for axes in channels.parameters.values()
        ),
    )
    removed = np.zeros(7, dtype=bool)
    assert sizes.count(removed) == 7 + 5 * 6 + 5 * 4 * 6
    removed[1] = True
    assert sizes.count(removed) == 7 + 5 * 4 + 5 * 4 * 4


def test_two_hundred_layers_are_cut_in_well_under_two_seconds():
    channels = chain([256] * 200, frozen=frozenset({199}))
    own = queues(channels, 0.1, 8, 0)
    start = time.process_time()
    order = ranking(channels, own)
    order.cut(channels.macs, 0.5 * channels.macs(order.removed(0)))
    assert time.process_time() - start < 2  # takes 0.1 s


def test_equal_values_go_from_all_groups_in_turn():
    channels = chain([4, 4, 1], frozen=frozenset({2}))
    full = allowed_counts(4, 1, 1)
    own = [by_score(g.units, np.zeros(4), full) for g in channels.groups[:2]]
    assert np.flatnonzero(ranking(channels, own).removed(4)).tolist() == [0, 1, 4, 5]


def test_the_shortest_length_that_meets_the_target():
    units = np.arange(8)
    own = by_score(units, units.astype(float), allowed_counts(8, 1, 1))
    order = Ranking((own,), 10, np.array([9]))
    assert order.removed(0).nonzero()[0].tolist() == [9]
    looked_at = []

    def left(removed: Flags) -> float:
        looked_at.append(int(removed[:8].sum()))
        return 9.0 - float(removed[:8].sum())

    for target, length in ((9, 0), (8.5, 1), (8, 1), (6, 3), (4, 5), (2, 7), (1, 8), (-1, 8)):
        assert order.cut(left, target) == length
    looked_at.clear()
    order.cut(left, 6)
    assert looked_at == [4, 2, 3], "by bisection"


@given(chains(), MINIMA, STEPS, st.integers(0, 9), st.floats(0.01, 1))
def test_nothing_goes_that_the_target_does_not_need(channels, minimum, multiple, seed, share):
    own = queues(channels, minimum, multiple, seed)
    order = ranking(channels, own)
    target = share * channels.macs(order.removed(0))
    cut = order.removed(order.cut(channels.macs, target))
    found = order.needed(channels.macs, target)
    assert not (found & ~cut).any(), "a part of what the cut takes"
    if channels.macs(cut) > target:
        assert (found == cut).all()
        return
    assert channels.macs(found) <= target
    for queue in own:
        gone = int(found[queue.units].sum())
        assert found[queue.units[:gone]].all(), "a prefix of the queue"
        assert len(queue.units) - gone in queue.remaining
        if gone:
            less = found.copy()
            less[queue.units[queue.fewer(gone) : gone]] = False
            assert channels.macs(less) > target


def test_small_units_stay_where_a_large_one_saves_more_than_was_missing():
    """Each of four units saves 1, and then one saves 8: 10 are missing, so that two may stay."""
    few = allowed_counts(4, 1, 1)
    small = by_score(np.arange(4), np.array([1.0, 2.0, 3.0, 9.0]), few)
    large = by_score(np.arange(4, 8), np.array([4.0, 9.0, 9.0, 9.0]), few)
    order = Ranking((small, large), 8, np.zeros(0, np.int64))

    def cost(removed: Flags) -> float:
        return 20.0 - removed[:4].sum() - 8.0 * removed[4:].sum()

    assert np.flatnonzero(order.removed(order.cut(cost, 11.0))).tolist() == [0, 1, 2, 4]
    assert np.flatnonzero(order.needed(cost, 11.0)).tolist() == [0, 4]
    assert np.flatnonzero(order.needed(cost, 12.0)).tolist() == [4]


def test_an_axis_has_a_say_if_its_units_are_outputs_of_one_size():
    axes: dict[str, list[int]] = {
        "read": [0, 0, 0, 0, 0, 1, 1, 1, 1, 1],  # fives, but of an input
        "pairs": [0, 0, 1, 1, -1],
        "uneven": [0, 1, 1, 1],
        "threes": [0, 0, 0, 1, 1, 1],
        "elsewhere": [2, 2],
        "scale": [0] * 6 + [1] * 6,
    }
    roles: dict[str, Role] = {"read": "input", "scale": "norm-scale"}

    def step(names: list[str], multiple: int, units: list[int]) -> int:
        members = tuple(Member(name, 0, roles.get(name, "output")) for name in [*names, "none"])
        group = ChannelGroup("g", np.array(units, np.int64), members)
        parameters: dict[str, tuple[Units | None, ...]] = {
            name: (np.array(axis, np.int64),) for name, axis in axes.items()
        }
        parameters["none"] = (None,)
        return unit_step(ChannelMap(4, (group,), parameters, (), (), ()), group, multiple)

    assert step(["read"], 10, [0, 1]) == 1
    assert step(["read", "pairs"], 10, [0, 1]) == 5
    assert step(["pairs", "read", "scale"], 12, [0, 1]) == 6
    assert step(["uneven", "pairs"], 12, [0, 1]) == 6
    assert step(["threes", "pairs"], 12, [0, 1]) == 12  # 4 and 6
    assert step(["pairs", "threes"], 6, [0, 1]) == 6  # 3 and 2
    assert step(["elsewhere", "pairs"], 8, [0, 1]) == 4
    assert step(["pairs"], 8, [3]) == 1
    assert step(["pairs"], 8, []) == 1
    assert step(["pairs"], 8, [1]) == 4


def test_the_last_two_losses_go_on():
    queue = by_score(np.arange(10), np.zeros(10), allowed_counts(10, 1, 1))
    found = by_loss(queue, (0.2, 0.4, 0.5, 0.8), (1.0, 2.0, 4.0, 10.0)).values
    assert found.tolist() == pytest.approx([0.5, 1, 1.5, 2, 4, 6, 8, 10, 12, 14])
    one = by_share(by_score(np.arange(1), np.zeros(1), allowed_counts(1, 1, 1)))
    assert one.values.tolist() == [1]
