"""What a function of the user's may return as a metric, and what its values prove."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from compressor.errors import DataError
from compressor.run.evaluate import Evaluation
from compressor.run.metrics.class_metrics import PERPLEXITY
from compressor.run.metrics.metrics import Metric
from compressor.run.verdicts.statistics import paired_difference
from compressor.run.verdicts.verdicts import BLIND
from tests.compressor.run.spoiled import check
from tests.compressor.tiny_project import Project

OUTPUTS = {"y": np.zeros((3, 2))}
Function = Callable[..., np.ndarray]


def own(function: Function, *, higher: bool = True) -> Metric:
    return Metric("m:f", function, higher, code=function)


@pytest.mark.parametrize("value", [1e308, -1e39])
def test_values_whose_squares_are_no_numbers(value: float):
    """They were finite, and their interval was not: an internal error where it was written."""
    with pytest.raises(DataError, match=re.escape(f"returned {value:.0e}, too large for")):
        own(lambda *_: np.array([0.0, value, 1.0])).per_sample(OUTPUTS, None, 3)


def test_the_largest_values_have_numbers_for_statistics():
    most = float(np.finfo(np.float32).max)
    metric = own(lambda *_: np.array([0.0, most, -most]))
    values = metric.per_sample(OUTPUTS, None, 3)
    summary, difference = metric.summary(values), metric.difference(values, -values)
    json.dumps([summary, difference], allow_nan=False)
    assert values.astype(np.float32).tolist() == values.tolist()


def test_a_perplexity_beyond_all_numbers():
    """An exponent of 710 was an internal error; it is worse than any other."""
    good, bad = np.array([1.0, 2.0, 1.5]), np.array([900.0, 700.0, 1e4])
    summary = PERPLEXITY.summary(bad)
    json.dumps(summary, allow_nan=False)
    assert summary["value"] == pytest.approx(np.exp(300.0))
    found = paired_difference(good, bad, PERPLEXITY.scale)
    json.dumps(found.as_json(), allow_nan=False)
    assert found.drop > 1e100
    assert found.p < 0.05


def test_a_function_that_draws_is_refused(on_onnx: Project):
    (on_onnx.folder / "drawing_metric.py").write_text(
        "from random import random\n\n\n"
        "def drawn(outputs, target):\n    return [random() for _ in target]\n"
    )
    on_onnx.spec["metric"] = "drawing_metric:drawn"
    said = "metric 'drawing_metric:drawn': returned other values for the same outputs when it was"
    check(on_onnx, lambda _: None, 3, said)


def test_a_function_that_counts_its_calls_is_refused():
    calls: list[int] = []

    def counted(outputs: object, target: object) -> np.ndarray:
        del outputs, target
        calls.append(1)
        return np.full(3, float(len(calls)))

    metric = own(counted)
    with pytest.raises(DataError, match="seed what it draws in each call"):
        metric.check_repeats(metric.per_sample(OUTPUTS, None, 3), OUTPUTS, None)


def test_rounding_by_another_order_of_sums_is_no_other_value():
    noise = iter([0.0, 1e-7])
    metric = own(lambda *_: np.array([1.0, 2.0, 3.0]) + next(noise))
    metric.check_repeats(metric.per_sample(OUTPUTS, None, 3), OUTPUTS, None)


@pytest.mark.parametrize(
    ("values", "higher", "drop"),
    [
        ([1.0, 1.0, 0.0, 1.0], True, 0.75),
        ([0.0, 1.0, 0.0, 0.0], False, 0.75),
        ([0.0, 0.5, 1.0, 1.0], True, None),  # not right and wrong alone
        ([1.0, 1.0, 1.0, 1.0], True, None),  # may be a cosine, which goes down to -1
        ([0.0, 0.0, 0.0, 0.0], False, None),  # may be a distance
    ],
)
def test_right_and_wrong_answers_bound_the_drop(
    values: list[float], higher: bool, drop: float | None
):
    metric = own(lambda *_: np.zeros(4), higher=higher)
    array = np.array(values)
    found = Evaluation(metric.summary(array), array, None, None, 0.0)
    assert found.constant_drop(metric) == drop


@pytest.mark.parametrize(("limit", "blind"), [(1.0, True), (0.2, False)])
def test_a_limit_that_no_artifact_can_break_shows_nothing(
    on_onnx: Project, limit: float, blind: bool
):
    """The limit of an accuracy in points was left beside a share between 0 and 1."""
    (on_onnx.folder / "share_metric.py").write_text(
        "def right(outputs, target):\n"
        "    return (outputs.argmax(1) == target) * (outputs[:, 0] < 0)\n"
    )
    on_onnx.spec["metric"] = "share_metric:right"
    on_onnx.spec["passes"] = [{"pass": "nudge", "factor": 1.01}]
    on_onnx.spec["limits"]["metric-drop"] = limit
    (found,) = (e for e in on_onnx.run().report["limits"] if e["name"] == "metric-drop")
    assert (found["reason"] or "").startswith(BLIND) == blind
    assert found["verdict"] == ("unknown" if blind else "passed")
