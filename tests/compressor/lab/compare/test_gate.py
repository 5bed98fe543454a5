"""What the gate decides, and what it says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import DataError, SpecError
from compressor.lab.compare.compare import Comparison, compare_runs
from compressor.lab.compare.gate import GateLimits, judge
from tests.compressor.lab.compare.made_runs import (
    STORED,
    compared,
    counted,
    made_run,
    only,
    results,
)


def test_a_real_loss_over_the_limit_fails(worse: Comparison) -> None:
    check = only(worse, GateLimits(metric_drop=0.3))
    assert (check.verdict, check.ok) == ("failed", False)
    assert check.text == (
        "worse by 0.40 points, 95 % interval 0.20 to 0.67 (p < 0.001): fails the limit 0.3"
    )


def test_without_a_limit_any_real_loss_fails(worse: Comparison) -> None:
    check = only(worse, GateLimits())
    assert not check.ok
    assert check.text.endswith(": the loss is real")


def test_a_loss_proved_to_be_within_the_limit_passes(worse: Comparison) -> None:
    for strict in (False, True):
        check = only(worse, GateLimits(metric_drop=1.0, strict=strict))
        assert (check.verdict, check.ok) == ("passed", True)
    assert check.text.endswith(": within the limit 1")


def test_within_the_limit_as_measured_is_enough_unless_strict(worse: Comparison) -> None:
    check = only(worse, GateLimits(metric_drop=0.45))
    assert (check.verdict, check.ok) == ("unknown", True)
    assert "within the limit 0.45 as measured, not proved with 4,000 samples;" in check.text
    assert check.text.endswith(" would do")
    assert not only(worse, GateLimits(metric_drop=0.45, strict=True)).ok


def test_a_limit_that_nothing_breaks_is_refused(worse: Comparison) -> None:
    with pytest.raises(SpecError, match=r"--max-metric-drop: is 100, and accuracy can lose 100"):
        judge(worse, GateLimits(metric_drop=100.0))


def test_noise_is_not_distinguishable(tmp_path: Path) -> None:
    comparison = compared(tmp_path, results(4, 500, start=100), results(6, 500))
    for limit, end in (
        (None, "a loss below 1.00 points is not proved with 500 samples; 3,500 would do"),
        (0.3, "not distinguishable with 500 samples; 7,800 would do"),
    ):
        check = only(comparison, GateLimits(metric_drop=limit))
        assert (check.verdict, check.ok) == ("unknown", True)
        measured = "worse by 0.40 points, 95 % interval −0.99 to 1.90 (p = 0.27): "
        assert check.text == measured + end
    assert not only(comparison, GateLimits(metric_drop=0.3, strict=True)).ok


@pytest.mark.parametrize(("other", "verdict"), [("e" * 64, "passed"), ("f" * 64, "unknown")])
def test_the_same_file_needs_no_samples(tmp_path: Path, other: str, verdict: str) -> None:
    file = "artifacts/0/files/0/sha256"
    one = made_run(tmp_path / "a", results(10, 100), changes={file: "e" * 64})
    same = made_run(tmp_path / "b", results(10, 100), changes={file: other})
    for limit in (1.0, 0.0):
        check = only(compare_runs(one, same, STORED), GateLimits(metric_drop=limit, strict=True))
        assert (check.verdict, check.ok) == (verdict, verdict == "passed")
        why = check.text == "the same on all 100 samples: the same bytes as the base"
        assert why is (verdict == "passed")
    worse = made_run(tmp_path / "c", results(20, 100), changes={file: other})
    assert only(compare_runs(one, worse, STORED), GateLimits(metric_drop=1.0)).verdict == "failed"


@pytest.mark.parametrize(
    ("metric", "values", "limit", "verdict"),
    [
        ("accuracy", results(1, 10), None, "unknown"),  # ten answers that are the same
        ("accuracy", results(0, 10), None, "unknown"),
        ("mse", np.zeros(10), None, "passed"),  # of nothing, one percent is nothing
        ("mse", np.zeros(10), 0.0, "unknown"),
        ("mse", np.full(10, 0.5), None, "passed"),
    ],
)
def test_the_same_answers_of_other_bytes(
    tmp_path: Path, metric: str, values: np.ndarray, limit: float | None, verdict: str
) -> None:
    one, other = (
        made_run(tmp_path / n, values, metric=metric, changes={"artifacts/0/files/0/sha256": n})
        for n in ("e" * 64, "f" * 64)
    )
    check = only(compare_runs(one, other, STORED), GateLimits(metric_drop=limit))
    assert check.verdict == verdict, check.text


def test_the_float_model_has_no_file_to_compare(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", results(0, 10))
    beside = replace(STORED, base_artifact="float")
    assert only(compare_runs(run, run, beside), GateLimits()).verdict == "unknown"


@pytest.mark.parametrize(
    ("lost", "won", "samples", "verdict"),
    [
        (1, 1, 10, "unknown"),
        (2, 2, 300, "unknown"),
        (2, 2, 2000, "passed"),
        (20, 30, 400, "passed"),
        (71, 63, 8000, "passed"),  # it lost more than it won, by chance, and less than a point
        (71, 63, 1000, "unknown"),
    ],
)
def test_without_a_limit_few_samples_show_nothing(
    tmp_path: Path, lost: int, won: int, samples: int, verdict: str
) -> None:
    base, candidate = results(won, samples, start=samples // 2), results(lost, samples)
    comparison = compared(tmp_path, base, candidate)
    check = only(comparison, GateLimits())
    assert (check.verdict, check.ok) == (verdict, True)
    unproved = ": a loss below 1.00 points is not proved with " in check.text
    assert unproved == (verdict == "unknown")
    excluded = check.text.endswith(": a loss of 1.00 points is excluded")
    assert excluded == (verdict == "passed" and lost > won)
    assert judge(comparison, GateLimits()).verdict == verdict


def test_without_a_limit_a_loss_above_the_default_may_be_chance(tmp_path: Path) -> None:
    check = only(compared(tmp_path, results(1, 100, start=50), results(3, 100)), GateLimits())
    assert (check.verdict, check.ok) == ("unknown", True)
    assert ": not distinguishable with 100 samples; " in check.text


def test_without_a_limit_a_mean_is_held_against_one_percent(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=400)
    for name, spread, verdict in (("wide", 0.3, "unknown"), ("narrow", 0.03, "passed")):
        base = np.full(400, 1.5)
        one = made_run(tmp_path / name / "a", base, metric="perplexity")
        other = made_run(
            tmp_path / name / "b",
            base + spread * (noise - noise.mean()) - 1e-4,
            metric="perplexity",
        )
        check = only(compare_runs(one, other, STORED), GateLimits())
        assert (check.verdict, check.ok) == (verdict, True), check.text


def test_better_and_equal_models_pass(tmp_path: Path) -> None:
    better = compared(tmp_path / "1", results(30), results(10))
    assert only(better, GateLimits()).verdict == "passed"
    # Wilson's interval of 20 in 1000, as nothing was lost.
    assert only(better, GateLimits()).text == "better by 2.00 points, 95 % interval 1.30 to 3.07"
    equal = compared(tmp_path / "2", results(10), results(10))
    assert only(equal, GateLimits()).text == "the same on all 1,000 samples"
    assert only(equal, GateLimits(metric_drop=1.0, strict=True)).ok


def test_lower_may_be_better(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=400) / 100
    base = np.full(400, 1.5) + noise
    options = {"metric": "perplexity"}
    one = made_run(tmp_path / "a", base, **options)  # type: ignore[arg-type]
    other = made_run(tmp_path / "b", base + 0.1, **options)  # type: ignore[arg-type]
    check = only(compare_runs(one, other, STORED), GateLimits())
    assert not check.ok
    assert check.measured == pytest.approx(
        np.exp(base + 0.1).mean() - np.exp(base).mean(), abs=1e-3
    )
    assert only(compare_runs(other, one, STORED), GateLimits()).ok


def test_ratios_are_held_against_their_limits(tmp_path: Path) -> None:
    one = made_run(tmp_path / "a", results(5))
    ratio = {"value": 0.6, "ci95": [0.59, 0.61]}
    changes = {"artifacts/0/latency/0/ratio": ratio, "artifacts/0/bytes": 1_100_000}
    other = made_run(tmp_path / "b", results(5), changes=changes)
    comparison = compare_runs(one, other, STORED)
    _, latency, size = judge(comparison, GateLimits(latency_ratio=1.1, size_ratio=1.05)).checks
    assert latency.verdict == size.verdict == "failed"
    assert latency.text == (
        "1.20 ×, 95 % interval 1.17 to 1.23 at batch 1, from two runs, each timed beside the "
        "float model: fails the limit 1.1"
    )
    assert size.text == "1.10 MB over 1.00 MB, 1.10 ×: fails the limit 1.05"
    _, open_, held = judge(comparison, GateLimits(latency_ratio=1.2, size_ratio=1.1)).checks
    assert (open_.verdict, open_.ok, held.verdict) == ("unknown", True, "passed")
    assert not judge(comparison, GateLimits(latency_ratio=1.2, strict=True)).ok


def timed(comparison: Comparison, value: float | None, *ci95: float) -> Comparison:
    """Return the comparison with another ratio of latencies."""
    interval = (ci95[0], ci95[1]) if ci95 else None
    return replace(comparison, latency=replace(comparison.latency, value=value, ci95=interval))


@pytest.mark.parametrize(
    ("interval", "verdict", "words"),
    [
        ((0.8, 0.9), "passed", "within the limit 1"),
        ((0.8, 1.0), "passed", "within the limit 1"),
        ((0.8, 1.01), "unknown", "not distinguishable from the limit 1"),
        ((1.01, 1.2), "failed", "fails the limit 1"),
        # Wide, and so near to the limit that half the width again would reach it.
        ((0.6, 0.95), "unknown", "not distinguishable from the limit 1"),
        ((1.05, 1.9), "unknown", "not distinguishable from the limit 1"),
    ],
)
def test_a_latency_is_judged_by_its_interval(
    worse: Comparison, interval: tuple[float, float], verdict: str, words: str
) -> None:
    for strict in (False, True):
        limits = GateLimits(latency_ratio=1.0, strict=strict)
        _, check = judge(timed(worse, 0.85, *interval), limits).checks
        assert (check.name, check.limit) == ("latency-ratio", 1.0)
        assert (check.measured, check.ci95, check.verdict) == (0.85, interval, verdict)
        assert check.ok == (verdict == "passed" or (verdict == "unknown" and not strict))
        assert check.text.endswith(f": {words}")


@pytest.mark.parametrize(("value", "interval"), [(None, ()), (0.9, ()), (None, (0.8, 1.0))])
def test_a_latency_without_an_interval_cannot_be_judged(
    worse: Comparison, value: float | None, interval: tuple[float, ...]
) -> None:
    with pytest.raises(DataError, match="--max-latency-ratio"):
        judge(timed(worse, value, *interval), GateLimits(latency_ratio=1.0))


@pytest.mark.parametrize(
    ("latency", "verdict", "ok"),
    [((0.8, 0.9), "passed", True), ((0.8, 1.1), "unknown", True), ((1.1, 1.2), "failed", False)],
)
def test_a_gate_is_as_bad_as_its_worst_check(
    worse: Comparison, latency: tuple[float, float], verdict: str, ok: bool
) -> None:
    limits = GateLimits(metric_drop=1.0, latency_ratio=1.0, size_ratio=1.0)
    result = judge(timed(worse, 0.85, *latency), limits)
    assert [c.verdict for c in result.checks] == ["passed", verdict, "passed"]
    assert (result.verdict, result.ok) == (verdict, ok)
    written = result.as_json()
    assert (written["verdict"], written["ok"]) == (verdict, ok)
    assert [c["name"] for c in written["checks"]] == ["metric-drop", "latency-ratio", "size-ratio"]
    assert [c["limit"] for c in written["checks"]] == [1.0, 1.0, 1.0]
    assert [c["measured"] for c in written["checks"]] == [0.4, 0.85, 1.0]
    assert worse.difference is not None
    assert [c["ci95"] for c in written["checks"]] == [worse.difference.ci95, latency, None]
    assert written["checks"][1]["verdict"] == verdict
    assert set(worse.as_json()) < set(written)
    strict = judge(timed(worse, 0.85, *latency), replace(limits, strict=True))
    assert strict.ok == (verdict == "passed")
    assert strict.verdict == ("passed" if verdict == "passed" else "failed")


def test_what_is_at_the_limit_is_within_it(worse: Comparison) -> None:
    assert worse.difference is not None
    at = only(worse, GateLimits(metric_drop=worse.difference.drop))
    assert at.verdict == "unknown"
    assert "within the limit 0.4 as measured" in at.text
    assert at.text.endswith(", not proved with 4,000 samples")  # no number would do
    open_ = counted(worse, 5, 1)
    assert open_.difference is not None
    assert only(open_, GateLimits(alpha=open_.difference.p)).verdict == "passed"
    chance = worse.difference.within_p(0.6)
    assert only(worse, GateLimits(metric_drop=0.6, alpha=chance)).verdict == "unknown"
    assert only(worse, GateLimits(metric_drop=0.6, alpha=1.01 * chance)).verdict == "passed"


def test_what_was_not_measured_cannot_be_judged(tmp_path: Path) -> None:
    comparison = compared(tmp_path, None, None)
    for limits in (GateLimits(), GateLimits(metric_drop=1.0)):
        with pytest.raises(DataError, match=r"the spec has no data\.evaluation"):
            judge(comparison, limits)
    assert judge(comparison, GateLimits(size_ratio=1.0)).ok


def test_other_machines_have_no_ratio(tmp_path: Path) -> None:
    one = made_run(tmp_path / "a", results(5))
    other = made_run(tmp_path / "b", results(5), changes={"environment/cores": 64})
    with pytest.raises(DataError, match="timed on different machines"):
        judge(compare_runs(one, other, STORED), GateLimits(latency_ratio=1.0))


def test_strict_without_a_limit_asks_for_the_usual_one(tmp_path: Path, worse: Comparison) -> None:
    strict = GateLimits(strict=True)
    assert only(worse, strict).text.endswith(": the loss is real")
    noise = only(compared(tmp_path / "1", results(4, 500, start=100), results(6, 500)), strict)
    assert (noise.verdict, noise.ok) == ("unknown", False)
    proved = only(compared(tmp_path / "2", results(10, 4000), results(10, 4000)), strict)
    assert (proved.verdict, proved.ok) == ("passed", True)
