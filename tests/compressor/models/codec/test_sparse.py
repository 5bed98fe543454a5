"""Arrays with many zeros, as values with a mask or with places."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.models.codec.sparse import (
    bitmask,
    fits_groups,
    from_bitmask,
    from_group_values,
    group_values,
)

_TYPES = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


def drawn(dtype: Any, count: int, share: float, seed: int) -> Any:
    noise = np.random.default_rng(seed)
    values = noise.integers(1, np.iinfo(dtype).max, count, dtype, endpoint=True)
    return np.where(noise.random(count) < share, values, 0).astype(dtype)


@given(_TYPES, st.integers(0, 70), st.floats(0, 1), st.integers(0, 99))
def test_a_mask_and_values_give_the_elements(
    dtype: Any, count: int, share: float, seed: int
) -> None:
    elements = drawn(dtype, count, share, seed)
    mask, values = bitmask(elements)
    assert mask.shape == (-(-count // 8),)
    assert [bool(mask[i // 8] >> i % 8 & 1) for i in range(count)] == list(elements != 0)
    again = from_bitmask(mask, values, count)
    assert again.dtype == elements.dtype
    np.testing.assert_array_equal(again, elements)


@given(_TYPES, st.integers(0, 20), st.sampled_from([1, 2]), st.integers(0, 99))
def test_places_and_values_give_the_groups(dtype: Any, count: int, most: int, seed: int) -> None:
    groups = drawn(dtype, 4 * count, 0.9, seed).reshape(-1, 4)
    order = np.random.default_rng(seed).random(groups.shape).argsort(1)
    groups = np.where(order < most, groups, 0).astype(dtype)
    assert fits_groups(groups, most)
    values, places = group_values(groups, most)
    assert values.shape == places.shape == (count * most,)
    assert (values.dtype, places.dtype) == (dtype, np.uint8)
    again = from_group_values(values, places, most)
    assert again.dtype == groups.dtype
    np.testing.assert_array_equal(again, groups)


def test_more_groups_than_are_handled_at_once() -> None:
    groups = drawn(np.uint8, 4 * 300_001, 0.4, 0).reshape(-1, 4)
    groups[:, 2:] = 0
    np.testing.assert_array_equal(from_group_values(*group_values(groups, 2), 2), groups)
    for group in (0, len(groups) - 1):
        groups[group] = 1
        assert not fits_groups(groups, 2)
        groups[group] = 0
        assert fits_groups(groups, 2)


@pytest.mark.parametrize(
    ("mask", "values", "message"),
    [
        ([3, 0], [1], "marks 2 elements, 1 values are stored"),
        ([0, 0], [1], "marks 0 elements, 1 values are stored"),
        ([1, 4], [1], "bits after the last element"),
        ([1], [1], "has 1 bytes for 10 elements"),
    ],
)
def test_masks_that_do_not_fit(mask: list[int], values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_bitmask(np.array(mask, np.uint8), np.array(values, np.uint8), 10)


@pytest.mark.parametrize("places", [[1, 1], [2, 1]])
def test_places_that_do_not_ascend(places: list[int]) -> None:
    with pytest.raises(ValueError, match="do not ascend"):
        from_group_values(np.array([5, 6], np.uint8), np.array(places, np.uint8), 2)
