"""Statistics of parts of the data are those of a pass over these parts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.calibration.collect import collect
from compressor.calibration.parts import Parts
from compressor.types.statistics import Request

NAMES = ("mse", "min-max", "percentile", "entropy", "extreme-value")
REQUESTS = [Request("x", name) for name in NAMES]


@settings(max_examples=20)
@given(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 99))
def test_results_are_those_of_a_pass_over_the_parts(some: set[int], seed: int):
    random = np.random.default_rng(seed)
    batches = [random.standard_normal((3, 5)).astype(np.float32) * 2.0**k for k in range(4)]
    parts = Parts(REQUESTS, 4)
    for part, batch in enumerate(batches):
        parts.add(part, {"x": batch})
    chosen = [{"x": batches[part]} for part in sorted(some)]
    wanted = collect(lambda batch: batch, chosen, REQUESTS)
    for _ in range(2):  # results do not change the states
        assert parts.results(some) == wanted
    assert parts.results(some, [REQUESTS[1].key]) == {REQUESTS[1].key: wanted[REQUESTS[1].key]}


def test_what_was_not_observed_has_no_result():
    gated = Request("x", "min-max", where="y")
    parts = Parts([gated, Request("y", "min-max")], 2)
    values = np.array([1.0, 2.0], np.float32)
    parts.add(0, {"x": values, "y": -values})
    parts.add(1, {})
    assert gated.key not in parts.results([0])
    assert parts.results([1]) == {}
    assert len(parts.results([0, 1])) == 1


def test_values_that_are_no_numbers_are_refused():
    parts = Parts(REQUESTS, 1)
    with pytest.raises(ValueError, match="finite"):
        parts.add(0, {"x": np.array([np.nan], np.float32)})
