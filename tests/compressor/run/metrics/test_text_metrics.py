"""Metrics of text: against values worked out by hand, and against the usual formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compressor import catalog
from compressor.errors import DataError
from compressor.models.transformers.pooling import Pooling
from compressor.run.metrics.corpus import edit_distance, f1, rank_correlation, ratio
from compressor.run.metrics.judged import judged_outputs
from compressor.run.metrics.metrics import Metric
from compressor.run.metrics.text_metrics import EMBEDDING, pooled_as
from compressor.run.verdicts.statistics import paired_difference
from compressor.types.tensors import Array, Batch, Feed


def named(name: str) -> Metric:
    metric: Metric = catalog.load("metric", name)
    return metric


def judged(name: str, outputs: Batch, target: Any, samples: int | None = None) -> Array:
    """Return the values of samples, as an evaluation makes them."""
    metric = named(name)
    size = samples or len(next(iter(outputs.values())))
    return metric.settled(metric.per_sample(outputs, target, size))


def one_hot(classes: Array, width: int) -> Array:
    return np.eye(width, dtype=np.float32)[classes]


def test_embedding_is_the_cosine_of_means_over_tokens_that_count() -> None:
    metric = named("embedding")
    ours = np.array([[[1, 0], [3, 0], [7, 7]], [[1, 1], [1, 1], [0, 2]]], np.float32)
    theirs = np.array([[[1, 0], [0, 1], [5, -9]], [[2, 2], [0, 0], [0, 2]]], np.float32)
    batch = {"attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    pair = [judged_outputs(batch, {"h": a}, metric) for a in (ours, theirs)]
    # [2, 0] against [0.5, 0.5], and [2, 4] against itself.
    values = metric.per_sample(*pair, 2)
    assert values == pytest.approx([np.sqrt(0.5), 1.0])
    summary = metric.summary(values)
    assert summary["worst"] == pytest.approx(np.sqrt(0.5))
    assert summary["value"] == pytest.approx((1 + np.sqrt(0.5)) / 2)


def test_embedding_of_outputs_that_are_pooled_already_and_of_whole_feeds() -> None:
    metric = named("embedding")
    pooled = {"e": np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)}
    other = {"e": np.array([[4.0, 3.0], [0.0, 1.0]], np.float32)}
    assert metric.per_sample(pooled, other, 2) == pytest.approx([0.96, 0.0])
    feed = Feed(attention_mask=np.ones((1, 2), np.int64))
    tokens = {"h": np.array([[[1, 2], [3, 4]]], np.float32)}
    whole = judged_outputs(feed, tokens, metric)
    assert metric.per_sample(whole, whole, 1) == pytest.approx([1.0])


def test_masks_leave_other_metrics_and_shapes_alone() -> None:
    batch = {"attention_mask": np.zeros((2, 3), np.int64)}
    tokens = {"h": np.ones((2, 3, 4), np.float32), "pooled": np.ones((2, 4), np.float32)}
    assert judged_outputs(batch, tokens, named("cosine"))["h"].all()
    masked = judged_outputs(batch, tokens, named("embedding"))
    assert not masked["h"].any()
    assert masked["pooled"].all()
    spans = {"start": np.ones((2, 3), np.float32)}  # scores of tokens, not vectors of them
    assert judged_outputs(batch, spans, named("embedding"))["start"].all()
    numbers = {"token_type_ids": np.zeros((2, 3), np.int64)}
    assert judged_outputs(numbers, tokens, named("embedding"))["h"].all()


def test_the_directory_of_a_model_says_what_its_vectors_are() -> None:
    """Their own digest tells results apart."""
    first = pooled_as(EMBEDDING, Pooling(("cls",), digest="of the first token"))
    assert (first.name, first.digest) == ("embedding", "of the first token")
    ours = {"h": np.array([[[1, 0], [0, 5]]], np.float32)}
    theirs = {"h": np.array([[[2, 0], [9, 1]]], np.float32)}
    assert first.per_sample(ours, theirs, 1) == pytest.approx([1.0])
    assert EMBEDDING.per_sample(ours, theirs, 1)[0] < 0.5


def test_token_accuracy_counts_tokens_not_samples() -> None:
    scores = one_hot(np.array([[0, 1, 2], [1, 1, 0]]), 3)
    labels = np.array([[0, 1, 1], [1, -100, -100]])
    values = judged("token-accuracy", {"y": scores}, labels)
    assert values.mean() == pytest.approx(3 / 4)
    metric = named("token-accuracy")
    assert metric.summary(metric.per_sample({"y": scores}, labels, 2))["value"] == pytest.approx(
        75.0
    )


def test_token_accuracy_without_labels_leaves_masked_tokens_out() -> None:
    metric = named("token-accuracy")
    batch = {"attention_mask": np.array([[1, 1, 0]])}
    ours, theirs = (one_hot(np.array([c]), 3) for c in ([0, 1, 1], [0, 2, 2]))
    pair = [judged_outputs(batch, {"y": a}, metric) for a in (ours, theirs)]
    assert metric.settled(metric.per_sample(*pair, 1)).mean() == pytest.approx(0.5)


def test_tokens_are_decided_by_their_classes() -> None:
    """Two texts of four tokens, each of five classes: no two axes are alike."""
    ours, theirs = np.array([[0, 1, 4, 4], [1, 1, 0, 0]]), np.array([[0, 1, 4, 0], [1, 0, 4, 0]])
    scores, of_float = {"y": one_hot(ours, 5)}, {"y": one_hot(theirs, 5)}
    for target in (theirs, of_float):
        assert judged("token-accuracy", scores, target).mean() == pytest.approx(5 / 8)
        # Of each class that is seen twice what both decide, over what either does.
        expected = (4 / 7 + 4 / 5 + 2 / 4) / 3
        assert judged("f1", scores, target).mean() == pytest.approx(expected)


@pytest.mark.parametrize("labels", [[[3, 0]], [[-1, 0]]])
def test_labels_that_are_no_classes(labels: list[list[int]]) -> None:
    with pytest.raises(DataError, match=r"labels .* for 3 classes"):
        judged("token-accuracy", {"y": one_hot(np.array([[0, 1]]), 3)}, np.array(labels))


def test_nothing_to_count() -> None:
    scores = {"y": one_hot(np.array([[0, 1]]), 3)}
    for name in ("token-accuracy", "f1"):
        with pytest.raises(DataError, match=f"metric '{name}': no sample has anything to count"):
            judged(name, scores, np.full((1, 2), -100))


def usual_f1(chosen: Array, truth: Array, label: int) -> float:
    right = int(((chosen == label) & (truth == label)).sum())
    size = int((chosen == label).sum() + (truth == label).sum())
    return 2 * right / size if size else 0.0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30),
)
def test_f1_is_the_mean_over_classes(pairs: list[tuple[int, int]]) -> None:
    chosen, truth = np.array(pairs).T
    seen = sorted({*chosen.tolist(), *truth.tolist()})
    expected = np.mean([usual_f1(chosen, truth, label) for label in seen])
    values = judged("f1", {"y": one_hot(chosen, 4)}, truth)
    assert values.mean() == pytest.approx(expected)
    assert values.shape == (len(pairs),)


def test_f1_of_two_classes_is_that_of_the_second() -> None:
    chosen, truth = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    values = judged("f1", {"y": one_hot(chosen, 2)}, truth)
    assert values.mean() == pytest.approx(2 * 2 / (3 + 3))


def test_f1_of_tokens_leaves_labels_of_minus_100_out() -> None:
    chosen, truth = np.array([[0, 1, 2], [2, 2, 1]]), np.array([[0, 1, -100], [1, 2, -100]])
    kept = truth >= 0
    expected = np.mean([usual_f1(chosen[kept], truth[kept], c) for c in range(3)])
    assert judged("f1", {"y": one_hot(chosen, 3)}, truth).mean() == pytest.approx(expected)


def usual_spearman(x: Array, y: Array) -> float:
    """Return Pearson's correlation of mean ranks, as SciPy's ``spearmanr``."""

    def ranks(values: Array) -> Array:
        return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


SCORES = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=40)


@given(SCORES)
def test_spearman_is_the_correlation_of_ranks(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, np.float64).T
    assume(len(set(x)) > 1 and len(set(y)) > 1)
    values = judged("spearman", {"y": x[:, None].astype(np.float32)}, y)
    assert values.mean() == pytest.approx(usual_spearman(x, y), abs=1e-9)


def test_spearman_by_hand() -> None:
    # Ranks 1, 2, 3 against 1, 3, 2: 1 - 6 * 2 / (3 * 8).
    scores, truth = {"y": np.array([0.1, 0.2, 9.0])}, np.array([1.0, 7.0, 6.0])
    values = judged("spearman", scores, truth)
    of_float = {"y": truth[:, None], "other": np.zeros(3)}
    assert judged("spearman", scores, of_float).tolist() == values.tolist()
    assert values.mean() == pytest.approx(0.5)


def test_spearman_needs_one_score_and_an_order() -> None:
    with pytest.raises(DataError, match="ranks need one score a sample, not 2"):
        judged("spearman", {"y": np.zeros((3, 2))}, np.arange(3))
    with pytest.raises(DataError, match="there is no order to compare"):
        judged("spearman", {"y": np.zeros((3, 1))}, np.arange(3))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([f1, rank_correlation, ratio]), st.integers(0, 2), st.integers(0, 2**31))
def test_spread_of_values_is_that_of_the_figure(figure: Any, shared: int, seed: int) -> None:
    """To first order: doubling a sample's weight moves the figure by its value over N."""
    rng = np.random.default_rng(seed)
    size = 400
    if figure is f1:
        chosen, truth = rng.integers(0, 3, (2, size))
        hits = 2 * one_hot(truth, 3) * (chosen == truth)[:, None]
        parts = np.concatenate([hits, one_hot(chosen, 3) + one_hot(truth, 3)], axis=1)
    else:
        # Where values are equal, the spread of ranks moves with a sample's weight, too.
        parts = rng.integers(1, 50, (size, 2))
        if shared:
            parts = 1 + (rng.random((size, 2)) < 0.3) + 2 * shared * (rng.random((size, 1)) < 0.1)
    parts = parts.astype(np.float64)
    values = figure(parts)
    for sample in rng.integers(0, size, 5):
        doubled = figure(np.concatenate([parts, parts[[sample]]])).mean()
        moved = (values[sample] - values.mean()) / (size + 1)
        # What is left out is of second order, N ** -2; of few ranks, 9 times that (measured).
        second = 20 if shared and figure is rank_correlation else 60
        assert doubled - values.mean() == pytest.approx(moved, abs=second / size**2)


def test_intervals_of_a_corpus_figure_are_those_of_many_draws() -> None:
    """The values' standard error against the spread over fresh samples (measured: within 6 %)."""
    rng = np.random.default_rng(0)

    def draw() -> Array:
        x = rng.standard_normal(300)
        return np.stack([x, x + rng.standard_normal(300)], axis=1)

    figures = [rank_correlation(draw()).mean() for _ in range(400)]
    values = rank_correlation(draw())
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert error == pytest.approx(np.std(figures), rel=0.2)


def test_a_corpus_figure_is_paired_like_a_mean() -> None:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, 400)
    flipped = np.where(rng.random(400) < 0.1, (truth + 1) % 3, truth)
    metric = named("f1")
    base, candidate = (judged("f1", {"y": one_hot(c, 3)}, truth) for c in (truth, flipped))
    pair = paired_difference(base, candidate, metric.scale)
    assert pair.drop == pytest.approx(100 - 100 * candidate.mean())
    assert 5 < pair.ci95[0] < pair.drop < pair.ci95[1] < 15


def test_spans_are_right_as_a_whole() -> None:
    starts, ends = one_hot(np.array([1, 2, 0]), 4), one_hot(np.array([2, 3, 0]), 4)
    outputs = {"start_logits": starts, "end_logits": ends}
    labels = np.array([[1, 2], [2, 2], [0, 0]])
    assert judged("span-accuracy", outputs, labels).tolist() == [1, 0, 1]
    other = {**outputs, "end_logits": one_hot(np.array([2, 3, 1]), 4)}
    assert judged("span-accuracy", outputs, other).tolist() == [1, 1, 0]
    assert judged("span-accuracy", {**outputs, "pooled": starts}, labels).tolist() == [1, 0, 1]
    assert judged("span-accuracy", outputs, labels[..., None]).tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="spans need two outputs"):
        judged("span-accuracy", {"y": starts}, labels)


def test_character_error_rate_is_edits_over_characters() -> None:
    # Read: 1 2 (a repetition and blanks fall away), and 3 3 (a blank between them).
    steps = np.array([[1, 1, 0, 2, 0], [3, 0, 3, 3, 0]])
    scores = {"y": one_hot(steps, 4)}
    labels = np.array([[1, 2, 3], [3, 3, -100]])
    values = judged("character-error-rate", scores, labels)
    assert values.mean() == pytest.approx(1 / 5)
    assert judged("character-error-rate", scores, scores).mean() == 0.0
    padded = np.where(labels < 0, 0, labels)  # the blank is no character, and pads as well
    assert judged("character-error-rate", scores, padded).tolist() == values.tolist()
    assert not named("character-error-rate").higher_is_better
    with pytest.raises(DataError, match=r"scores \[N, steps, classes\], not \[2, 5\]"):
        judged("character-error-rate", {"y": np.zeros((2, 5))}, labels)


def levenshtein(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return levenshtein(a[1:], b[1:])
    return 1 + min(levenshtein(a[1:], b), levenshtein(a, b[1:]), levenshtein(a[1:], b[1:]))


WORD = st.lists(st.integers(1, 3), max_size=5).map(tuple)


@given(WORD, WORD)
def test_edit_distance(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert edit_distance(np.array(a, int), np.array(b, int)) == levenshtein(a, b)
