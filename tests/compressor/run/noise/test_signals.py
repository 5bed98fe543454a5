"""Sums of squares of values, and of the outputs of a model part by part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.graph.output_parts import WHOLE
from compressor.run.noise.signals import OutputSums, SignalSums, ratio_db, signal_and_error


def test_ratio_in_decibels():
    assert ratio_db(100, 1) == pytest.approx(20)
    assert ratio_db(1, 1) == 0
    assert ratio_db(1, 0) is None
    assert ratio_db(0, 1) is None


@pytest.mark.parametrize("size", [1, 1 << 12, 5000, 1 << 16, (1 << 16) + 1, 200_000])
def test_signal_and_error_are_sums_over_all_values(size: int):
    rng = np.random.default_rng(0)
    want = rng.standard_normal((2, size), np.float32)
    have = want + rng.standard_normal((2, size), np.float32) / 100
    signal, error = signal_and_error([want, want[:1]], [have, have[:1]])
    both = [(want, have), (want[:1], have[:1])]
    exact = [(w.astype(np.float64), h.astype(np.float64)) for w, h in both]
    assert signal == pytest.approx(sum((w**2).sum() for w, _ in exact), rel=1e-6)
    assert error == pytest.approx(sum(((h - w) ** 2).sum() for w, h in exact), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e15, 1e30])
def test_squares_that_float32_does_not_hold_are_summed(scale: float):
    want = np.full(5000, scale, np.float32)
    signal, error = signal_and_error([want], [want * np.float32(1.5)])
    exact = 5000 * float(want[0]) ** 2
    assert signal == pytest.approx(exact, rel=1e-6)
    assert error == pytest.approx(exact / 4, rel=1e-6)
    half = want.astype(np.float64)
    assert signal_and_error([want], [half])[1] == 0.0


@pytest.mark.parametrize(
    ("want", "have", "comparable", "finite"),
    [
        (np.inf, 1.0, False, True),
        (np.nan, np.nan, False, True),
        (np.inf, np.inf, False, True),
        (1.0, np.inf, True, False),
        (1.0, np.nan, True, False),
        (1e200, 1.0, True, True),  # squares overflow, values do not
    ],
)
def test_values_that_are_not_finite_are_not_added(
    want: float, have: float, comparable: bool, finite: bool
):
    sums = SignalSums()
    sums.add(np.ones(2), np.ones(2))
    with np.errstate(over="ignore"):
        sums.add(np.array([1.0, want]), np.array([1.0, have]))
    assert (sums.comparable, sums.finite) == (comparable, finite)
    assert sums.signal == (2.0 if not (comparable and finite) else np.inf)


def test_outputs_count_alike_whatever_their_size():
    large, small = np.full((2, 3), 640.0), np.full((2, 5), 0.01)
    sums = OutputSums()
    sums.add([large, small], [large, small + 0.001])
    assert sums.ratio == pytest.approx(0.01 / 2)
    assert sums.sqnr_db == pytest.approx(-10 * np.log10(0.005))


def test_parts_of_an_output_count_alike():
    joined = np.concatenate([np.full((2, 4), 640.0), np.full((2, 3), 0.01)], axis=1)
    worse = joined.copy()
    worse[:, 4:] *= 1.1
    parts = [((slice(None), slice(0, 4)), (slice(None), slice(4, 7)))]
    whole, cut = OutputSums(), OutputSums(parts)
    for sums in (whole, cut):
        sums.add([joined], [worse])
    assert (whole.sqnr_db or 0) > 100
    assert cut.ratio == pytest.approx(0.01 / 2)


def test_an_output_that_says_nothing_counts_where_it_has_changed():
    """Such as anchors, which no input reaches: beside them, half of the error was hidden."""
    grid, scores = np.arange(6.0).reshape(2, 3), np.full((2, 5), 0.01)
    for parts, changed, ratio in (
        ((WHOLE, ()), 1.0, 0.01),
        ((WHOLE, WHOLE), 1.0, 0.01 / 2),
        ((WHOLE, ()), 1.1, 0.01),
    ):
        sums = OutputSums(parts)
        sums.add([scores, grid], [scores * 1.1, grid * changed])
        assert sums.ratio == pytest.approx(ratio)
        assert len(sums.spread_db) == 2, "it is named where it has changed"


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0, 1)), min_size=1, max_size=4))
def test_weights_give_the_ratio_of_the_errors(outputs: list[tuple[float, float]]):
    want = [np.full((2, i + 1), size) for i, (size, _) in enumerate(outputs)]
    have = [array * (1 + share) for array, (_, share) in zip(want, outputs, strict=True)]
    sums = OutputSums()
    for row in range(2):
        sums.add([a[row : row + 1] for a in want], [a[row : row + 1] for a in have])
    errors = [np.square(a - b).sum() for a, b in zip(want, have, strict=True)]
    assert sums.ratio == pytest.approx(float(sums.weights @ errors))
    assert sums.ratio == pytest.approx(np.mean([share**2 for _, share in outputs]), abs=1e-12)


def test_what_counts_nothing():
    zeros, ones, labels = np.zeros((1, 2)), np.ones((1, 2)), np.ones((1, 2), np.int64)
    sums = OutputSums()
    sums.add([zeros, ones, labels], [ones, ones * 1.1, labels * 3])
    assert sums.ratio == pytest.approx(0.01)  # neither zeros nor labels
    rounding = OutputSums()
    rounding.add([ones, ones * 1e-7], [ones * 1.1, ones * 3e-7])
    assert rounding.ratio == pytest.approx(0.01)  # a zero, but for the last place of float32
    small = OutputSums()
    small.add([ones, ones * 1e-5], [ones * 1.1, ones * 3e-5])
    assert small.ratio == pytest.approx((0.01 + 4) / 2)
    alone = OutputSums()
    alone.add([labels], [labels * 3])
    assert alone.ratio == pytest.approx(4.0)
    nothing = OutputSums()
    nothing.add([zeros], [ones])
    assert nothing.ratio is None
    assert nothing.sqnr_db is None
    broken = OutputSums()
    broken.add([ones, ones], [ones, ones * np.inf])
    assert broken.ratio is None


def test_values_of_other_shapes_are_not_compared():
    sums = SignalSums()
    sums.add(np.ones((2, 3)), np.ones((2, 3)))
    sums.add(np.ones((2, 3)), np.ones((2, 4)))
    assert (sums.comparable, sums.finite, sums.ratio) == (False, True, None)


@pytest.mark.parametrize("parts", [(), [()], [(), ()]])
def test_of_no_outputs_nothing_is_known(parts):
    """No sample of a dear network is followed to its outputs, of which there may be several."""
    sums = OutputSums(parts)
    assert (sums.ratio, sums.sqnr_db) == (None, None)
