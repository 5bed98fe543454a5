"""Metrics against values worked out by hand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor import catalog
from compressor.errors import DataError, SpecError
from compressor.run.metrics.class_metrics import ACCURACY, PERPLEXITY
from compressor.run.metrics.metrics import COSINE, MSE, Metric, kept_scale, resolve_metric
from compressor.spec.keys import MetricKeys
from compressor.spec.user_code import importable, load_symbol

LOGITS = np.array([[1, 3, 2, 0, -1, -2], [9, 1, 1, 1, 1, 1]], np.float32)


def metric_named(name: str) -> Metric:
    metric: Metric = catalog.load("metric", name)
    return metric


def per_sample(name: str, output: np.ndarray, target: object) -> list[float]:
    return metric_named(name).per_sample({"y": output}, target, len(output)).tolist()


def metric(**changes: object) -> Metric:
    return Metric("own", lambda outputs, target: outputs["y"] - target, **changes)


def test_accuracy_and_top5():
    assert per_sample("accuracy", LOGITS, np.array([1, 2])) == [1, 0]
    assert per_sample("top5", LOGITS, np.array([5, 5])) == [0, 0]
    assert per_sample("top5", LOGITS, np.array([4, 4])) == [1, 1]


def test_labels_of_any_integer_type_and_with_a_trailing_axis():
    for dtype in (np.uint8, np.int32, np.int64):
        assert per_sample("accuracy", LOGITS, np.array([[1], [0]], dtype)) == [1, 1]


def test_a_tie_counts_for_the_smaller_index_only():
    equal = np.ones((3, 3), np.float32)
    assert per_sample("accuracy", equal, np.array([0, 1, 2])) == [1, 0, 0]
    assert per_sample("accuracy", equal, equal.argmax(1)) == [1, 1, 1]
    assert per_sample("top5", np.ones((2, 7), np.float32), np.array([4, 5])) == [1, 0]


def test_labels_of_a_sample_are_right_together():
    scores = np.array([[2, -1, 3], [2, -1, -3], [-1, -1, -1]], np.float32)
    wanted = np.array([[1, 0, 1], [1, 0, 1], [0, 0, 0]])
    for target in (wanted, wanted.astype(np.float32), wanted > 0):
        assert per_sample("subset-accuracy", scores, target) == [1, 0, 1]
    assert per_sample("subset-accuracy", scores, {"y": np.where(wanted, 0.1, -9)}) == [1, 0, 1]
    near = np.array([[0.5, 0.0], [1e-3, -1e-3]])  # a score of zero is no label, nor is one of them
    assert per_sample("subset-accuracy", near, np.array([[1, 0], [1, 0]])) == [1, 1]
    assert per_sample("subset-accuracy", near - 0.5, {"y": near}) == [0, 0]
    assert per_sample("subset-accuracy", np.abs(near), {"y": near}) == [1, 0]
    with pytest.raises(DataError, match=r"target has shape \[3\] and the scores \[3, 3\]; give 0"):
        per_sample("subset-accuracy", scores, np.array([0, 1, 2]))
    with pytest.raises(DataError, match="other numbers than 0 and 1"):
        per_sample("subset-accuracy", scores, 2 * wanted)
    with pytest.raises(DataError, match="use subset-accuracy where a sample has several"):
        per_sample("accuracy", scores, wanted)


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=6),
    st.integers(0, 1),
)
def test_accuracy_is_what_argmax_says(logits: list[int], label: int):
    row = np.array([logits], np.float32)
    assert per_sample("accuracy", row, np.array([label])) == [float(row.argmax() == label)]


def test_several_decisions_a_sample_are_averaged():
    tokens = np.zeros((2, 4, 3), np.float32)
    tokens[..., 1] = 1
    assert per_sample("accuracy", tokens, np.array([[1, 1, 0, 1], [0, 0, 0, 0]])) == [0.75, 0]


@pytest.mark.parametrize("label", [-1, 6])
def test_labels_that_are_no_class(label: int):
    with pytest.raises(DataError, match=r"metric 'accuracy'.*labels .* for 6 classes"):
        per_sample("accuracy", LOGITS, np.array([label, label]))


def test_perplexity_is_the_exponential_of_the_mean_loss():
    uniform = np.zeros((2, 3, 8), np.float32)
    losses = PERPLEXITY.per_sample({"y": uniform}, np.zeros((2, 3), np.int64), 2)
    assert losses == pytest.approx([math.log(8)] * 2)
    assert PERPLEXITY.summary(losses)["value"] == pytest.approx(8)
    assert PERPLEXITY.summary(losses)["ci95"] == pytest.approx([8, 8])


def test_perplexity_of_large_logits_does_not_overflow():
    logits = np.array([[[1e4, 0.0]], [[0.0, 1e4]]], np.float32)
    assert per_sample("perplexity", logits, np.array([[0], [0]])) == pytest.approx([0, 1e4])


def test_mse_and_cosine():
    ours, theirs = np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 0.0]])
    assert per_sample("mse", ours, theirs) == [2, 0]
    assert per_sample("mse", ours[:, :1], theirs[:, 1:]) == [1, 0]
    assert per_sample("cosine", ours, theirs) == pytest.approx([1 / math.sqrt(5), 1])
    assert per_sample("cosine", ours / 9, theirs / 9) == pytest.approx([1 / math.sqrt(5), 1])


def test_several_outputs_are_averaged():
    outputs = {"a": np.zeros((2, 3)), "b": np.zeros((2, 5))}
    wanted = {"a": np.ones((2, 3)), "b": 3 * np.ones((2, 5))}
    assert MSE.per_sample(outputs, wanted, 2).tolist() == [5, 5]


def test_shares_are_in_percent_with_wilsons_interval():
    summary = ACCURACY.summary(np.array([1.0] * 498 + [0.0] * 2))
    assert summary["value"] == pytest.approx(99.6)
    assert (summary["unit"], summary["samples"]) == ("%", 500)
    # Wilson score interval for 498 of 500, as statistics tables give it.
    assert summary["ci95"] == pytest.approx([98.5534, 99.8902], abs=1e-4)


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0, 27.7533), (10, 72.2467, 100)])
def test_wilsons_interval_at_the_ends(right: int, low: float, high: float):
    values = np.array([1.0] * right + [0.0] * (10 - right))
    assert ACCURACY.summary(values)["ci95"] == pytest.approx([low, high], abs=1e-4)


def test_means_have_the_normal_interval():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * values.std(ddof=1) / 2
    summary = MSE.summary(values)
    assert summary["value"] == 2.5
    assert summary["ci95"] == pytest.approx([2.5 - half, 2.5 + half])
    assert metric().summary(np.array([3.0]))["ci95"] == [3, 3]


@pytest.mark.parametrize(
    ("name", "values", "low", "high"),
    [
        ("agreement", [1.0, 1.0, 0.1], None, 100),
        ("agreement", [0.0, 0.0, 0.9], 0, None),
        ("token-accuracy", [1.0, 1.0, 0.1], None, 100),
        ("cosine", [1.0, 1.0, 0.1], None, 1),
        ("embedding", [-1.0, -1.0, -0.1], -1, None),
        ("mse", [0.0, 0.0, 9.0], 0, None),
        ("perplexity", [0.0, 0.0, 9.0], 1, None),
    ],
)
def test_no_interval_holds_what_the_metric_cannot_be(
    name: str, values: list[float], low: float | None, high: float | None
):
    ends = metric_named(name).summary(np.array(values))["ci95"]
    assert ends[0] == low or low is None
    assert ends[1] == high or high is None
    assert ends[0] < ends[1]


def test_no_error_at_all_is_not_a_count():
    """The float model against itself: its interval must not reach above 0 (below 1)."""
    assert MSE.summary(np.zeros(10))["ci95"] == [0, 0]
    assert COSINE.summary(np.ones(10))["ci95"] == [1, 1]


def test_a_drop_is_positive_when_the_candidate_is_worse():
    worse, better = {"value": 80.0}, {"value": 90.0}
    assert ACCURACY.drop(better, worse) == 10
    assert ACCURACY.drop(worse, better) == -10
    assert PERPLEXITY.drop(worse, better) == 10
    assert MSE.drop(better, worse) == -10


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (np.zeros((3, 2)), r"returned shape \[3, 2\] for 3 samples"),
        (1.0, r"returned shape \[\] for 3 samples"),
        (np.full(3, np.nan), "returned NaN or infinity"),
        ("no", "failed .ValueError: "),
    ],
)
def test_metrics_that_return_something_else(result: object, problem: str):
    own = Metric("m:f", lambda *_: result)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=f"metric 'm:f': {problem}"):
        own.per_sample({"y": np.zeros((3, 2))}, np.zeros(3), 3)


def test_a_metric_that_raises():
    own = Metric("m:f", lambda outputs, _: outputs["z"])
    with pytest.raises(DataError, match=r"failed .KeyError: 'z'.; check that it fits the model's"):
        own.per_sample({"y": np.zeros((3, 2))}, np.zeros(3), 3)


def test_what_is_chosen_without_a_name():
    assert resolve_metric(None, True, load_symbol, "s:1").name == "accuracy"
    chosen = resolve_metric(None, False, load_symbol, "s:1")
    assert (chosen.name, chosen.against_float) == ("cosine", True)


def test_errors_compare_with_the_float_model_where_there_are_no_labels():
    chosen = resolve_metric("mse", False, load_symbol, "s:1")
    assert (chosen.against_float, chosen.higher_is_better) == (True, False)
    assert not resolve_metric("mse", True, load_symbol, "s:1").against_float


def test_agreement_compares_decisions_with_the_float_models_whether_or_not_there_are_labels():
    theirs = {"y": np.array([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]])}
    ours = {"y": np.array([[0.4, 0.6], [0.1, 0.2], [0.9, 0.3]])}
    for labels in (True, False):
        metric = resolve_metric("agreement", labels, load_symbol, "s:1")
        assert metric.against_float
        assert metric.per_sample(ours, theirs, 3).tolist() == [1.0, 0.0, 1.0]
        assert metric.summary(metric.per_sample(theirs, theirs, 3))["value"] == 100.0


def test_a_metric_by_name_may_stand_in_a_section():
    metric = resolve_metric(MetricKeys(name="top5", expect=99.0), True, load_symbol, "s:1")
    assert metric.name == "top5"
    for keys in ({}, {"name": "top5", "function": "own:metric"}):
        with pytest.raises(SpecError, match="set either name or function"):
            MetricKeys(**keys)


def test_metrics_that_cannot_be():
    with pytest.raises(SpecError, match=r"^s:1: metric 'acuracy': .* did you mean 'accuracy'\?"):
        resolve_metric("acuracy", True, load_symbol, "s:1")
    with pytest.raises(SpecError, match=r"^s:1: metric 'top5': needs labels.*use agreement"):
        resolve_metric("top5", False, load_symbol, "s:1")
    with pytest.raises(SpecError, match=r"^s:1: metric: 'no_such_module' does not import"):
        resolve_metric("no_such_module:f", True, load_symbol, "s:1")


def found_in(folder: Path) -> Callable[[str, str], Any]:
    """Return what finds functions in files of a folder."""

    def symbol(reference: str, key: str) -> Any:
        with importable([folder]):
            return load_symbol(reference, key)

    return symbol


def test_a_metric_of_the_users_own(tmp_path: Path):
    (tmp_path / "own_metric_module.py").write_text(
        "def within(output, target):\n    return abs(output[:, 0] - target) < 1\n"
    )
    keys = MetricKeys(function="own_metric_module:within", higher_is_better=False)
    own = resolve_metric(keys, True, found_in(tmp_path), "s:1")
    values = own.per_sample({"y": np.array([[1.0], [5.0]])}, np.array([1.5, 1.5]), 2)
    assert values.tolist() == [1, 0]
    assert own.drop({"value": 0.1}, {"value": 0.3}) == pytest.approx(0.2)
    # Right or wrong again: Wilson's interval.
    assert own.summary(values)["ci95"] == pytest.approx([0.0945, 0.9055], abs=1e-4)
    assert resolve_metric(
        "own_metric_module:within", True, found_in(tmp_path), "s:1"
    ).higher_is_better


def test_a_metric_may_change_its_arguments(tmp_path: Path):
    """What it gets is its own: the float model's outputs are held against the next artifact too."""
    (tmp_path / "scaling_metric.py").write_text(
        "def far(outputs, target):\n"
        "    outputs *= 2\n"
        "    target *= 2\n"
        "    return abs(outputs - target)\n"
    )
    own = resolve_metric("scaling_metric:far", False, found_in(tmp_path), "s:1")
    outputs, target = {"y": np.array([1.0, 2.0])}, {"y": np.array([1.0, 3.0])}
    for _ in range(2):
        assert own.per_sample(outputs, target, 2).tolist() == [0, 2]


def test_a_metric_of_several_outputs_gets_all_of_them(tmp_path: Path):
    (tmp_path / "two_output_metric.py").write_text(
        "def both(outputs, target):\n    return outputs['a'] + outputs['b']\n"
    )
    own = resolve_metric("two_output_metric:both", True, found_in(tmp_path), "s:1")
    outputs = {"a": np.ones(2), "b": np.ones(2)}
    assert own.per_sample(outputs, None, 2).tolist() == [2, 2]


CLASSES = {"logits": ("n", 10)}


@pytest.mark.parametrize(
    ("metric", "target", "problem"),
    [
        (ACCURACY, np.eye(10)[:1], r"target has shape \[1, 10\] and the scores \[1, 10\].*argmax"),
        (ACCURACY, np.array([3.0]), "float64, not numbers of classes.*int64"),
        (ACCURACY, np.array([10]), "10 to 10 for 10 classes, which are 0 to 9; check that"),
        (PERPLEXITY, np.array([0.5]), "float64, not numbers of classes"),
        (MSE, np.array([3]), r"shape \[1\] and output 'logits' \[1, 10\]"),
        (COSINE, np.array([3]), r"shape \[1\] and output 'logits' \[1, 10\]"),
    ],
)
def test_a_target_that_does_not_fit_is_found_by_shapes(metric: Metric, target: Any, problem: str):
    with pytest.raises(DataError, match=problem):
        metric.check_fit(CLASSES, target)


def test_a_target_that_fits_or_cannot_be_known_to_do_is_taken():
    ACCURACY.check_fit(CLASSES, np.array([9]))
    ACCURACY.check_fit({"logits": ("n", "classes")}, np.eye(10)[:1])
    MSE.check_fit(CLASSES, np.zeros((1, 10)))
    MSE.check_fit({"value": ("n", 1)}, np.zeros(1))
    own = Metric("own", lambda _outputs, _target: 1 / 0, code=len)
    own.check_fit(CLASSES, np.array([3]))


AGREEMENT = metric_named("agreement")


@pytest.mark.parametrize(
    ("shapes", "dtypes", "problem"),
    [
        ({"value": ("n", 1)}, {}, "'value'.*one score is always the largest"),
        ({"class": ("n",)}, {"class": "int64"}, "'class' is int64, not scores"),
    ],
)
def test_without_labels_outputs_that_are_no_scores_are_found_by_shapes(
    shapes: dict[str, Any], dtypes: dict[str, str], problem: str
):
    """The plan passed, and the run refused them; a class in integers was a ``TypeError``."""
    with pytest.raises(DataError, match=problem):
        AGREEMENT.check_fit(shapes, None, dtypes)
    logits = {"logits": ("n", 10), **shapes}
    AGREEMENT.check_fit(logits, None, dtypes)
    AGREEMENT.check_fit({**shapes, "logits": ("n", "classes")}, None, dtypes)


def test_labels_that_start_at_one_are_known_by_their_range():
    scores = np.zeros((3, 3), np.float32)
    with pytest.raises(DataError, match="they start at 1: subtract 1"):
        per_sample("accuracy", scores, np.array([1, 2, 3]))


def test_the_cosine_of_single_numbers_is_refused():
    with pytest.raises(DataError, match=r"'value'.*one number a sample.*use mse"):
        COSINE.check_fit({"logits": ("n", 10), "value": ("n", 1)})
    with pytest.raises(DataError, match="one number a sample"):
        COSINE.check_fit({"value": ("n",)})
    MSE.check_fit({"value": ("n", 1)})
    COSINE.check_fit({"boxes": ("n", "found", 1)})


def test_without_labels_single_numbers_are_judged_by_their_error():
    chosen = resolve_metric(None, False, load_symbol, "s:1", numbers=True)
    assert (chosen.name, chosen.against_float) == ("mse", True)
    assert resolve_metric(None, True, load_symbol, "s:1", numbers=True).name == "accuracy"


def test_the_users_own_metric_without_labels_gets_what_the_float_model_gives(tmp_path: Path):
    """In the form of the outputs: the array of a single output, a dictionary of several."""
    (tmp_path / "decision_metric.py").write_text(
        "def same(outputs, target):\n"
        "    if isinstance(outputs, dict):\n"
        "        outputs, target = outputs['a'], target['a']\n"
        "    return (outputs > 0.5) == (target > 0.5)\n"
    )
    own = resolve_metric("decision_metric:same", False, found_in(tmp_path), "s:1")
    first, second = np.array([0.4, 0.9]), np.array([0.1, 0.2])
    assert own.per_sample({"y": first}, {"y": second}, 2).tolist() == [1, 0]
    several, others = ({"a": a[:1], "b": a} for a in (first, second))
    assert own.per_sample(several, others, 1).tolist() == [1]


@pytest.mark.parametrize("name", ["agreement", "accuracy", "top5"])
def test_one_score_is_no_decision(name: str):
    """It was the largest of all one scores: 100 % agreement, whatever the model."""
    outputs = np.array([[0.1], [0.9]])
    target = {"y": outputs[::-1]} if name == "agreement" else np.zeros(2, np.int64)
    with pytest.raises(DataError, match="one score is always the largest; set metric: mse"):
        per_sample(name, outputs, target)


def test_errors_and_cosines_of_equal_outputs_are_no_counts():
    """Zeros of a squared error were taken for wrong answers, whose interval held the limit 0."""
    equal = np.zeros(100)
    assert MSE.difference(equal, equal)["ci95"] == (0, 0)
    assert COSINE.difference(equal + 1, equal + 1)["ci95"] == (0, 0)
    low, high = ACCURACY.difference(equal, equal)["ci95"]
    assert low < 0 < high
    assert metric(code=len).difference(equal, equal)["ci95"][0] < 0
    kept = {"name": "mse", "unit": "", "higher_is_better": False}
    assert kept_scale(kept, 1.0, exponential=False) == MSE.scale
    own = {**kept, "name": "mine:hits"}
    assert kept_scale(own, 1.0, exponential=False).counts
