"""Moments of layers' inputs: against unfolding by hand, merging, and when to stop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from compressor.calibration import moments as moments_module
from compressor.calibration.moments import patch_vectors
from compressor.calibration.observers.channels import SecondMoment
from compressor.types.statistics import Moments


def test_vectors_are_summed_over_all_leading_axes():
    torch.manual_seed(0)
    values = torch.randn(3, 5, 7)
    observer = SecondMoment()
    found = observer.result(observer.update(observer.start(), values))
    rows = values.reshape(-1, 7)
    assert found is not None
    assert torch.allclose(found.second[0], rows.T @ rows, atol=1e-5)
    assert torch.allclose(found.first[0], rows.sum(0), atol=1e-5)
    assert found.rows == 15


def test_small_feature_maps_give_every_patch():
    torch.manual_seed(0)
    values = torch.randn(2, 4, 6, 6)
    options = {"kernel": (3, 3), "strides": (2, 1), "pads": (1, 0, 1, 2), "dilations": (1, 2)}
    observer = SecondMoment(**options)
    found = observer.result(observer.update(observer.start(), values))
    padded = functional.pad(values, (0, 2, 1, 1))
    patches = functional.unfold(padded, (3, 3), dilation=(1, 2), stride=(2, 1))
    rows = patches.transpose(1, 2).reshape(-1, 36)
    assert found is not None
    assert found.rows == len(rows)
    assert torch.allclose(found.second[0], rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_groups_have_moments_of_their_own():
    torch.manual_seed(0)
    values = torch.randn(2, 4, 5, 5)
    whole, grouped = SecondMoment(kernel=(1, 1)), SecondMoment(kernel=(1, 1), groups=4)
    all_of_it = whole.result(whole.update(whole.start(), values))
    parts = grouped.result(grouped.update(grouped.start(), values))
    assert all_of_it is not None
    assert parts is not None
    assert parts.second.shape == (4, 1, 1)
    assert torch.allclose(parts.second[:, 0, 0], all_of_it.second[0].diagonal(), rtol=1e-5)


def test_merging_is_adding():
    torch.manual_seed(0)
    first, second = torch.randn(4, 6), torch.randn(5, 6)
    observer = SecondMoment()
    start = observer.start()
    merged = observer.merge(observer.update(start, first), observer.update(start, second))
    whole = observer.update(start, torch.cat([first, second]))
    assert merged is not None
    assert whole is not None
    assert torch.allclose(merged.second, whole.second, atol=1e-5)
    assert torch.allclose(merged.first, whole.first, atol=1e-5)
    assert merged.rows == whole.rows == 9


def test_large_moments_are_whole_although_half_is_computed():
    torch.manual_seed(0)
    values = torch.randn(3, 40, 600)  # three blocks of columns, the last one smaller
    observer = SecondMoment()
    state = observer.start()
    for part in values:
        state = observer.absorb(state, part)
    second = observer.result(state).second[0]
    assert torch.equal(second, second.T)
    rows = values.reshape(-1, 600).double()
    torch.testing.assert_close(second.double(), rows.T @ rows, rtol=1e-5, atol=1e-4)


def test_an_update_leaves_the_state_and_absorbing_uses_its_memory():
    observer = SecondMoment()
    state = observer.update(observer.start(), torch.ones(2, 4))
    before = state.second.clone()
    updated = observer.update(state, torch.ones(3, 4))
    assert torch.equal(state.second, before)
    absorbed = observer.absorb(state, torch.ones(3, 4))
    assert torch.equal(absorbed.second, updated.second)
    assert absorbed.second.data_ptr() == state.second.data_ptr()
    assert (state.rows, absorbed.rows) == (2, 5)


def test_patches_of_even_and_uneven_pads_are_those_of_a_padded_map():
    values = torch.randn(1, 2, 40, 40)
    for kernel, pads in (
        ((1, 1), (0, 0, 0, 0)),
        ((3, 3), (1, 1, 1, 1)),
        ((1, 1), (2, 0, 1, 3)),
        ((1, 1), (2, 0, 2, 0)),
        ((1, 1), (0, 2, 0, 2)),
    ):
        padded = functional.pad(values, (pads[1], pads[3], pads[0], pads[2]))
        wanted = patch_vectors(padded, kernel)
        assert torch.equal(patch_vectors(values, kernel, pads=pads), wanted)


@pytest.mark.parametrize("kernel", [(1, 1), (1, 2), (2, 1)])
def test_the_smallest_kernels_step_along_each_axis(kernel):
    values = torch.randn(2, 3, 12, 15)
    found = patch_vectors(values, kernel, strides=(2, 3))
    patches = functional.unfold(values, kernel, stride=(2, 3))
    assert torch.equal(found[0], patches.transpose(0, 1).reshape(patches.shape[1], -1))


# Of 22 by 22 places, padded by one, patches of 2 by 2 are 12 by 12: every second is left out.
@pytest.mark.parametrize(("length", "step"), [(22, 2), (21, 1)])
def test_padding_counts_among_the_places_of_patches(length, step):
    values = torch.randn(1, 2, length, length)
    found = patch_vectors(values, (2, 2), (2, 2), pads=(1, 1, 1, 1))
    patches = functional.unfold(values, (2, 2), padding=1, stride=2 * step)
    assert torch.equal(found[0], patches[0])


def test_it_stops_when_there_is_enough():
    observer = SecondMoment()
    state = observer.update(observer.start(), torch.ones(8 * 4, 4))
    assert observer.update(state, torch.ones(10, 4)) is state


def test_large_feature_maps_are_sampled_evenly():
    values = torch.ones(1, 1, 64, 64)
    observer = SecondMoment(kernel=(1, 1))
    found = observer.update(observer.start(), values)
    assert found is not None
    assert 32 <= found.rows <= 128


# From 144 patches on, the root of their number over 64 rounds to two.
@pytest.mark.parametrize(
    ("rows", "columns", "step"),
    [(11, 13, 1), (13, 11, 1), (12, 12, 2), (18, 8, 2), (1, 143, 1), (143, 1, 1), (1, 144, 2)],
)
def test_every_second_patch_is_left_out_where_there_are_144(rows, columns, step):
    # With padding, 2 * rows + 2 rows, of which the last is in no patch, and columns + 2.
    values = torch.randn(2, 3, 2 * rows - 1, columns + 1, dtype=torch.float64)
    options = {"kernel": (2, 3), "dilations": (2, 1)}
    found = patch_vectors(values, strides=(2, 1), pads=(1, 0, 2, 1), **options)
    padded = functional.pad(values.float(), (0, 1, 1, 2))
    stride = (2 * step, step)
    patches = functional.unfold(padded, (2, 3), dilation=(2, 1), stride=stride)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], patches.transpose(0, 1).reshape(18, -1))


def test_vectors_of_many_columns_are_kept_until_they_are_as_many():
    torch.manual_seed(0)
    values = torch.randn(1500, 1024)
    observer = SecondMoment()
    state = observer.update(observer.start(), values[:600])
    few = observer.result(state)
    assert torch.equal(few.vectors, values[:600].T)
    torch.testing.assert_close(few.second[0], values[:600].T @ values[:600])
    assert few.second is few.second
    # As many as columns: their products are summed, and those of the next wait again.
    sums = {}
    for count in (1023, 1024, 1100, 1300):
        sums[count] = observer.update(state, values[600:count])
    assert [s.second is None for s in sums.values()] == [True, False, False, False]
    later = observer.update(sums[1100], values[1100:1200])
    assert [sum(w.shape[2] for w in s.waiting) for s in (sums[1100], later)] == [0, 100]
    before = later.second.clone()
    partly = observer.result(replace(later, second=before.clone()))
    torch.testing.assert_close(
        partly.second[0], values[:1200].T @ values[:1200], rtol=1e-4, atol=1e-3
    )
    last = observer.update(later, values[1200:])
    assert (last.rows, last.waiting) == (1500, ())
    assert torch.equal(later.second, before)
    moments = observer.result(last)
    assert moments.vectors is None
    torch.testing.assert_close(moments.second[0], values.T @ values, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(moments.first[0], values.sum(0), rtol=1e-4, atol=1e-3)


def test_kept_vectors_of_several_batches_are_one_moment():
    torch.manual_seed(0)
    values = torch.randn(60, 1024)
    observer = SecondMoment()
    state = observer.start()
    for part in values.split(20):
        state = observer.update(state, part)
    moments = observer.result(state)
    assert torch.equal(moments.vectors, values.T)
    torch.testing.assert_close(moments.second[0], values.T @ values)
    torch.testing.assert_close(moments.first[0], values.sum(0))
    assert moments.rows == 60


def test_groups_of_many_columns_are_summed_at_once():
    torch.manual_seed(0)
    values = torch.randn(1, 2 * 1024, 2, 3)
    observer = SecondMoment(kernel=(1, 1), groups=2)
    moments = observer.result(observer.update(observer.start(), values))
    rows = values.reshape(2, 1024, 6)
    assert moments.vectors is None
    torch.testing.assert_close(moments.second, rows @ rows.transpose(1, 2))


def test_kept_vectors_are_merged_with_sums():
    torch.manual_seed(0)
    values = torch.randn(2200, 1024)
    observer = SecondMoment()
    ends = (0, 300, 1000, 2200)
    parts = [observer.update(observer.start(), values[a:b]) for a, b in pairwise(ends)]
    copies = [None if p.second is None else p.second.clone() for p in parts]
    merged = observer.merge(observer.merge(parts[0], parts[1]), parts[2])
    assert merged.rows == 2200
    moments = observer.result(merged)
    torch.testing.assert_close(moments.second[0], values.T @ values, rtol=1e-4, atol=1e-3)
    assert parts[0].second is None
    assert torch.equal(parts[2].second, copies[2])


def test_kept_vectors_do_not_keep_the_values_they_come_from():
    values = torch.randn(8, 1024)
    observer = SecondMoment()
    state = observer.update(observer.start(), values)
    values.zero_()
    assert observer.result(state).vectors.any()


def test_moments_of_scaled_vectors_are_computed_when_they_are_read_and_keep_nothing():
    torch.manual_seed(0)
    values = torch.randn(300, 1024)
    observer = SecondMoment()
    moments = observer.result(observer.update(observer.start(), values))
    factors = torch.rand(1, 1024) + 0.5
    divided = moments.divided(factors)
    expected = values / factors
    torch.testing.assert_close(divided.second[0], expected.T @ expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(divided.first[0], expected.sum(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(divided.vectors, expected.T)
    assert divided.vectors is not divided.vectors  # both would be held beside those they come from
    reads = []

    def counted() -> torch.Tensor:
        reads.append(None)
        return torch.eye(3)[None]

    given = Moments(counted, torch.ones(1, 3), 3)
    assert given.divided(torch.full((1, 3), 2.0)).second.equal(torch.eye(3)[None] / 4)
    assert given.second.equal(torch.eye(3)[None])
    assert len(reads) == 2  # the scaled moments did not leave the others' behind


def test_vectors_that_waited_are_summed_some_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Put together as a whole, they would take the memory of the matrix once again."""
    seen: list[int] = []
    product = moments_module.with_product

    def noted(second: torch.Tensor | None, vectors: torch.Tensor) -> torch.Tensor:
        seen.append(vectors.shape[2])
        return product(second, vectors)

    monkeypatch.setattr(moments_module, "with_product", noted)
    torch.manual_seed(0)
    values = torch.randn(1100, 1024)
    observer, state = SecondMoment(), None
    for part in values.split(50):
        state = observer.absorb(state, part)
    assert seen == [150] * 7  # the least that is an eighth of the columns
    found = observer.result(state)
    torch.testing.assert_close(found.second[0], values.T @ values, rtol=1e-4, atol=1e-3)
