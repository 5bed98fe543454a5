"""One answer for all samples: what a limit must not allow."""

from dataclasses import replace

import numpy as np
import pytest

from compressor.run.metrics.class_metrics import ACCURACY, AGREEMENT, PERPLEXITY
from compressor.run.metrics.judged import ConstantAnswer
from compressor.run.metrics.metrics import COSINE, MSE, Metric
from compressor.run.metrics.text_metrics import F1

LOGITS = np.eye(4, dtype=np.float32)


def constant(metric: Metric, outputs: np.ndarray, target: object, size: int) -> float | None:
    found = ConstantAnswer(metric)
    for start in range(0, len(outputs), size):
        part = slice(start, start + size)
        rows = {"y": outputs[part]}
        found.add(rows, rows if target is None else np.asarray(target)[part], len(outputs[part]))
    return found.value


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("labels", "value"), [([0, 1, 2, 3], 0), ([1, 0, 0, 0], 100), ([0, 0, 2, 2], 100 / 3)]
)
def test_the_first_answer_is_held_against_all_other_labels(
    labels: list[int], value: float, size: int
):
    assert constant(ACCURACY, LOGITS, labels, size) == pytest.approx(value)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_first_output_is_held_against_all_others(size: int):
    values = 100 + np.arange(3.0)[:, None] * [[1.0, -1.0]]
    assert constant(MSE, values, None, size) == pytest.approx((1 + 4) / 2)
    close = constant(COSINE, values, None, size)
    assert close is not None
    assert 0.999 < close < 1
    assert constant(AGREEMENT, LOGITS, None, size) == 0


def test_what_is_not_looked_at_is_not_known():
    assert constant(MSE, np.ones((1, 3)), None, 1) is None
    assert constant(PERPLEXITY, LOGITS, [0, 1, 2, 3], 4) is None
    assert constant(F1, LOGITS, [0, 1, 2, 3], 4) is None
    assert constant(Metric("own", lambda *_: 1 / 0, code=print), LOGITS, None, 4) is None


def test_samples_of_other_shapes_are_left_out():
    found = ConstantAnswer(MSE)
    for length, level in ((3, 1.0), (4, 9.0), (3, 3.0)):
        rows = {"y": np.full((1, length), level)}
        found.add(rows, rows, 1)
    assert found.value == 4.0


def test_an_answer_without_rows_counts_against_rows_of_the_float_model():
    found = ConstantAnswer(replace(COSINE, against_float=True))
    for shape in ((1, 0, 4), (1, 2, 4), (1, 0, 4), (1, 4)):  # the last is of one row
        judged = {"y": np.ones(shape)}
        found.add(judged, judged, 1)
    assert found.value == pytest.approx(1 / 3)
    found.add({"other": np.ones((1, 3))}, {"other": np.ones((1, 3))}, 1)
    assert found.value == pytest.approx(1 / 3)
