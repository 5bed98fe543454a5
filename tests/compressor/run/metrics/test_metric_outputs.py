"""Which outputs a metric is about, and where their samples and classes lie."""

from typing import Any

import numpy as np
import pytest

from compressor import catalog
from compressor.errors import DataError
from compressor.run.metrics.class_metrics import ACCURACY, AGREEMENT
from compressor.run.metrics.metrics import COSINE, MSE, Metric, resolve_metric
from compressor.run.metrics.scores import class_axis, holds_scores
from compressor.spec.user_code import load_symbol


def test_outputs_without_an_axis_of_samples_are_refused():
    with pytest.raises(DataError) as caught:
        COSINE.sampled({"mean": np.array(1.0)}, 4)
    assert str(caught.value) == (
        "metric 'cosine': needs an output with an axis of 4 samples, and 'mean' has shape []; set "
        "batch: 1 or samples: feeds, so that all outputs of a run are one sample, or give a metric "
        "of your own"
    )
    with pytest.raises(DataError, match=r"an axis of samples, and 'mean' has shape \[\]"):
        COSINE.check_fit({"mean": ()})
    COSINE.check_fit({"mean": (), "y": ("n", 8)})
    COSINE.check_fit({"mean": (), "y": None})


def test_outputs_of_one_sample_need_no_axis():
    """A model whose batch is fixed to one may return a number, or rows of another count."""
    outputs = {"score": np.array(2.0), "boxes": np.zeros((7, 4))}
    assert {n: a.shape for n, a in COSINE.sampled(outputs, 1).items()} == {
        "score": (1,),
        "boxes": (1, 7, 4),
    }
    kept = {**outputs, "y": np.ones((1, 3))}
    assert list(COSINE.sampled(kept, 1)) == ["y"]


def test_the_parts_of_an_output_count_alike():
    """Scores that are lost show beside boxes that are a thousand times as large."""
    parts = (((slice(None), slice(0, 4)), (slice(None), slice(4, 6))),)
    metric = resolve_metric("cosine", False, load_symbol, "s:1", parts=parts)
    wanted = {"y": np.array([[1000.0, 900, 800, 700, 1, 0]])}
    lost = {"y": np.array([[1000.0, 900, 800, 700, 0, 1]])}
    ours, theirs = (metric.sampled(outputs, 1) for outputs in (lost, wanted))
    assert list(ours) == ["y[0]", "y[1]"]
    assert metric.per_sample(ours, theirs, 1).tolist() == pytest.approx([0.5])
    assert COSINE.per_sample(lost, wanted, 1)[0] > 0.999999
    for name, labels in (("agreement", False), ("embedding", False), ("mse", True)):
        assert resolve_metric(name, labels, load_symbol, "s:1", parts=parts).output_parts == ()


def test_scores_are_found_behind_the_number_of_the_class():
    """As classifiers of scikit-learn have it: the label first, then the probabilities."""
    outputs = {"label": np.array([1, 0]), "probabilities": np.array([[0.2, 0.8], [0.9, 0.1]])}
    judged = ACCURACY.sampled(outputs, 2)
    assert ACCURACY.per_sample(judged, np.array([1, 1]), 2).tolist() == [1, 0]
    ACCURACY.check_fit(
        {"label": ("n",), "probabilities": ("n", 2)}, np.array([1]), {"label": "int64"}
    )


PIXELS = np.random.default_rng(0).normal(size=(3, 5, 4, 4))  # [N, classes, height, width]


@pytest.mark.parametrize("name", ["accuracy", "agreement", "token-accuracy"])
@pytest.mark.parametrize("scores", [PIXELS, np.moveaxis(PIXELS, 1, -1)])
def test_each_pixel_of_an_image_has_its_scores(name: str, scores: np.ndarray):
    """Along the width there are no classes: agreement was that of the best columns."""
    metric: Metric = catalog.load("metric", name)
    labels = PIXELS.argmax(axis=1)
    labels[0, 0] += 1
    labels[0, 0] %= 5
    other = scores.copy()
    other[1] = 0  # class 0 everywhere
    outputs = metric.sampled({"y": scores}, 3)
    target: Any = metric.sampled({"y": other}, 3) if name == "agreement" else labels
    expected = [1, float((labels[1] == 0).mean()), 1] if name == "agreement" else [0.75, 1, 1]
    values = metric.settled(metric.per_sample(outputs, target, 3))
    assert values.mean() == pytest.approx(np.mean(expected))


def test_images_that_are_no_squares_have_more_pixels_than_classes():
    for shape in ((2, 3, 4, 6), (2, 6, 4, 3), (2, 1001, 1, 1), (2, 1, 1, 1001)):
        outputs = ACCURACY.sampled({"y": np.zeros(shape)}, 2)
        assert outputs["y"].shape[-1] in (3, 1001)


def test_models_that_decide_nothing_agree():
    nothing = {"y": np.zeros((2, 0, 3))}
    assert AGREEMENT.per_sample(nothing, nothing, 2).tolist() == [1, 1]


def test_outputs_keep_their_order_where_no_classes_are_asked_for():
    outputs = {"label": np.ones((2, 2)), "scores": np.ones((2, 3))}
    labels_first = {"label": np.ones((2,), np.int64), "scores": np.ones((2, 3))}
    assert list(COSINE.sampled(labels_first, 2)) == ["label", "scores"]
    assert list(ACCURACY.sampled(labels_first, 2)) == ["scores", "label"]
    MSE.check_fit({"label": ("n",), "y": ("n", 3)}, np.ones((1,)), {"label": "int64"})
    assert list(ACCURACY.sampled(outputs, 2)) == ["label", "scores"]


def test_what_is_not_known_before_a_run_is_not_refused():
    ACCURACY.check_fit({"y": ("n", 3)})  # without labels there is nothing to compare
    COSINE.check_fit({"y": None}, np.ones((1, 3)))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 9, 2, 3), -1),
        ((1, 3, 2, 9), 1),
        ((1, 4, 8, 4), 1),
        ((1, 3, 8, 8), 1),
        ((1, 8, 8, 3), -1),
    ],
)
def test_classes_lie_on_the_axis_unlike_the_others_or_on_the_shorter_end(
    shape: tuple[int, ...], axis: int
):
    """Of two ends alike the first, as PyTorch has it."""
    assert class_axis(shape) == axis


@pytest.mark.parametrize(
    ("kind", "shape", "scores"),
    [
        ("float32", (2, 3), True),
        ("float16", (2, 3), True),
        ("int8", (2, 3), True),
        ("uint8", (2, 3), True),
        ("bool", (2, 3), False),
        ("int16", (2, 3), False),
        ("int64", (2, 3), False),
        ("float32", (2, 1), False),
        ("float32", (2,), False),
    ],
)
def test_scores_are_floats_or_codes_of_a_byte(kind: str, shape: tuple[int, ...], scores: bool):
    assert holds_scores(np.zeros(shape, kind)) is scores
