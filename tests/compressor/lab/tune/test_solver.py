"""The choice of widths against all choices, and the order in which candidates are proved."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.lab.tune.solver import (
    Entry,
    Reached,
    Standing,
    beyond_the_expected,
    cost_of,
    expected_noise,
    middle_of_the_gap,
    next_noise,
    noise_of,
    order_of_proof,
    quietest,
    samples_to_prove,
    smallest,
)

WIDTHS = ("8", "4", "2")
numbers = st.integers(1, 50).map(float)
entries = st.builds(Entry, numbers, numbers)
tables = st.lists(st.fixed_dictionaries(dict.fromkeys(WIDTHS, entries)), min_size=1, max_size=4)


def named(rows: list[dict[str, Entry]]) -> dict[str, dict[str, Entry]]:
    return {f"layer{i}": row for i, row in enumerate(rows)}


def choices(table: dict[str, dict[str, Entry]]) -> list[dict[str, str]]:
    return [dict(zip(table, c, strict=True)) for c in product(WIDTHS, repeat=len(table))]


TABLE = {
    "a": {"8": Entry(1.0, 9.0), "4": Entry(4.0, 5.0), "2": Entry(16.0, 2.0)},
    "b": {"8": Entry(2.0, 8.0), "4": Entry(3.0, 4.0), "2": Entry(20.0, 3.0)},
}


def test_the_least_cost_and_the_least_noise():
    assert smallest(TABLE, 7.0) == {"a": "4", "b": "4"}
    assert smallest(TABLE, 6.9) == {"a": "8", "b": "4"}  # of equal cost, the quieter
    assert smallest(TABLE, 3.0) == {"a": "8", "b": "8"}
    assert smallest(TABLE, 2.9) is None
    assert quietest(TABLE, 9.0) == {"a": "4", "b": "4"}
    assert quietest(TABLE, 8.9) == {"a": "2", "b": "4"}
    assert quietest(TABLE, 4.9) is None
    choice = {"a": "4", "b": "2"}
    assert (noise_of(TABLE, choice), cost_of(TABLE, choice)) == (24.0, 8.0)


@given(tables, numbers)
def test_no_choice_within_the_limit_is_smaller(rows: list[dict[str, Entry]], limit: float):
    table = named(rows)
    found = smallest(table, limit)
    fit = [cost_of(table, c) for c in choices(table) if noise_of(table, c) <= limit]
    assert (found is None) == (not fit)
    if found is not None:
        assert noise_of(table, found) <= limit
        assert cost_of(table, found) == min(fit)


@given(tables, st.sampled_from(WIDTHS))
def test_it_is_never_worse_than_one_width_for_all(rows: list[dict[str, Entry]], width: str):
    table = named(rows)
    same = dict.fromkeys(table, width)
    found = smallest(table, noise_of(table, same))
    assert found is not None
    assert cost_of(table, found) <= cost_of(table, same)
    found = quietest(table, cost_of(table, same))
    assert found is not None
    assert noise_of(table, found) <= noise_of(table, same)


@given(tables, numbers, numbers)
def test_more_noise_never_takes_more_bytes(rows: list[dict[str, Entry]], limit: float, more: float):
    table = named(rows)
    tight, wide = smallest(table, limit), smallest(table, limit + more)
    if tight is not None:
        assert wide is not None
        assert cost_of(table, wide) <= cost_of(table, tight)


drops = st.floats(0.0, 5.0) | st.none()


@given(st.lists(st.builds(Reached, st.floats(1e-6, 1.0), drops), min_size=1, max_size=5))
def test_the_next_noise_lies_below_what_was_too_much(points: list[Reached]):
    found = next_noise(points, 1.0)
    bad = [p.noise for p in points if p.drop is not None and p.drop > 1.0]
    assert (found is None) or found < min(bad)
    if not bad:
        assert found is None


def test_the_next_noise_follows_the_measured_power():
    # A drop that grows as the root of the noise: 0.5 at 1 and 2 at 16 make 1 at 4.
    assert next_noise([Reached(1.0, 0.5), Reached(16.0, 2.0)], 1.0) == pytest.approx(4.0)
    # With nothing below the limit, the same root is assumed.
    assert next_noise([Reached(16.0, 2.0)], 1.0) == pytest.approx(4.0)
    # Next to no drop says next to nothing.
    assert next_noise([Reached(0.5, 2.3e-309), Reached(1.0, 2.0)], 1.0) == pytest.approx(0.98)


def test_the_next_noise_nears_the_limit_from_a_side_that_repeats():
    near = [Reached(1.0, 0.5), Reached(16.0, 2.0)]
    assert next_noise(near, 1.0, repeats=1) == pytest.approx(16 ** (1 / 3))
    assert next_noise(near[::-1], 1.0, repeats=1) == pytest.approx(16 ** (2 / 3))


def test_the_other_side_counts_half_each_time_and_any_limit_will_do():
    far = [Reached(16.0, 2.0), Reached(1.0, 0.5)]
    assert next_noise(far, 1.0) == pytest.approx(4.0)
    assert next_noise(far, 1.0, repeats=2) == pytest.approx(16**0.8)
    halved = [Reached(16.0, 1.0), Reached(1.0, 0.25)]
    assert next_noise(halved, 0.5) == pytest.approx(4.0)


FOUND = [(300.0, 1.0), (200.0, 4.0), (190.0, 16.0)]


@pytest.mark.parametrize(
    ("found", "least", "middle"),
    [
        (FOUND, 0.05, 2.0),  # a third of the size; the next gap is a twentieth
        (FOUND[::-1], 0.05, 2.0),
        (FOUND, 1 / 3 + 1e-9, None),
        (FOUND, 1 / 3 - 1e-9, 2.0),
        ([*FOUND, (310.0, 2.0), (200.0, 5.0), (299.0, 1.0)], 0.05, 2.0),  # others beat these
        ([*FOUND, (600.0, 0.0)], 0.05, 2.0),  # no noise has no power
        ([*FOUND, (60.0, 64.0)], 0.05, 32.0),
        ([(400.0, 0.25), *FOUND], 0.05, 2.0),  # a quarter
        (FOUND[:1], 0.0, None),
        ([], 0.0, None),
    ],
)
def test_the_middle_of_the_gap(
    found: list[tuple[float, float]], least: float, middle: float | None
):
    assert middle_of_the_gap(found, least) == (middle and pytest.approx(middle))


def test_rounds_end_on_both_sides_of_the_limit_where_the_drop_is_no_power_of_the_noise():
    """On a drop with a floor, a line between logarithms came four times from above."""

    def drop(noise: float) -> float:
        return float(0.28 + 0.6 * noise**0.25 * (noise > 0.001))

    points, sides = [Reached(1e-4, drop(1e-4)), Reached(1.0, drop(1.0))], list[bool]()
    for _ in range(4):
        repeats = 0
        while repeats + 1 < len(sides) and sides[-2 - repeats] == sides[-1]:
            repeats += 1
        noise = next_noise(points, 0.5, repeats)
        assert noise is not None
        points.append(Reached(noise, drop(noise)))
        sides.append(drop(noise) <= 0.5)
    assert len(set(sides)) == 2


@pytest.mark.parametrize(
    ("points", "limit", "expected"),
    [
        # Below the limit lies nothing that is known: the share of the limit, squared, half at most.
        ([(16.0, 2.0), (1.0, None)], 0.5, 1.0),
        ([(16.0, 2.0)], 1.9, 8.0),
        ([(16.0, 2.0)], 0.0, None),
        ([(16.0, 2.0)], -1.0, None),
        ([(20.0, 0.5), (16.0, 2.0)], 1.0, 4.0),  # what is good lies above what is bad
        ([(16.0, 0.5), (16.0, 2.0)], 1.0, 4.0),
        # Where the good one lost nothing or added none, the middle of the powers, of 16 at most.
        ([(1.0, 0.0), (64.0, 2.0)], 1.0, 16.0),
        ([(16.0, 0.0), (64.0, 2.0)], 1.0, 32.0),
        ([(0.0, 0.5), (64.0, 2.0)], 1.0, 16.0),
        ([(16.0, -0.5), (64.0, 2.0)], 0.0, 32.0),
        # On the line between the nearest two, but not onto either.
        ([(0.1, 0.4), (1.0, 0.5), (16.0, 2.0), (99.0, 3.0)], 1.0, 4.0),
        ([(2.0, 0.5), (32.0, 2.0)], 1.0, 8.0),
        ([(1.0, 1.0), (16.0, 2.0)], 1.0, 1.02),
        ([(1.0, 0.5), (16.0, 1.0001)], 1.0, 15.68),
        ([(1.0, 0.5), (1.03, 2.0)], 1.0, None),
        ([(1.0, 0.5), (2.0, None)], 1.0, None),
    ],
)
def test_the_next_noise_is(
    points: list[tuple[float, float | None]], limit: float, expected: float | None
):
    found = next_noise([Reached(*point) for point in points], limit)
    assert found == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("known", "bits", "expected"),
    [
        ({"8": 1.0, "3": 100.0}, "4", 25.0),
        ({"8": 1.0, "3": 100.0}, "7", 4.0),
        ({"4": 16.0, "8": 3.0}, "6", 1.0),  # of two as near, the first
        ({"4": 16.0}, "2", 256.0),
        ({"4": 16.0}, "float", 0.0),
        ({"float": 7.0}, "4", 0.0),
    ],
)
def test_a_bit_more_is_a_quarter_of_the_noise(known: dict[str, float], bits: str, expected: float):
    noise = expected_noise({name: Entry(value, 1.0) for name, value in known.items()}, bits)
    assert noise == expected


@pytest.mark.parametrize(
    ("found", "most", "order"),
    [
        ([(5.0, 3.0), (6.0, 2.0), (4.0, 4.0)], 3, [1]),  # none keeps it: the least bad
        ([(5.0, 1.0), (6.0, 1.001)], 3, [0]),
        ([(6.0, 0.5), (5.0, 1.0)], 3, [0, 1]),  # what just keeps it is hopeful
        # Of those as safe, the first is the quietest, whatever its size.
        ([(7.0, 0.0), (6.0, None), (5.0, 0.5)], 3, [0, 1, 2]),
        ([(6.0, None), (7.0, 0.0), (5.0, 0.5)], 3, [0, 2]),
        ([(5.0, None), (6.0, 0.5)], 3, [0]),
        # Three percent less than the one before, at least.
        ([(100.0, 0.1), (97.0, 0.2)], 3, [0, 1]),
        ([(100.0, 0.1), (97.1, 0.2)], 3, [0]),
        ([(96.5, 0.3), (100.0, 0.1), (98.0, 0.2), (95.0, 0.3)], 5, [1, 0]),
        ([(100.0, 0.1), (100.0, 0.2)], 3, [0]),
        # What is smaller and safer takes the place of what is larger.
        ([(100.0, 0.1), (80.0, 0.5), (60.0, 0.3)], 5, [0, 2]),
        ([(100.0, 0.1), (80.0, 0.5), (60.0, 0.5), (40.0, None)], 5, [3]),
        # So does what is smaller and quieter, of as much or unknown loss.
        ([(100.0, 0.1), (60.0, 0.3), (80.0, 0.3)], 5, [0, 1]),
        ([(90.3, None), (48.8, None), (69.4, None), (50.0, None)], 5, [0, 1]),
        ([(90.3, None), (69.4, None), (50.0, None), (48.8, None)], 5, [0, 1, 2]),
        # Of ten, both ends and what lies evenly between.
        ([(100.0 - 5 * i, 0.1 + i / 100) for i in range(10)], 4, [0, 3, 6, 9]),
        ([(100.0 - 5 * i, 0.1 + i / 100) for i in range(10)], 1, [0]),
        ([(100.0 - 5 * i, 0.1 + i / 100) for i in range(3)], 3, [0, 1, 2]),
    ],
)
def test_the_order_of_proof_is(
    found: list[tuple[float, float | None]], most: int, order: list[int]
):
    assert order_of_proof([Standing(*one) for one in found], 1.0, most) == order


def test_where_a_gain_is_asked_for_none_is_less_bad_than_a_loss():
    assert order_of_proof([Standing(5.0, 0.5), Standing(6.0, 0.0)], -1.0, 3) == [1]


@given(
    st.lists(st.builds(Standing, st.floats(1.0, 100.0), drops), min_size=1, max_size=12),
    st.integers(2, 5),
)
def test_proof_begins_with_the_safest_and_goes_on_smaller(found: list[Standing], most: int):
    order = order_of_proof(found, 1.0, most)
    assert 1 <= len(order) <= most
    sizes = [found[i].size for i in order]
    assert sizes == sorted(set(sizes), reverse=True)
    kept = [s for s in found if s.drop is None or s.drop <= 1.0]
    if kept:
        assert all(found[i] in kept for i in order)
        assert (found[order[0]].drop or 0.0) == min(s.drop or 0.0 for s in kept)


def test_smaller_ones_that_may_fail_come_last_the_nearest_first():
    found = [
        Standing(100.0, 0.5),
        Standing(80.0, 0.9),
        Standing(70.0, 1.8),
        Standing(60.0, 1.2),
        Standing(50.0, 2.1),  # twice the limit and more
        Standing(40.0, float("inf")),
        Standing(79.0, 1.1),  # hardly smaller than one that is expected
    ]
    assert order_of_proof(found, 1.0, 5) == [0, 1]
    assert beyond_the_expected(found, 1.0, 80.0) == [3]
    assert beyond_the_expected(found, 1.0, 90.0) == [6, 3]
    assert beyond_the_expected(found, 1.0, 61.0) == []
    many = [Standing(50.0 - 5 * i, 1.1 + i / 10) for i in range(4)]
    assert beyond_the_expected(many, 1.0, 60.0) == [0, 1]


def test_the_smallest_hopeful_one_is_always_tried():
    found = [Standing(100.0 - 5 * i, 0.1 + i / 100) for i in range(10)]
    order = order_of_proof(found, 1.0, 3)
    assert (order[0], order[-1], len(order)) == (0, 9, 3)


def test_more_samples_narrow_the_interval_by_their_root():
    assert samples_to_prove(0.0, 0.4, 1000, 0.4) == 1000  # what is proved needs no more
    assert samples_to_prove(0.0, 0.8, 1000, 0.4) == 4000
    assert samples_to_prove(0.2, 1.0, 1000, 0.4) == 16000
    assert samples_to_prove(-0.2, 0.2, 1000, 0.4) == 445
    assert samples_to_prove(0.4, 0.5, 1000, 0.4) is None


def test_the_largest_of_the_smaller_ones_is_proved_first():
    found = [Standing(100, 0.0), Standing(50, 0.2), Standing(80, 0.1)]
    assert order_of_proof(found, 0.5, 9) == [0, 2, 1]


def test_what_loses_more_than_twice_the_limit_does_not_follow():
    found = [Standing(90, 0.5), Standing(80, 1.0), Standing(70, 1.01)]
    assert beyond_the_expected(found, 0.5, 100) == [1]
