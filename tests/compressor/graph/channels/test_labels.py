"""Families and unions, against arithmetic that is too slow to use."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compressor.graph.channels.labels import (
    Unions,
    along,
    compressed,
    joined,
    overlap,
    placed,
    reshaped,
    spread,
)

LENGTHS = st.lists(st.sampled_from([1, 1, 2, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def shaped_families(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...]]:
    shape = tuple(draw(LENGTHS))
    own = tuple(n if draw(st.booleans()) else 1 for n in shape)
    numbers = draw(st.lists(st.integers(-1, 5), min_size=prod(own), max_size=prod(own)))
    return np.asarray(numbers, dtype=np.int64).reshape(own), shape


@st.composite
def reshapes(
    draw: st.DrawFn,
) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
    family, shape = draw(shaped_families())
    left, after = prod(shape), []
    while left > 1:
        after.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= after[-1]
        if len(after) == 4:
            after.append(left)
            break
    return family, shape, tuple(after or [1])


@given(reshapes())
def test_a_reshape_moves_channels_as_it_moves_elements(
    drawn: tuple[np.ndarray, tuple[int, ...], tuple[int, ...]],
):
    family, before, after = drawn
    whole = np.broadcast_to(family, before).reshape(after)
    found = reshaped(family, before, after)
    assert found.ndim == len(after)
    assert np.array_equal(np.broadcast_to(found, after), whole)


@given(shaped_families())
def test_compressing_drops_axes_without_changing_what_they_say(
    drawn: tuple[np.ndarray, tuple[int, ...]],
):
    family, _ = drawn
    found = compressed(family)
    assert np.array_equal(np.broadcast_to(found, family.shape), family)
    for axis in range(found.ndim):
        others = found.size > found.shape[axis]
        if found.shape[axis] > 1 and others:
            assert bool((found != found.take([0], axis)).any())


def test_an_axis_of_channels_that_are_one_stays_an_axis():
    """A family without any axis would say that its value has no channels."""
    found = compressed(np.full((1, 3), 7))
    assert found.shape == (1, 3)


def test_heads_that_are_divided_and_merged_again_are_what_they_were():
    family = placed(np.arange(12), 2, 3)
    divided = reshaped(family, (2, 5, 12), (2, 5, 4, 3))
    assert divided.shape == (1, 1, 4, 3)
    assert np.array_equal(reshaped(divided, (2, 5, 4, 3), (2, 5, 12)), family)


def test_flattening_repeats_a_channel_for_each_pixel():
    found = reshaped(placed(np.arange(3), 1, 4), (2, 3, 2, 2), (2, 12))
    assert found.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]


def test_batches_of_heads_repeat_the_heads():
    found = reshaped(placed(np.arange(2), 1, 4), (3, 2, 5, 4), (6, 5, 4))
    assert found.reshape(-1).tolist() == [0, 1, 0, 1, 0, 1]


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=15),
        )
    )
)
def test_unions_are_the_connected_components(drawn: tuple[int, list[tuple[int, int]]]):
    count, pairs = drawn
    unions = Unions()
    numbers = unions.fresh((count,))
    for first, second in pairs:
        unions.join(numbers[[first]], numbers[[second]])
    wanted = list(range(count))
    for first, second in pairs:
        low, high = sorted((wanted[first], wanted[second]))
        wanted = [low if root == high else root for root in wanted]
    assert unions.roots().tolist() == wanted
    assert unions.resolved(np.asarray([-1, count - 1])).tolist() == [-1, wanted[-1]]


def test_long_chains_are_one_component():
    """As in a network of many residual blocks."""
    unions = Unions()
    numbers = unions.fresh((5000,))
    order = np.random.default_rng(0).permutation(4999)
    unions.join(numbers[order], numbers[order + 1])
    assert not unions.roots().any()


def test_numbers_are_fresh_after_others_were_joined():
    unions = Unions()
    first = unions.fresh((2,))
    unions.join(first[:1], first[1:])
    assert unions.roots().tolist() == [0, 0]
    second = unions.fresh((2, 1))
    assert second.tolist() == [[2], [3]]
    assert unions.roots().tolist() == [0, 0, 2, 3]


def test_parts_without_channels_are_marked_in_what_is_joined():
    parts = [placed(np.asarray([4, 5]), 1, 3), None, placed(np.asarray([6]), 1, 3)]
    found = joined(parts, [2, 3, 1], 1)
    assert found is not None
    assert along(found, 1).tolist() == [4, 5, -1, -1, -1, 6]
    assert joined([None, None], [1, 2], 0) is None


def test_a_joint_part_makes_the_whole_joint():
    joint = np.arange(4).reshape(2, 2)
    found = joined([joint, placed(np.asarray([8, 9]), 1, 2)], [2, 2], 1)
    assert found is not None
    assert found.tolist() == [[0, 1, 8, 9], [2, 3, 8, 9]]


def test_families_overlap_where_both_differ():
    rows, columns = placed(np.arange(2), 0, 2), placed(np.arange(2), 1, 2)
    assert overlap(rows, np.arange(4).reshape(2, 2))
    assert not overlap(rows, columns)
    assert spread(np.arange(3), 3).shape == (1, 1, 3)
