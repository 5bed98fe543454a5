"""Perplexity: the exponential of the mean loss over the labels that count."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import DataError
from compressor.run.metrics import class_metrics
from compressor.run.metrics.class_metrics import PERPLEXITY, kl_sums


@given(st.integers(0, 10_000), st.booleans())
def test_it_is_torchs_cross_entropy(seed: int, padded: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = (10 * rng.normal(size=(3, 5, 7))).astype(np.float32)
    labels = rng.integers(0, 7, (3, 5))
    if padded:
        labels[1, 2:] = -100
    values = PERPLEXITY.per_sample({"output": logits}, labels, 3)
    for row, truth, value in zip(logits, labels, values, strict=True):
        wanted = torch.nn.functional.cross_entropy(
            torch.from_numpy(row).double(), torch.from_numpy(truth)
        )
        assert value == pytest.approx(float(wanted), rel=1e-12)
    assert PERPLEXITY.summary(values)["value"] == pytest.approx(math.exp(values.mean()))


def test_one_label_a_sample() -> None:
    values = PERPLEXITY.per_sample({"output": np.zeros((2, 4), np.float32)}, np.array([0, 3]), 2)
    assert values == pytest.approx([math.log(4)] * 2)


@pytest.mark.parametrize(
    ("label", "message"),
    [(7, "labels 0 to 7 for 7 classes"), (-1, "labels -1 to 0"), (-100, "has no label but -100")],
)
def test_labels_that_are_none(label: int, message: str) -> None:
    labels = np.full((2, 5), label)
    if label != -100:
        labels[0, 0] = 0
    with pytest.raises(DataError, match=message):
        PERPLEXITY.per_sample({"output": np.zeros((2, 5, 7), np.float32)}, labels, 2)


def test_large_vocabularies_are_widened_a_few_rows_at_a_time() -> None:
    """Three float64 copies of all logits would be six times their bytes."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 130, 16_384), dtype=np.float32)
    labels = rng.integers(0, 16_384, (1, 130))
    labels[0, ::3] = -100
    tracemalloc.start()
    (value,) = PERPLEXITY.per_sample({"output": logits}, labels, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < logits.nbytes, "copies of 16 rows and what is made of them"
    rows, truth = torch.from_numpy(logits[0]).double(), torch.from_numpy(labels[0])
    assert value == pytest.approx(float(torch.nn.functional.cross_entropy(rows, truth)), rel=1e-12)


def test_each_sample_has_a_label_that_counts() -> None:
    for labels in ([[-100, -100], [0, 1]], [[0, 1], [-100, -100]]):
        with pytest.raises(DataError, match="a sample has no label but -100"):
            PERPLEXITY.per_sample({"y": np.zeros((2, 2, 3))}, np.array(labels), 2)


@pytest.mark.parametrize("at_once", [1, 4, 1 << 18])
def test_the_divergence_is_that_of_the_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Of a half and a half from a quarter and three quarters, worked out by hand; in any pieces."""
    monkeypatch.setattr(class_metrics, "CONVERTED_AT_ONCE", at_once)
    half = np.zeros((2, 3, 2), np.float32)
    other = half.copy()
    other[0, 0] = other[1, 2] = np.log([0.25, 0.75])
    one = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    labels = np.array([[0, 1, -100], [1, 0, -100]])
    assert kl_sums(other, half, labels).tolist() == pytest.approx([one, 4])
    assert kl_sums(other, half, {"y": half}).tolist() == pytest.approx([2 * one, 6])
    back = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert kl_sums(half, other, labels).tolist() == pytest.approx([back, 4])
    assert kl_sums(half, half, labels).tolist() == [0, 4]


def test_divergence_from_the_float_model():
    """By the definition, on two tokens of three classes; a label of -100 does not count."""
    ours = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]]]))
    theirs = np.log(np.array([[[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [0.9, 0.05, 0.05]]]))
    total, tokens = kl_sums(ours + 7, theirs - 3, np.array([[0, 1, -100]]))
    assert tokens == 2
    assert total == pytest.approx(0.25 * np.log(0.5) + 0.5 * np.log(2))
    assert kl_sums(ours, ours, np.array([[0, 1, 2]])).tolist() == [0, 3]
    assert kl_sums(ours, ours.copy(), np.array([[0, -100, 2]])).tolist() == [0, 2]


def test_divergence_of_large_vocabularies_is_summed_some_tokens_at_a_time():
    """262144 values at once are two tokens of these."""
    scores = np.random.default_rng(0).standard_normal((2, 1, 5, 1 << 17)).astype(np.float32)
    single = [kl_sums(*scores[:, :, i : i + 1], {})[0] for i in range(5)]
    assert kl_sums(scores[0], scores[1], {}).tolist() == [pytest.approx(sum(single)), 5]
