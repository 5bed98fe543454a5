"""Models that decide for classes themselves, as a segmentation with ArgMax in its file does."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.errors import DataError
from compressor.run.metrics.class_metrics import ACCURACY, AGREEMENT, PERPLEXITY, TOP5, fitted
from compressor.run.metrics.metrics import Metric
from compressor.run.metrics.text_metrics import F1, TOKEN_ACCURACY
from compressor.types.tensors import TensorSpec

MASK = TensorSpec("mask", ("n", 2, 3), "int64")
SCORES = TensorSpec("scores", ("n", 5), "float32")
OURS = np.array([[[0, 3, 1], [2, 2, 2]], [[0, 0, 0], [1, 1, 1]]])
TRUTH = np.array([[[0, 1, 1], [2, 2, 0]], [[0, 0, 0], [1, 1, 1]]])


def test_the_share_of_right_classes_is_measured() -> None:
    """Class 3 for 0 is no worse than 1 for 0, as it is for mse, and for the cosine."""
    right = fitted(ACCURACY, [MASK])
    judged = right.sampled({"mask": OURS}, 2)
    assert right.per_sample(judged, TRUTH.astype(np.uint8), 2).tolist() == pytest.approx([4 / 6, 1])
    assert right.summary(np.array([4 / 6, 1]))["value"] == pytest.approx(100 * 5 / 6)
    same = fitted(AGREEMENT, [MASK])
    assert same.per_sample(judged, {"mask": TRUTH}, 2).tolist() == pytest.approx([4 / 6, 1])
    right.check_fit({"mask": ("n", 2, 3)}, TRUTH[:1], {"mask": "int64"})
    same.check_fit({"mask": ("n", 2, 3)}, None, {"mask": "int64"})


def test_the_numbers_are_read_of_several_outputs() -> None:
    specs = [TensorSpec("sure", ("n", 1), "float32"), TensorSpec("class", ("n",), "int32")]
    metric = fitted(ACCURACY, specs)
    outputs = {"sure": np.ones((2, 1)), "class": np.array([4, 1], np.int32)}
    assert metric.per_sample(metric.sampled(outputs, 2), np.array([4, 0]), 2).tolist() == [1, 0]


@pytest.mark.parametrize(
    "specs",
    [
        [SCORES],
        [TensorSpec("label", ("n",), "int64"), SCORES],  # of scikit-learn
        [TensorSpec("codes", ("n", 5), "uint8")],
        [TensorSpec("value", ("n", 1), "float32")],
    ],
)
def test_scores_decide_where_there_are_some(specs: list[TensorSpec]) -> None:
    assert fitted(ACCURACY, specs) is ACCURACY
    assert fitted(AGREEMENT, specs) is AGREEMENT


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TRUTH[:, 0], r"int64\[2, 3\], and output 'mask' has numbers of classes \[2, 2, 3\]"),
        (TRUTH.astype(np.float32), "the target is float32"),
        (np.where(TRUTH == 2, -100, TRUTH), "some labels are -100"),
    ],
)
def test_targets_that_do_not_fit_are_refused(target: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fitted(ACCURACY, [MASK]).per_sample({"mask": OURS}, target, 2)


def test_what_needs_scores_names_what_does_not() -> None:
    assert fitted(TOP5, [MASK]) is TOP5
    with pytest.raises(DataError, match="not scores; set metric: accuracy or agreement for"):
        TOP5.per_sample({"mask": OURS}, TRUTH, 2)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.uint16, np.int8, np.uint64])
@pytest.mark.parametrize("metric", [ACCURACY, PERPLEXITY, F1, TOKEN_ACCURACY])
def test_classes_may_be_numbers_of_any_type(metric: Metric, dtype: type) -> None:
    outputs = {"scores": np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)}
    truth = np.array([0, 1, 1, 0, 1, 0])
    wanted = metric.per_sample(outputs, truth, 6)
    np.testing.assert_array_equal(metric.per_sample(outputs, truth.astype(dtype), 6), wanted)
