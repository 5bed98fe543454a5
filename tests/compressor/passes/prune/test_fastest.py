"""The search for widths and blocks, on tables that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import SpecError
from compressor.passes.prune.criteria import allowed_counts, by_score
from compressor.passes.prune.structured.choices import Network, State
from compressor.passes.prune.structured.fastest import Search, _on_line
from compressor.passes.prune.structured.segments import Segment, Variant
from compressor.types.tensors import Array

GROUPS, SIZE, BLOCK = 4, 32, 16


def network() -> Network:
    """Four segments in sequence: each one's time grows with two groups' widths, and three end in a
    block that holds the group of that number."""
    count = GROUPS * SIZE
    queues, segments = [], []
    for i in range(GROUPS):
        units = np.arange(i * SIZE, (i + 1) * SIZE)
        queues.append(by_score(units, np.arange(SIZE, dtype=float), allowed_counts(SIZE, 1, 2)))
        flags = np.zeros(count, dtype=bool)
        flags[units] = True
        flags[-SIZE:] = True  # all read the last group
        blocks = (i,) if i < GROUPS - 1 else ()
        segments.append(Segment((), (f"v{i}",), (), blocks, flags, ""))
    inside = {i: (i,) for i in range(GROUPS - 1)}
    return Network(tuple(segments), tuple(queues), inside, count, np.zeros(count, dtype=bool))


def blocks_of(width: int) -> int:
    return ceil(width / BLOCK)


def seconds(segment: Segment, variant: Variant) -> float:
    """Kernels that compute sixteen channels at a time, and some time whatever is left."""
    if {*segment.blocks} & variant.dropped:
        return 0.1
    index = int(segment.exits[0][1:])
    left = (~variant.removed).reshape(GROUPS, SIZE).sum(1)
    return 0.5 + blocks_of(left[index]) * (1 + blocks_of(left[-1]))


def search(
    weights: Sequence[float],
    correction: float = 1.0,
    *,
    slope: float = 1.0,
    idle: float = 0.0,
    together: Array | None = None,
) -> Search:
    """Return a search.

    Args:
        correction: of what the network takes without anything, over what the table says.
        slope: of the time that the network saves, over what the table says.
        idle: share of what the table says is saved that runs do not save.
        together: what is lost where two groups lose all, ``[groups, groups]``.
    """
    made = network()

    def timed(wanted: Sequence[tuple[Segment, Variant]]) -> list[float]:
        return [seconds(*one) for one in wanted]

    def shared(variant: Variant) -> float:
        full = made.variant(made.full)
        part, whole = (sum(timed([(s, v) for s in made.segments])) for v in (variant, full))
        changed = variant.removed.any() or variant.dropped
        saved = max(0.0, 1 - part / whole - idle) / (1 - idle)
        return (1 - slope * saved) * (correction if changed else 1.0)

    def loss(variant: Variant) -> float:
        gone = variant.removed.reshape(GROUPS, SIZE).mean(1)
        kept = [i not in variant.dropped for i in range(GROUPS)]
        narrow = sum(w * g**2 for w, g, k in zip(weights, gone, kept, strict=True) if k)
        left = gone * kept  # a block that is gone loses nothing with others
        pairs = 0.0 if together is None else left @ together @ left
        return float(narrow + pairs + sum(2 * weights[i] for i in variant.dropped))

    return Search(made, timed, shared, loss, lambda least, _: f"set it to {least:.2f} or more")


def share(made: Search, state: State) -> float:
    total, full = (made._total(s) for s in (state, network().full))
    return total / full


weights_of = st.lists(st.floats(0.1, 10), min_size=GROUPS, max_size=GROUPS)


def test_only_steps_of_the_kernels_remain():
    assert set(search([1.0] * GROUPS).widths) == {(16, 32)}


@settings(max_examples=30)
@given(weights=weights_of, target=st.floats(0.2, 0.95))
def test_the_target_is_met_and_no_worse_than_by_uniform_widths(weights, target):
    made = search(weights)
    found = made.find(target)
    assert found.measured <= target
    assert found.predicted == pytest.approx(found.measured)
    assert found.predicted == pytest.approx(share(made, found.state))
    uniform = [State((w,) * GROUPS) for w in range(2, SIZE + 1)]
    fitting = [made.loss(s) for s in uniform if share(made, s) <= target - 0.01]
    if fitting:
        assert made.loss(found.state) <= min(fitting) * 1.05 + 1e-9


@settings(max_examples=15)
@given(weights=weights_of, target=st.floats(0.3, 0.9))
def test_a_milder_target_costs_no_more(weights, target):
    made = search(weights)
    strict, mild = (made.find(t).state for t in (target, min(target + 0.2, 1.0)))
    assert made.loss(mild) <= made.loss(strict) * 1.05 + 1e-9


def test_a_block_that_does_nothing_is_dropped_first():
    found = search([5.0, 1e-6, 5.0, 5.0]).find(0.85)
    assert found.state.dropped == {1}
    assert found.state.widths[0] == found.state.widths[2] == SIZE


def test_what_the_whole_network_takes_corrects_the_table():
    found = search([1.0, 2.0, 3.0, 4.0], correction=1.15).find(0.6)
    assert found.measured <= 0.6
    assert found.predicted == pytest.approx(found.measured, rel=0.1)


def test_what_segments_take_alone_is_the_same_at_all_widths():
    """The first correction is right: the second state is the last, and is as fast as predicted."""
    made = search([1.0, 2.0, 3.0, 4.0], slope=1.4)
    seen: list[float] = []
    measured = made._measured
    made._measured = lambda s: seen.append(measured(s)) or seen[-1]  # type: ignore[method-assign, func-returns-value]  # the times that decide
    found = made.find(0.6)
    assert found.measured <= 0.6
    assert found.predicted == pytest.approx(found.measured)
    assert len(set(seen)) == 2


def test_shares_are_read_off_between_runs_and_in_proportion_beyond_them():
    """The table says 0.7 and 0.5 where runs take 0.8 and 0.5, and one is one."""
    tables, runs = [1.0, 0.5, 0.7], [1.0, 0.5, 0.8]
    shares = [0.4, 0.5, 0.6, 0.7, 0.85]
    assert [_on_line(tables, runs, x) for x in shares] == pytest.approx([0.4, 0.5, 0.65, 0.8, 0.9])
    assert _on_line([1.0], [1.0], 0.6) == pytest.approx(0.6)
    assert _on_line([1.0, 0.8], [1.0, 0.9], 0.6) == pytest.approx(0.8)
    assert _on_line([1.02, 1.0], [0.7, 1.0], 0.6) == 0.6  # runs that save nothing correct nothing


@pytest.mark.parametrize("target", [0.45, 0.6, 0.75])
@pytest.mark.parametrize("seed", [1, 2, 10, 14, 22, 31, 34, 37])
def test_what_is_lost_together_counts(seed: int, target: float):
    """No state of all that fit loses much less, though single losses say nothing of pairs."""
    rng = np.random.default_rng(seed)
    pairs = np.triu(rng.uniform(0, 12, (GROUPS, GROUPS)), 1)
    made = search(rng.uniform(0.5, 2, GROUPS).tolist(), together=pairs)
    found = made.find(target)
    lines = product(*made.widths)
    drops = [frozenset(c) for n in range(GROUPS) for c in combinations(range(GROUPS - 1), n)]
    states = [State(widths, dropped) for widths in lines for dropped in drops]
    least = min(made.loss(s) for s in states if share(made, s) <= target)
    assert made.loss(found.state) <= least * 1.02


def test_a_target_below_everything_gone_says_what_was_measured():
    # Of 4 (0.5 + 2 (1 + 2)) = 26, three times 0.1 remains and 0.5 + 1 (1 + 1).
    with pytest.raises(SpecError, match=r"target.latency: is 0.05, and 0.11 of the time") as raised:
        search([1.0] * GROUPS).find(0.05)
    assert "3 blocks dropped" in raised.value.problem
    assert "0.12 or more" in raised.value.remedy


def test_only_a_run_of_the_whole_network_refuses_a_target():
    """The table says 0.11 with everything gone, and the network takes 0.6 times as long as that."""
    found = search([1.0] * GROUPS, correction=0.6).find(0.1)
    assert found.measured <= 0.1
    with pytest.raises(SpecError, match=r"is 0.05, and 0.06 of the time was measured"):
        search([1.0] * GROUPS, correction=0.6).find(0.05)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("correction", [1.0, 1.03])
def test_a_first_choice_that_saved_nothing_is_not_the_last(target: float, correction: float):
    """A small network took 1.03 of its time where the table said 0.69, and that was the answer."""
    made = search([1.0, 2.0, 3.0, 4.0], idle=0.35, correction=correction)
    found = made.find(target)
    assert found.measured <= target
    assert made.loss(found.state) < made.loss(network().least)


def test_everything_gone_is_an_answer_if_nothing_else_is_fast_enough():
    made = search([1.0, 2.0, 3.0, 4.0])
    table = made._measured
    least = network().least
    made._measured = lambda s: table(s) if s == least else 1.0  # type: ignore[method-assign]
    found = made.find(0.5)
    assert found.state == least
    with pytest.raises(SpecError, match=r"0.11 of the time was measured with every removable"):
        made.find(0.1)


def test_of_choices_that_are_fast_enough_the_one_that_loses_least_counts():
    made = search([1.0, 2.0, 3.0, 4.0], correction=0.9)
    seen: list[tuple[float, float]] = []
    measured = made._measured

    def noted(state: State) -> float:
        seen.append((measured(state), made.loss(state)))
        return seen[-1][0]

    made._measured = noted  # type: ignore[method-assign]  # the times that decide
    found = made.find(0.6)
    assert made.loss(found.state) == min(loss for time, loss in seen if time <= 0.6)
    assert len(seen) > 1


def test_the_same_table_gives_the_same_choice():
    first, second = (search([1.0, 2.0, 3.0, 4.0]).find(0.5) for _ in range(2))
    assert vars(first) == vars(second)


def test_all_widths_of_a_block_with_many_groups_are_weighed():
    """Eight groups, of which each loses more the more it has lost: all are to lose the same."""
    many, size = 8, 16
    units = np.arange(many * size).reshape(many, size)
    queues = tuple(
        by_score(u, np.arange(size, dtype=float), allowed_counts(size, 1, 1)) for u in units
    )
    flags = np.ones(many * size, dtype=bool)
    segment = Segment((), ("v",), (), (0,), flags, "")
    inside = {0: tuple(range(many))}
    made = Network((segment,), queues, inside, flags.size, np.zeros_like(flags))

    def timed(wanted: Sequence[tuple[Segment, Variant]]) -> list[float]:
        return [0.0 if v.dropped else float((~v.removed).sum()) for _, v in wanted]

    def loss(variant: Variant) -> float:
        gone = variant.removed.reshape(many, size).mean(1)
        return 100.0 if variant.dropped else float(np.square(gone).sum())

    found = Search(
        made, timed, lambda v: timed([(segment, v)])[0] / flags.size, loss, lambda *_: ""
    ).find(0.5)
    assert found.measured <= 0.5
    assert loss(made.variant(found.state)) <= 1.05 * many * 0.25
