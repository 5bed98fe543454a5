"""The histogram: counts, growth, and independence of order and grouping."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.calibration.histogram import (
    CHUNK,
    SIDE,
    Histogram,
    chunks,
    empty,
    extrema,
    merge,
    observe,
    row_ends,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LISTS = st.lists(FLOATS, max_size=40)


def of(*parts: list[float], dtype: torch.dtype = torch.float32) -> Histogram:
    state = empty()
    for part in parts:
        state = observe(state, torch.tensor(part, dtype=dtype))
    return state


def same(first: Histogram, second: Histogram) -> bool:
    return (
        torch.equal(first.counts, second.counts)
        and first.exponent == second.exponent
        and math.copysign(1, first.low) == math.copysign(1, second.low)
        and (first.low, first.high) == (second.low, second.high)
    )


@settings(deadline=None)
@given(st.lists(LISTS, max_size=5), st.randoms())
def test_order_and_grouping_leave_no_trace(parts, random):
    values = [value for part in parts for value in part]
    whole = of(values)
    shuffled = random.sample(values, len(values))
    assert same(whole, of(*parts))
    assert same(whole, of(*([value] for value in shuffled)))


@settings(deadline=None)
@given(LISTS, LISTS, LISTS)
def test_merge_is_the_stream_of_both_commutes_and_associates(a, b, c):
    x, y, z = of(a), of(b), of(c)
    assert same(merge(x, y), of(a + b))
    assert same(merge(x, y), merge(y, x))
    assert same(merge(merge(x, y), z), merge(x, merge(y, z)))
    assert same(merge(x, empty()), x)


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_counts_are_those_of_truncated_values_and_the_width_is_the_least(values):
    state = of(values)
    exact = np.array(values, np.float64)
    index = np.trunc(np.ldexp(exact, -state.exponent)).astype(np.int64)
    assert np.array_equal(state.counts.numpy(), np.bincount(index + SIDE, minlength=2 * SIDE))
    assert (state.low, state.high) == (exact.min(), exact.max())
    largest = np.abs(exact).max()
    assert largest < np.ldexp(SIDE, state.exponent)
    assert state.exponent == -126 or largest >= np.ldexp(SIDE, state.exponent - 1)


def test_agrees_with_numpy_on_a_grid_of_powers_of_two():
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).abs()
    state = observe(empty(), values)
    edges = np.ldexp(np.arange(SIDE + 1, dtype=np.float64), state.exponent)
    expected, _ = np.histogram(values.numpy().astype(np.float64), edges)
    assert np.array_equal(state.counts[SIDE:].numpy(), expected)
    assert not state.counts[:SIDE].any()


def test_growth_adds_neighbouring_bins():
    before = of([1.0, 1.25, -1.25, 0.75])  # largest < 2: width 2 ** -11
    assert before.exponent == 1 - 12
    after = observe(before, torch.tensor([7.0]))
    assert after.exponent == 3 - 12
    nonzero = {int(i) - SIDE: int(after.counts[i]) for i in after.counts.nonzero()}
    assert nonzero == {512: 1, 640: 1, -640: 1, 384: 1, 3584: 1}
    assert before.counts.sum() == 4, "states are values: update must not write to its argument"


def test_growth_past_everything_leaves_it_in_the_zero_bin():
    state = of([1e-30, -1e-30, 1.0], [3e38])
    assert state.counts[SIDE] == 3
    assert state.total == 4


def test_zeros_and_denormals_are_legal():
    assert of([0.0, -0.0]).counts[SIDE] == 2
    assert math.copysign(1, of([-0.0]).low) == 1
    assert of([-1e-45, 1e-45]).counts[SIDE] == 2
    assert empty().empty
    assert same(of([]), empty())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64]
)
def test_other_dtypes_count_the_same(dtype):
    values = [0, 1, 3, 100, 100]
    assert same(of(values, dtype=dtype), of(values))


def test_float64_beyond_float32_and_both_in_one_stream():
    huge, small = torch.tensor([-1.5e308, 1e300], dtype=torch.float64), torch.tensor([3e38, 1.0])
    state = observe(observe(empty(), huge), small)
    assert same(state, observe(observe(empty(), small), huge))
    assert state.exponent == 1012
    assert state.counts[SIDE] == 3


def test_a_processor_that_flushes_denormals_counts_the_same():
    wide = observe(empty(), torch.tensor([2.0**138], dtype=torch.float64))
    assert wide.exponent == 127, "its inverse is no normal float32"
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        counted = observe(wide, torch.tensor([3e38]))
    finally:
        torch.set_flush_denormal(False)
    assert counted.counts[SIDE + 1] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="not finite"):
        of([1.0] * 40_000 + [bad])


def test_strided_tensors_and_sizes_around_a_step():
    base = torch.randn(3, CHUNK + 1, generator=torch.Generator().manual_seed(2))
    shapes = (base.T, base[:, ::2], base[0, :CHUNK], base[0], base[1, : CHUNK - 1], base[2, :7])
    for values in (*shapes, *(shape.relu() for shape in shapes)):
        state = observe(empty(), values)
        assert state.total == values.numel()
        assert same(state, observe(empty(), values.flatten().clone()))
        bins = values.flatten().double().div(2.0**state.exponent).trunc().long() + SIDE
        assert torch.equal(state.counts, bins.bincount(minlength=2 * SIDE))


def test_ends_that_are_known_change_nothing():
    values = torch.randn(CHUNK + 7, generator=torch.Generator().manual_seed(4))
    values[-1] = 100.0  # only the last step needs wider bins
    for some in (values, values.relu(), values[:5]):
        assert same(observe(of([0.5]), some, extrema(some)), observe(of([0.5]), some))


@pytest.mark.parametrize("width", [1, 5, CHUNK // 2, CHUNK, CHUNK + 3])
def test_rows_have_the_ends_that_each_has_alone(width):
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(5)).to(torch.float16)
    ends = row_ends(rows)
    assert list(zip(*ends, strict=True)) == [extrema(row) for row in rows]
    assert row_ends(rows[0, :3]) == row_ends(rows[0, :3, None]), "a row may be one number"
    assert row_ends(rows[0, 0]) == row_ends(rows[:1, :1])
    assert row_ends(rows[:, :0]) == row_ends(rows[:0]) == ([], [])
    rows[4, -1] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        row_ends(rows)


def test_other_work_keeps_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        extrema(torch.ones(10))
        with pytest.raises(ValueError, match="not finite"):
            of([math.nan])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_memory_does_not_grow_with_the_stream():
    batch = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    state = observe(empty(), batch)
    size = state.counts.nbytes
    tracemalloc.start()
    try:
        for scale in range(1, 40):
            state = observe(state, batch * scale)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state.counts.nbytes == size == 2 * SIDE * 8
    assert peak < 100_000, "Python objects; tensors are counted by the assertion above"


def test_values_are_counted_in_a_type_that_holds_them():
    kinds = {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.int64: torch.float64,
    }
    for dtype, wide in kinds.items():
        assert {chunk.dtype for chunk in chunks(torch.ones(40_000, dtype=dtype))} == {wide}
