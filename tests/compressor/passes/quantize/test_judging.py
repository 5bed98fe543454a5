"""What samples say of observers: which are dropped, which is best, and what later samples do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.passes.quantize.static.judging import best, exceeding, heavy_tails, remaining


@pytest.mark.parametrize(("index", "share"), [(0.5, 1.0), (0.1, 0.0)])
def test_tails_are_heavy_from_an_index_of_a_quarter_on(index: float, share: float):
    random = np.random.default_rng(0)
    peaks = random.pareto(1 / index, (400, 5)) + 1
    assert heavy_tails(peaks) == share


def test_no_values_have_no_tail_and_rare_ones_a_heavy_one():
    peaks = np.ones((16, 4))
    peaks[:, 0] = 0.0
    peaks[1:, 1] = 0.0
    assert heavy_tails(peaks) == 0.25


def test_what_is_clearly_worse_is_dropped_and_what_is_worse_on_one_sample_is_not():
    errors = np.full((4, 8, 1), 0.9)
    errors[0] = 1.0
    errors[1, :2] = 10.0  # 5 dB, and 3.4 without either of two samples
    errors[2, 3] = 25.0  # 6 dB, by one sample
    errors[3, :2] = 4.9  # 2.8 dB
    assert remaining(errors) == [0, 2, 3]
    assert remaining(errors[[1, 0, 2, 3]]) == [0, 1, 2, 3]  # the first stays
    assert remaining(np.full((2, 3, 1), np.nan)) == [0, 1]


def test_what_is_worse_on_each_sample_is_dropped():
    errors = np.ones((4, 4, 1))
    errors[0] = 2.0
    errors[2] = 1.3  # 1.1 dB
    errors[3, :2], errors[3, 2:] = 0.9, 1.8  # 1.3 dB, but not on each
    assert remaining(errors) == [0, 1, 3]


def test_one_sample_drops_none():
    """Its standard error was taken for none: a third of better observers were gone after it."""
    errors = np.array([[[1.0]], [[1.5]], [[0.9]], [[9.0]]])
    assert remaining(errors) == [0, 1, 2, 3]


@pytest.mark.parametrize(("gain", "spread", "kept"), [(0.2, 0.1, True), (0.2, 0.01, False)])
def test_what_is_not_expected_to_gain_a_quarter_of_a_decibel_is_dropped(
    gain: float, spread: float, kept: bool
):
    """Of 16 samples, the standard error is a quarter of the deviation."""
    errors = np.ones((2, 16, 1))
    errors[1, :, 0] = 10 ** (-(gain + spread * np.tile([-1, 1], 8)) / 10)
    assert remaining(errors) == ([0, 1] if kept else [0])


@given(st.integers(1, 5), st.integers(2, 9), st.integers(1, 3))
def test_the_first_of_equal_errors_stays(observers: int, samples: int, outputs: int):
    one = np.random.default_rng(samples).random((1, samples, outputs))
    assert best(np.repeat(one, observers, 0)) == (0, 0.0)


def test_a_gain_that_hangs_on_one_sample_is_none():
    errors = np.ones((3, 10, 1))
    errors[1, :, 0] = 1.1
    errors[1, 0, 0] = 0.0  # 1.0 less in one sample, 0.1 more in the others: -0.9 + 1.0
    assert best(errors)[0] == 0
    errors[2, :, 0] = 0.5
    assert best(errors) == (2, pytest.approx(10 * np.log10(2)))


def test_outputs_without_a_number_do_not_count():
    errors = np.ones((2, 4, 2))
    errors[1] = 0.5
    errors[0, 0, 1] = np.nan
    assert best(errors) == (1, pytest.approx(10 * np.log10(2)))
    assert best(errors[:, :, 1:]) == (0, 0.0)


def test_the_more_samples_the_less_is_exceeded():
    assert exceeding(1, 1) == pytest.approx(0.5)
    assert exceeding(50, 50) > 0.5 > exceeding(50, 500) > exceeding(10, 500)
    assert exceeding(0, 3) == 0.0
