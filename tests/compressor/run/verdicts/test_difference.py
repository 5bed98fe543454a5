"""Differences of metrics from results on the same samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compressor.run.metrics.corpus import f1
from compressor.run.metrics.metrics import kept_scale
from compressor.run.metrics.text_metrics import F1
from compressor.run.verdicts import statistics
from compressor.run.verdicts.statistics import (
    BOOTSTRAP,
    MCNEMAR,
    Scale,
    paired_difference,
    percentiles,
    resampled_means,
    samples_needed,
)

PERCENT = Scale(factor=100.0)
RNG = np.random.default_rng(0)
BITS = arrays(np.float64, 40, elements=st.sampled_from([0.0, 1.0]))
FLOATS = arrays(np.float64, 25, elements=st.floats(-5, 5))


@given(base=BITS, candidate=BITS)
def test_shares_mirror(base: np.ndarray, candidate: np.ndarray) -> None:
    one = paired_difference(base, candidate, PERCENT)
    other = paired_difference(candidate, base, PERCENT)
    assert one.method == MCNEMAR
    assert one.drop == pytest.approx(100 * (base.mean() - candidate.mean()))
    assert one.drop == -other.drop
    assert one.ci95 == tuple(-end for end in reversed(other.ci95))
    assert one.ci95[0] <= one.drop <= one.ci95[1]
    assert one.p + other.p == pytest.approx(1.0)


@given(base=FLOATS, candidate=FLOATS, exponential=st.booleans(), higher=st.booleans())
def test_the_bootstrap_holds_the_drop(
    base: np.ndarray, candidate: np.ndarray, exponential: bool, higher: bool
) -> None:
    found = paired_difference(base, candidate, Scale(1.0, exponential, higher))
    values = [float(np.exp(v.mean()) if exponential else v.mean()) for v in (base, candidate)]
    sign = 1 if higher else -1
    assert found.drop == pytest.approx(sign * (values[0] - values[1]), abs=1e-9)
    assert found.ci95[0] <= found.drop <= found.ci95[1]
    assert 0 < found.p <= 1


def test_the_bootstrap_is_repeatable_and_keeps_pairs() -> None:
    base = RNG.normal(size=300)
    shifted = base - 0.01  # the same loss in every sample: the pairs say so, the means do not
    first, second = (paired_difference(base, shifted, Scale()) for _ in range(2))
    assert (first.p, first.ci95) == (second.p, second.ci95)
    assert first.method == BOOTSTRAP
    assert first.p < 0.001
    assert first.ci95 == pytest.approx((0.01, 0.01))


def test_draws_do_not_depend_on_how_many_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = RNG.normal(size=(50, 2))
    whole = resampled_means(values, 40)
    assert whole.shape == (40, 2)
    monkeypatch.setattr(statistics, "_AT_ONCE", 150)
    assert np.array_equal(whole, resampled_means(values, 40))


def test_every_sample_is_drawn_as_often_as_any_other() -> None:
    means = resampled_means(np.eye(5))
    assert means.mean(axis=0) == pytest.approx([0.2] * 5, abs=0.02)
    assert means.sum(axis=1) == pytest.approx(np.ones(4000))


def test_percentiles_leave_the_same_share_out_on_either_side() -> None:
    values = np.random.default_rng(0).permutation(1001).astype(float)
    assert percentiles(values) == pytest.approx((25.0, 975.0))
    assert percentiles(values, 0.9) == pytest.approx((50.0, 950.0))


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_the_bootstrap_is_as_wide_as_the_normal_law_says(factor: float) -> None:
    rng = np.random.default_rng(1)
    base, candidate = rng.normal(0.5, 1.0, 900), rng.normal(0.45, 1.0, 900)
    found = paired_difference(base, candidate, Scale(factor))
    error = factor * float((base - candidate).std()) / 30
    low, high = found.ci95
    assert (found.samples, found.drop) == (
        900,
        pytest.approx(factor * float((base - candidate).mean())),
    )
    # 4000 draws know the ends of an interval to about four percent of its half.
    assert low == pytest.approx(found.drop - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(found.drop + 1.96 * error, abs=0.1 * error)
    assert found.deviation == pytest.approx(30 * error, rel=0.05)
    needed = found.samples_needed(0.05, found.drop - 0.05 * factor)
    plain = samples_needed(0.05, 30 * error / factor, 0.05)
    assert needed == pytest.approx(plain, rel=0.1)


def test_exponentials_of_means_are_compared() -> None:
    base, candidate = np.full(50, 1.0), np.full(50, 1.2)
    found = paired_difference(base, candidate, Scale(2.0, exponential=True, higher_is_better=False))
    assert found.drop == pytest.approx(2 * (np.exp(1.2) - np.exp(1.0)))
    assert found.ci95 == pytest.approx((found.drop, found.drop))
    assert found.p == 1 / 4001  # no draw of 4000 says otherwise
    assert Scale(100.0).metric(np.array([0.5])) == 50.0


def test_fractions_of_a_sample_are_no_counts() -> None:
    base = np.full(60, 0.5)
    found = paired_difference(base, base, PERCENT)
    assert found.method == BOOTSTRAP
    assert found.lost is None
    assert found.equal
    assert found.ci95 == (0.0, 0.0)
    assert found.p == 1.0


@pytest.mark.parametrize("change", [0.3, -0.3])
@pytest.mark.parametrize("exponential", [False, True])
def test_one_sample_proves_nothing_of_a_mean(change: float, exponential: bool) -> None:
    scale = Scale(exponential=exponential)
    found = paired_difference(np.array([1.5]), np.array([1.5 - change]), scale)
    assert found.p > 0.2
    assert found.within_p(1.0) > 0.2
    same = paired_difference(np.array([1.5]), np.array([1.5]), scale)
    assert same.equal
    assert same.within_p(0.1) < 0.01


def test_within_a_limit() -> None:
    base, candidate = np.ones(2000), np.ones(2000)
    candidate[:10] = 0.0  # half a point
    counted = paired_difference(base, candidate, PERCENT)
    assert counted.within_p(1.0) < 0.05 < counted.within_p(0.6)
    noise = RNG.normal(0.5, 1.0, 2000)
    measured = paired_difference(noise, np.zeros(2000), Scale())
    assert measured.within_p(0.6) < 0.05 < measured.within_p(0.5)


def test_samples_needed_follow_the_formula() -> None:
    # (1.645 sqrt(0.05) + 0.842 sqrt(0.05 - 0.0001))^2 / 0.01^2 = 3090, rounded up
    assert samples_needed(0.01, (0.05 - 0.0001) ** 0.5, 0.05, 0.05**0.5) == 3100
    # (1.645 sqrt(0.3) + 0.842 sqrt(0.3 - 0.2^2))^2 / 0.2^2 = 44.2; the other way round 42.2
    assert samples_needed(0.2, 0.26**0.5, 0.05, 0.3**0.5) == 45
    assert samples_needed(-0.2, 0.26**0.5, 0.05, 0.3**0.5) == 45
    assert samples_needed(1.0, 2.0, 0.05) == 25
    assert samples_needed(0.0, 1.0, 0.05) is None
    assert samples_needed(0.1, 0.0, 0.05) is None
    assert samples_needed(1e-9, 1.0, 0.05) is None


def test_as_many_samples_as_there_are_would_not_do() -> None:
    base, candidate = np.ones(500), np.ones(500)
    candidate[:6], base[6:10] = 0.0, 0.0
    found = paired_difference(base, candidate, PERCENT)
    assert found.p > 0.05
    needed = found.samples_needed(0.05)
    assert needed is not None
    assert needed > 500
    assert needed == found.samples_needed(0.05, 0.0)
    sure = paired_difference(np.ones(500), np.zeros(500), PERCENT)
    assert sure.samples_needed(0.05) is None
    for samples in (21, 22, 26):  # 21 to 26 would do, where 16 are lost and 5 won of that many
        base, candidate = np.ones(samples), np.ones(samples)
        candidate[:16], base[16:21] = 0.0, 0.0
        assert paired_difference(base, candidate, PERCENT).samples_needed(0.05) is None
    clear = np.ones(500), np.where(np.arange(500) < 50, 0.0, 1.0)
    assert paired_difference(*clear, PERCENT).samples_needed(0.05) is None


def test_a_comparison_says_all_but_the_draws() -> None:
    base, candidate = np.ones(500), np.ones(500)
    candidate[:6], base[6:10] = 0.0, 0.0
    found = paired_difference(base, candidate, PERCENT)
    written = found.as_json()
    assert list(written) == [
        *("drop", "ci95", "p", "p_exact", "method", "samples", "lost", "won"),
    ]
    assert (written["samples"], written["lost"], written["won"]) == (500, 6, 4)
    assert (written["drop"], written["p"], written["method"]) == (found.drop, found.p, MCNEMAR)
    assert written["p_exact"] == pytest.approx(386 / 1024)  # 10 over 6 to 10 of 10


def test_a_share_may_be_one_of_errors() -> None:
    base, candidate = np.zeros(100), np.zeros(100)
    candidate[:8] = 1.0
    errors = paired_difference(base, candidate, Scale(100.0, higher_is_better=False))
    assert (errors.drop, errors.lost, errors.won) == (8.0, 8, 0)
    assert paired_difference(base, candidate, PERCENT).drop == -8.0


def rare_f1(decisions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of F1 of two models, from the rows' truth and both models' decisions."""
    truth, *models = decisions.T

    def values(given: np.ndarray) -> np.ndarray:
        hits = [2 * (truth == label) * (given == label) for label in (0, 1)]
        sizes = [(truth == label) + (given == label).astype(int) for label in (0, 1)]
        return f1(np.stack([*hits, *sizes], axis=1).astype(float))

    return values(models[0]), values(models[1])


def test_an_f1_that_no_decision_changed_is_not_known_exactly() -> None:
    rows = np.zeros((2000, 3), int)
    rows[:100] = 1
    rows[:25, 1:] = 0  # a quarter of the hundred is not found
    base, same = rare_f1(rows)
    scale = F1.scale
    found = paired_difference(base, same, scale)
    assert found.equal
    # One of the found that is lost takes 0.76 points; three or four of 2000 may be expected.
    assert found.ci95 == (pytest.approx(-found.ci95[1]), pytest.approx(4 * 0.65, rel=0.1))
    rows[30, 2] = 0
    lost = paired_difference(*rare_f1(rows), scale)
    assert lost.drop == pytest.approx(100 * (150 / 175 - 148 / 174))
    assert lost.ci95[0] < -1.0
    assert lost.ci95[1] > 2.5
    kept = kept_scale({"name": "f1", "unit": "%", "higher_is_better": True}, 100, exponential=False)
    assert kept == scale


@pytest.mark.parametrize(("samples", "limit", "draws"), [(500, 3.0, 150), (2000, 2.0, 60)])
def test_a_rare_class_is_seldom_proved_to_keep_a_limit_that_it_breaks(
    samples: int, limit: float, draws: int
) -> None:
    """One in twenty is of the class; without what was not seen, 12 % and 31 % are proved."""
    rng, share = np.random.default_rng(0), 0.05
    found, spurious = 0.75 * share, 0.19 * share
    figure = 2 * found / (share + found + spurious)
    lost = found * (limit / 100) / (2 - figure) / found * (share + found + spurious)
    proved = 0
    for _ in range(draws):
        drawn = rng.random(samples)
        truth = drawn < share
        base = (drawn < found) | ((drawn > share) & (drawn < share + spurious))
        candidate = base & (drawn >= lost)
        rows = np.stack([truth, base, candidate], axis=1).astype(int)
        proved += paired_difference(*rare_f1(rows), F1.scale).ci95[1] <= limit
    assert proved <= 0.05 * draws
