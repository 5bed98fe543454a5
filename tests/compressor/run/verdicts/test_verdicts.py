"""A measurement beside its limit: passed, failed, or unknown."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor import catalog
from compressor.errors import DataError, SpecError
from compressor.run.verdicts.verdicts import (
    BLIND,
    WIDEST_RATIO,
    check_expected,
    check_reachable,
    judge,
    overall,
    verdict_of,
)
from compressor.spec.keys import LimitKeys

RATIOS = st.floats(0.01, 100)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.9, 0.99), "passed"),
        ((0.9, 1.0), "passed"),
        ((1.0, 1.0), "passed"),
        ((0.9, 1.01), "unknown"),
        ((1.0, 1.01), "unknown"),
        ((1.01, 1.02), "failed"),
        ((0.17, 36.0), "unknown"),  # these three were called passed, failed and passed
        ((1.02, 112.0), "unknown"),
        ((0.77, 2.02), "unknown"),
        ((0.3, 0.9), "unknown"),
        ((0.1, 0.3), "passed"),  # wide, but far inside
        ((50.0, 120.0), "failed"),
        ((float("nan"), 0.9), "unknown"),
        ((0.9, float("nan")), "unknown"),
        ((1.2, float("inf")), "unknown"),
        ((0.0, 0.1), "unknown"),
        (None, "unknown"),
    ],
)
def test_a_ratio_beside_one(interval: tuple[float, float] | None, verdict: str):
    assert verdict_of(interval, 1.0, WIDEST_RATIO) == verdict


def test_a_difference_has_no_factor_between_its_bounds():
    assert verdict_of((-0.4, 0.1), 0.5) == "passed"
    assert verdict_of((0.6, 9.0), 0.5) == "failed"
    assert verdict_of((0.4, 0.6), 0.5) == "unknown"


def test_the_widest_interval_that_means_something_still_does():
    assert verdict_of((1.01, 1.01 * WIDEST_RATIO), 1.0, WIDEST_RATIO) == "failed"
    assert verdict_of((1.01, 1.02 * WIDEST_RATIO), 1.0, WIDEST_RATIO) == "unknown"


@given(RATIOS, RATIOS, RATIOS)
def test_only_evidence_decides(one: float, other: float, limit: float):
    low, high = sorted((one, other))
    verdict = verdict_of((low, high), limit, WIDEST_RATIO)
    # What is too wide has to lie half its own width away, in logarithms.
    away = 0.0 if high <= WIDEST_RATIO * low else 0.5 * math.log(high / low)
    if verdict != "passed":
        assert math.log(high / limit) > -away - 1e-9
    if verdict != "failed":
        assert math.log(low / limit) < away + 1e-9
    if verdict == "unknown":
        assert high <= limit or low > limit or low <= limit <= high
    else:
        assert (high <= limit) == (verdict == "passed")


ACCURACY = {"name": "accuracy", "value": 90.0, "samples": 400, "ci95": [86.7, 92.6], "unit": "%"}
PERPLEXITY = {**ACCURACY, "name": "perplexity", "value": 5.0, "unit": ""}
ERROR = {**ACCURACY, "name": "mse", "value": 0.0, "unit": ""}
OFF = {"metric_drop": None, "size_ratio": None, "latency_ratio": None}


def entry(**changes: Any) -> dict[str, Any]:
    """Make an artifact that lost 0.4 points, 0.3 to 0.5, is 0.3 of the size and 0.9 as slow."""
    ratio = changes.pop("ratio", (0.9, 0.85, 0.95))
    return {
        "path": "model.onnx",
        "deployed": True,
        "metric": ACCURACY,
        "metric_reason": None,
        "metric_drop": 0.4,
        "metric_drop_ci95": [0.3, 0.5],
        "sqnr_db": 20.0,
        "size_ratio": 0.3,
        "latency": [{"batch": 1, "ratio": {"value": ratio[0], "ci95": [ratio[1], ratio[2]]}}],
        "latency_ratio_reason": None,
        "checks": [{"name": "opens in its runtime", "ok": True}],
        **changes,
    }


def judged(
    limits: dict[str, float | None],
    *artifacts: dict[str, Any],
    metric: dict[str, Any] | None = ACCURACY,
    shrinks: bool = True,
) -> list[tuple[str, float, bool, str]]:
    entries = judge(LimitKeys(**limits), artifacts, metric, shrinks=shrinks)
    assert all(e["ok"] == (e["verdict"] != "failed") for e in entries)
    return [(e["name"], e["limit"], e["default"], e["verdict"]) for e in entries]


def test_each_limit_and_artifact_has_an_entry():
    storage = entry(path="model.safetensors", deployed=False)
    keys = LimitKeys(metric_drop=0.5, size_ratio=0.3)
    entries = judge(keys, [entry(), storage], ACCURACY, shrinks=True)
    assert [(e["name"], e["artifact"], e["limit"], e["measured"]) for e in entries] == [
        ("metric-drop", "model.onnx", 0.5, 0.4),
        ("size-ratio", "model.onnx", 0.3, 0.3),
        ("latency-ratio", "model.onnx", 1.0, 0.9),
        ("metric-drop", "model.safetensors", 0.5, 0.4),
        ("size-ratio", "model.safetensors", 0.3, 0.3),
    ]
    assert {e["verdict"] for e in entries} == {"passed"}
    assert [e["ci95"] for e in entries[:3]] == [[0.3, 0.5], None, [0.85, 0.95]]
    assert [e["default"] for e in entries] == [False, False, True, False, False]
    assert all(e["reason"] is None for e in entries)


def test_limits_that_are_off():
    assert judged(OFF, entry()) == []


@pytest.mark.parametrize(
    ("drop", "interval", "verdict"),
    [
        (0.4, (0.3, 0.5), "passed"),
        (0.4, (0.3, 0.51), "unknown"),
        (0.6, (0.4, 0.8), "unknown"),
        (0.6, (0.51, 0.8), "failed"),
        (-2.0, (-3.0, -1.0), "passed"),
    ],
)
def test_the_interval_of_a_drop_decides(drop: float, interval: tuple[float, float], verdict: str):
    artifact = entry(metric_drop=drop, metric_drop_ci95=list(interval))
    limits = {**OFF, "metric_drop": 0.5}
    assert judged(limits, artifact) == [("metric-drop", 0.5, False, verdict)]


@pytest.mark.parametrize(
    ("metric", "limit"),
    [
        (ACCURACY, 1.0),
        (PERPLEXITY, 0.05),  # one percent of five
    ],
)
def test_a_metric_has_a_limit_that_nobody_set(metric: dict[str, Any], limit: float):
    artifact = entry(metric={**metric, "value": 0.02}, metric_drop=9.0, metric_drop_ci95=[8, 10])
    limits = {"size_ratio": None, "latency_ratio": None}
    ((name, found, default, verdict),) = judged(limits, artifact, metric=metric)
    assert (name, default, verdict) == ("metric-drop", True, "failed")
    assert found == pytest.approx(limit)


def test_a_metric_that_was_not_measured_is_unknown():
    blind = entry(
        metric=None, metric_drop=None, metric_drop_ci95=None, metric_reason="no data", sqnr_db=None
    )
    (found,) = judge(LimitKeys(size_ratio=None, latency_ratio=None), [blind], None, shrinks=True)
    assert (found["verdict"], found["reason"], found["measured"]) == ("unknown", "no data", None)
    assert overall([found], [blind]) == "unknown"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.3, "passed"), (0.31, "failed")])
def test_size_ratio(ratio: float, verdict: str):
    limits = {**OFF, "size_ratio": 0.3}
    for shrinks in (True, False):
        judgement = judged(limits, entry(size_ratio=ratio), shrinks=shrinks)
        assert judgement == [("size-ratio", 0.3, False, verdict)]


def test_a_size_is_judged_by_default_only_if_the_model_is_to_become_smaller():
    limits = {"metric_drop": None, "latency_ratio": None}
    larger = entry(size_ratio=1.000003)
    assert judged(limits, larger, shrinks=False) == []
    assert judged(limits, larger, shrinks=True) == [("size-ratio", 1.0, True, "failed")]


@pytest.mark.parametrize(
    ("constant", "sqnr_db", "verdict", "change"),
    [
        (None, 30.0, "passed", ""),
        (90.0, 30.0, "passed", ""),
        (1.01, 30.0, "passed", ""),
        (1.0, 30.0, "unknown", "loses at most 1"),
        (0.25, 30.0, "unknown", "loses at most 0.25"),
        (-3.0, 30.0, "unknown", "gains 3"),
        (1.0, 120.0, "passed", ""),
        (0.0, 120.0, "unknown", "loses at most 0"),
    ],
)
def test_a_limit_that_one_answer_for_all_meets_shows_nothing(
    constant: float | None, sqnr_db: float, verdict: str, change: str
):
    """Shifted labels: 0.2 % for both models, in green."""
    limits = LimitKeys(**{**OFF, "metric_drop": 1.0})
    one = entry(metric_drop=0.0, metric_drop_ci95=[-0.5, 0.5], sqnr_db=sqnr_db)
    (only,) = judge(limits, [one], ACCURACY, shrinks=True, constant=constant)
    assert only["verdict"] == verdict
    assert only["reason"] == (f"{BLIND}: it {change}" if change else None)
    worse = {**one, "metric_drop": 1.8, "metric_drop_ci95": [1.5, 2.0], "sqnr_db": 30.0}
    (failed,) = judge(limits, [worse], ACCURACY, shrinks=True, constant=constant)
    assert failed["verdict"] == "failed"


@pytest.mark.parametrize(
    ("why", "sqnr_db", "drop", "verdict"),
    [
        ("", 30.0, 0.0, "passed"),
        ("seen before", 30.0, 0.0, "unknown"),
        ("seen before", 120.0, 0.0, "passed"),
        ("seen before", 30.0, 3.0, "failed"),
    ],
)
def test_samples_that_prove_nothing_pass_no_limit(
    why: str, sqnr_db: float, drop: float, verdict: str
):
    limits = LimitKeys(**{**OFF, "metric_drop": 1.0})
    interval = [drop - 0.2, drop + 0.2]
    one = entry(metric_drop=drop, metric_drop_ci95=interval, sqnr_db=sqnr_db)
    (only,) = judge(limits, [one], ACCURACY, shrinks=True, no_evidence=why)
    assert only["verdict"] == verdict
    assert (only["reason"] == why) == (verdict == "unknown")


@pytest.mark.parametrize(
    ("sqnr_db", "drop", "verdict"),
    [
        (None, 0.0, "passed"),
        (100.0, 0.1, "passed"),
        (100.0, 1.0, "passed"),  # the limit itself
        (99.9, 0.0, "unknown"),
        (None, 2.0, "unknown"),
    ],
)
def test_few_samples_show_that_a_model_computes_as_the_float_one(
    sqnr_db: float | None, drop: float, verdict: str
):
    """24 images could not tell that folding norms loses no point."""
    artifact = entry(sqnr_db=sqnr_db, metric_drop=drop, metric_drop_ci95=[-13.8, 13.8])
    limits: dict[str, float | None] = {"metric_drop": 1.0}
    found = [e for e in judged(limits, artifact) if e[0] == "metric-drop"]
    assert found == [("metric-drop", 1.0, False, verdict)]


def test_one_sample_has_no_interval():
    """Its bootstrap has no width: a drop measured on a single sample was passed."""
    alone = {**ERROR, "samples": 1}
    one = entry(metric=alone, metric_drop_ci95=[0.4, 0.4], max_abs_diff=0.1)
    (only,) = judge(LimitKeys(**{**OFF, "metric_drop": 0.5}), [one], alone, shrinks=True)
    assert (only["verdict"], only["reason"]) == ("unknown", "one sample has no interval")
    assert (only["measured"], only["ci95"]) == (0.4, None)
    for same in ({"metric": {**alone, "samples": 2}}, {"max_abs_diff": 0.0}):
        (only,) = judge(
            LimitKeys(**{**OFF, "metric_drop": 0.5}), [{**one, **same}], alone, shrinks=True
        )
        assert only["verdict"] == "passed"


def test_a_share_of_one_sample_has_an_interval():
    alone = {**ACCURACY, "samples": 1}
    one = entry(metric=alone, metric_drop_ci95=[-97.5, 97.5], max_abs_diff=0.1)
    (only,) = judge(LimitKeys(**{**OFF, "metric_drop": 0.5}), [one], alone, shrinks=True)
    assert (only["verdict"], only["ci95"]) == ("unknown", [-97.5, 97.5])
    assert only["reason"] == "the 95 % interval contains the limit"


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        ((0.8, 0.7, 0.9), "passed"),
        ((1.1, 0.9, 1.3), "unknown"),
        ((1.1, 1.0, 1.3), "unknown"),
        ((1.1, 1.01, 1.3), "failed"),
        ((1.33, 1.02, 112.0), "unknown"),
    ],
)
def test_the_interval_of_a_latency_decides(ratio: tuple[float, float, float], verdict: str):
    limits = {**OFF, "latency_ratio": 1.0}
    (found,) = judge(LimitKeys(**limits), [entry(ratio=ratio)], ACCURACY, shrinks=True)
    assert (found["name"], found["verdict"]) == ("latency-ratio", verdict)
    assert found["ci95"] == list(ratio[1:])
    assert (found["reason"] is None) == (verdict != "unknown")


def test_a_latency_that_cannot_be_judged_is_unknown_only_if_it_is_asked_for_or_was_not_run():
    limits = {"metric_drop": None, "size_ratio": None}
    stored = entry(deployed=False, latency_ratio_reason="a storage format")
    why = dict.fromkeys(("latency_ms_reason", "latency_ratio_reason"), "needs a GPU")
    engine = entry(deployed=False, latency=[], **why)
    streamed = entry(**{**stored, "latency": [], "latency_ms_reason": "has no graph"})
    assert judged(limits, stored) == judged(limits, streamed) == []
    assert judged(limits, engine) == [("latency-ratio", 1.0, True, "unknown")]
    asked = {**limits, "latency_ratio": 0.5}
    assert judged(asked, stored) == [("latency-ratio", 0.5, False, "unknown")]
    assert judged(asked, entry(), stored) == [("latency-ratio", 0.5, False, "failed")]


def test_a_metric_without_points_changes_no_other_limit():
    assert [x[:2] for x in judged({}, entry(), metric=PERPLEXITY)] == [
        ("metric-drop", 0.05),
        ("size-ratio", 1.0),
        ("latency-ratio", 1.0),
    ]


@pytest.mark.parametrize(
    ("low", "high", "reason"),
    [
        (0.9, 1.2, "contains the limit"),
        (1.0, 1.2, "contains the limit"),
        (0.5, 1.0, "contains the limit"),
        (0.5, 0.99, "is too wide so near to the limit"),
        (1.01, 1.9, "is too wide so near to the limit"),
    ],
)
def test_an_unknown_ratio_says_why(low: float, high: float, reason: str):
    limits = LimitKeys(**{**OFF, "latency_ratio": 1.0})
    (found,) = judge(limits, [entry(ratio=(0.95, low, high))], ACCURACY, shrinks=True)
    assert (found["verdict"], found["reason"]) == ("unknown", f"the 95 % interval {reason}")


def test_a_run_is_as_bad_as_its_worst_limit():
    passed, unknown, failed = ({"verdict": v} for v in ("passed", "unknown", "failed"))
    good, broken = entry(), entry(checks=[{"name": "opens in its runtime", "ok": False}])
    assert overall([passed], [good]) == "passed"
    assert overall([passed, unknown], [good]) == "unknown"
    assert overall([failed, unknown], [good]) == "failed"
    assert overall([passed, unknown], [good, broken]) == "failed"
    assert overall([], [good]) == "passed"


def test_a_check_may_have_a_verdict_of_its_own():
    opens = {"name": "opens in its runtime", "ok": True}
    unproved = entry(checks=[opens, {"name": "proof", "ok": True, "verdict": "unknown"}])
    refused = entry(checks=[{"name": "proof", "ok": False, "verdict": "unknown"}, opens])
    assert overall([{"verdict": "passed"}], [entry(), unproved]) == "unknown"
    assert overall([{"verdict": "failed"}], [unproved]) == "failed"
    assert overall([], [refused, entry()]) == "failed"


def test_the_figure_that_the_owner_states_lies_in_the_interval():
    for expected in (86.7, 90.0, 92.6):
        check_expected(ACCURACY, expected, "spec.yaml:9")
    for expected in (86.6, 94.6):
        with pytest.raises(DataError, match=r"^spec.yaml:9: metric 'accuracy': is 90 % for the"):
            check_expected(ACCURACY, expected, "spec.yaml:9")


def test_the_figure_that_the_owner_states_may_be_rounded():
    check_expected({**ACCURACY, "ci95": [98.0, 100.0 - 5e-8]}, 100.0, "spec.yaml:9")
    check_expected({**ACCURACY, "ci95": [5e-8, 2.0]}, 5e-8 - 1e-9, "spec.yaml:9")
    check_expected({**ERROR, "ci95": [0.0, 0.0]}, 0.0, "spec.yaml:9")
    for low, high, expected in ((98.0, 99.999, 100.0), (0.001, 2.0, 0.0)):
        with pytest.raises(DataError, match="the spec expects"):
            check_expected({**ACCURACY, "ci95": [low, high]}, expected, "spec.yaml:9")


def test_a_figure_without_points_is_stated_without_percent():
    with pytest.raises(DataError) as raised:
        check_expected({**PERPLEXITY, "ci95": [4.5, 5.5]}, 7.0, "spec.yaml:9")
    assert str(raised.value).startswith(
        "spec.yaml:9: metric 'perplexity': is 5 for the float model (95 % interval 4.5 to 5.5, "
        "400 samples), and the spec expects 7; check the normalization"
    )


@pytest.mark.parametrize(
    ("name", "expected", "message"),
    [
        ("accuracy", 100.0, ""),
        ("accuracy", 0.0, ""),
        ("accuracy", 400.0, "is 400, and accuracy lies between 0 and 100 %; give the figure in"),
        ("accuracy", -1.0, "between 0 and 100 %"),
        ("cosine", 0.99, ""),
        ("cosine", 99.0, "is 99, and cosine lies between -1 and 1; give"),
        ("mse", 1e6, ""),
        ("perplexity", 5.1, ""),
    ],
)
def test_a_figure_that_no_model_has_is_refused(name: str, expected: float, message: str):
    metric = catalog.load("metric", name)
    if not message:
        check_reachable(metric, expected, "spec.yaml:9")
        return
    with pytest.raises(SpecError, match=message):
        check_reachable(metric, expected, "spec.yaml:9")
