"""The roofline and Amdahl's law."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.lab.roofline.work import is_memory_bound, limit, overall_speedup, roof_seconds

seconds = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8)


def test_amdahls_own_numbers():
    """Half of the time made twice as fast gives 4/3; made to nothing, 2."""
    assert overall_speedup(2.0, [1.0], [2.0]) == pytest.approx(4 / 3)
    assert limit(2.0, [1.0]) == pytest.approx(2.0)
    assert limit(1.0, [1.0]) is None


@given(seconds, st.floats(1.0, 50.0), st.floats(0.0, 1.0))
def test_no_part_brings_more_than_the_law_allows(parts: list[float], speedup: float, rest: float):
    whole = sum(parts) + rest
    found = overall_speedup(whole, parts, [speedup] * len(parts))
    assert found >= 1.0 - 1e-9
    assert found <= speedup * (1 + 1e-9)
    bound = limit(whole, parts)
    assert bound is None or found <= bound * (1 + 1e-6)


def test_the_roof_is_the_longer_of_the_two_times():
    assert roof_seconds(100, 10, peak=100, bandwidth=1) == 10
    assert is_memory_bound(100, 10, peak=100, bandwidth=1)
    assert roof_seconds(100, 10, peak=1, bandwidth=100) == 100
    assert not is_memory_bound(100, 10, peak=1, bandwidth=100)
