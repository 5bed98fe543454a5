"""The cubic schedule of gradual pruning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.prune.criteria import cubic_sparsity

SHARES = st.floats(0, 1)


def test_values_of_the_formula():
    assert cubic_sparsity(50, 0, 100, 0.8) == pytest.approx(0.8 - 0.8 / 8)
    assert cubic_sparsity(25, 0, 100, 0.8, 0.2) == pytest.approx(0.8 - 0.6 * 0.75**3)
    assert cubic_sparsity(30, 10, 20, 0.5) == 0.5
    assert cubic_sparsity(10, 10, 20, 0.5, 0.1) == 0.1
    assert cubic_sparsity(7, 7, 7, 0.5) == 0.5
    assert cubic_sparsity(50, 0, 100, 1.0) == pytest.approx(7 / 8)


@given(SHARES, SHARES, st.integers(-5, 50), st.integers(0, 30), st.integers(-10, 60))
def test_it_rises_from_initial_to_final(a: float, b: float, begin: int, length: int, step: int):
    initial, final = sorted((a, b))
    now, later = (
        cubic_sparsity(s, begin, begin + length, final, initial) for s in (step, step + 1)
    )
    assert initial - 1e-12 <= now <= later + 1e-12 <= final + 2e-12


@pytest.mark.parametrize(("initial", "final"), [(0.5, 0.4), (-0.1, 0.4), (0.5, 1.1)])
def test_shares_out_of_range(initial: float, final: float):
    with pytest.raises(ValueError, match="do not rise within 0 to 1"):
        cubic_sparsity(0, 0, 1, final, initial)


def test_an_end_before_the_beginning():
    with pytest.raises(ValueError, match="step 3 lies before step 4"):
        cubic_sparsity(0, 4, 3, 0.5)
