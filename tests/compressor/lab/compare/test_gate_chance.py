"""How much chance the gate allows, and what it says of it."""

from dataclasses import replace

import numpy as np
import pytest

from compressor.lab.compare.compare import Comparison
from compressor.lab.compare.gate import GateLimits, judge, loss_words, probability
from compressor.run.verdicts.statistics import Scale, paired_difference
from tests.compressor.lab.compare.made_runs import counted, only


@pytest.mark.parametrize(
    ("lost", "won", "limit", "end"),
    [
        (9, 7, 1.0, "1.09 (p = 0.31): within the limit 1 (one-sided p = 0.036)"),
        (8, 7, 1.0, ": within the limit 1"),
        (0, 0, 1.0, "the same on all 1,000 samples: within the limit 1"),
    ],
)
def test_the_chance_that_decided_is_shown_where_the_interval_contains_the_limit(
    worse: Comparison, lost: int, won: int, limit: float, end: str
) -> None:
    comparison = counted(worse, lost, won)
    check = only(comparison, GateLimits(metric_drop=limit))
    assert check.verdict == "passed"
    assert check.text.endswith(end)
    assert comparison.difference is not None
    ending = replace(comparison.difference, ci95=(-limit, limit))  # at the limit, within it
    at_the_limit = only(replace(comparison, difference=ending), GateLimits(metric_drop=limit))
    assert at_the_limit.text.endswith(": within the limit 1")


@pytest.mark.parametrize(
    ("lost", "won", "verdicts"),
    [
        # mid-p (1 + 6 / 2) / 2**6 = 0.063: over alpha, its half is not; a loss of a point: 0.036
        (5, 1, ["unknown", "passed", "failed"]),
        # (1 + 7 / 2) / 2**7 = 0.035: under alpha, its double is not
        (6, 1, ["unknown", "failed", "failed"]),
        (1, 6, ["passed"] * 3),
        (3, 3, ["passed"] * 3),
    ],
)
def test_a_loss_is_real_at_the_level_that_was_asked_for(
    worse: Comparison, lost: int, won: int, verdicts: list[str]
) -> None:
    found = counted(worse, lost, won)
    limits = [GateLimits(alpha=alpha) for alpha in (0.01, 0.05, 0.07)]
    assert [only(found, each).verdict for each in limits] == verdicts


@pytest.mark.parametrize(("lost", "verdict"), [(10, "unknown"), (9, "passed")])
def test_a_loss_within_the_limit_is_proved_at_the_level_that_was_asked_for(
    worse: Comparison, lost: int, verdict: str
) -> None:
    found = counted(worse, lost, 0)
    # Scores of a true drop of 1.6 points: -1.51 and -1.76, which are chances of 0.065 and 0.039.
    assert only(found, GateLimits(metric_drop=1.6)).verdict == verdict
    assert only(found, GateLimits(metric_drop=1.6, alpha=0.03)).verdict == "unknown"
    assert only(found, GateLimits(metric_drop=1.6, alpha=0.08)).verdict == "passed"


def test_the_number_of_samples_that_would_do_tells_the_two_deviations_apart(
    worse: Comparison,
) -> None:
    # (1.645 sqrt(0.3) + 0.842 sqrt(0.3 - 0.2^2))^2 / 0.2^2 = 44.2; the other way round 42.2
    check = only(counted(worse, 5, 1, samples=20), GateLimits())
    assert check.text.endswith(": not distinguishable with 20 samples; 45 would do")


def test_equal_models_fail_as_often_as_alpha_says(worse: Comparison) -> None:
    """The smaller sister of ``bench_gate``: 600 pairs, 2000 samples, 3 percent disagreement."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(600):
        base = rng.random(2000) < 0.9
        candidate = base ^ (rng.random(2000) < np.where(base, 0.015 / 0.9, 0.015 / 0.1))
        found = paired_difference(base * 1.0, candidate * 1.0, Scale(100.0))
        alarms += not judge(replace(worse, difference=found), GateLimits()).ok
    assert 0.03 <= alarms / 600 <= 0.07


def test_models_that_lost_as_much_as_they_won_lost_nothing(worse: Comparison) -> None:
    found = counted(worse, 3, 3)
    assert only(found, GateLimits(metric_drop=-1.0, alpha=0.9)).verdict == "unknown"
    assert only(found, GateLimits()).text.startswith("no difference, 95 % interval −0.")
    assert only(found, GateLimits()).text.endswith(" (p = 0.5)")


def test_a_gain_that_is_not_proved_says_how_many_samples_would_do(worse: Comparison) -> None:
    found = counted(worse, 3, 5)
    assert found.difference is not None
    needed = found.difference.samples_needed(0.05, 0.0)
    assert needed is not None
    check = only(found, GateLimits(metric_drop=0.0))
    assert check.verdict == "unknown"
    assert check.text.endswith(f", not proved with 1,000 samples; {needed:,} would do")


def test_words_of_losses() -> None:
    assert loss_words(0.0, (-1.0, 2.0), share=True)[2]
    assert loss_words(-0.5, (-1.0, 0.2), share=True)[1:] == ("−0.20 to 1.00", False)
    assert [probability(p) for p in (0.0009, 0.001, 0.25)] == ["p < 0.001", "p = 0.001", "p = 0.25"]
