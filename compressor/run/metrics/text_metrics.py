"""Metrics of models that read text: embeddings, tokens, spans, characters, ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from compressor.models.transformers.pooling import Pooling
from compressor.run.metrics.class_metrics import class_numbers, out_of_range
from compressor.run.metrics.corpus import edit_distance, f1, rank_correlation, ratio
from compressor.run.metrics.metrics import (
    CORRELATIONS,
    ERRORS,
    NOT_COUNTED,
    SHARES,
    Metric,
    cosines,
    first_of,
)
from compressor.run.metrics.scores import scores_of
from compressor.types.tensors import Array, Batch

_BLANK = 0  # of connectionist temporal classification


def pooled_as(metric: Metric, pooling: Pooling) -> Metric:
    """Return the metric ``embedding`` of the vectors that a model's directory describes."""
    return replace(metric, function=partial(_embedding, pooling=pooling), digest=pooling.digest)


def _embedding(outputs: Batch, target: Any, pooling: Pooling) -> Array:
    return cosines(_vectors(outputs, pooling), _vectors(target, pooling))


def _vectors(outputs: Batch, pooling: Pooling) -> Array:
    """Return the vectors of the first output, ``[N, width]``; pooled ones are as they are."""
    values = first_of(outputs).astype(np.float64)
    if values.ndim < 3:
        return np.asarray(values)
    return pooling.vectors(values.reshape(len(values), -1, values.shape[-1]))


def _decided(outputs: Batch, target: Any) -> tuple[Array, Array, Array]:
    """Return classes, right classes, and which of them count, ``[N, decisions]``.

    Labels of -100 do not count; against the float model, tokens that are masked do not.
    """
    scores = scores_of(outputs)
    if isinstance(target, dict):
        theirs = first_of(target)
        truth, counted = theirs.argmax(axis=-1), theirs.any(axis=-1)
    else:
        truth = class_numbers(target, scores)
        counted = truth != NOT_COUNTED
    labels, classes = truth[counted], scores.shape[-1]
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise out_of_range(labels, classes)
    shape = len(scores), -1
    return scores.argmax(axis=-1).reshape(shape), truth.reshape(shape), counted.reshape(shape)


def _token_hits(outputs: Batch, target: Any) -> Array:
    """Return the right decisions of each sample and all of them, ``[N, 2]``."""
    chosen, truth, counted = _decided(outputs, target)
    right = (chosen == truth) & counted
    return np.stack([right.sum(axis=1), counted.sum(axis=1)], axis=1)


def _class_hits(outputs: Batch, target: Any) -> Array:
    """Return what :func:`compressor.run.metrics.corpus.f1` takes, ``[N, 2 * classes]``."""
    chosen, truth, counted = _decided(outputs, target)
    classes = scores_of(outputs).shape[-1]

    def count(labels: Array, which: Array) -> Array:
        rows = np.broadcast_to(np.arange(len(labels))[:, None], labels.shape)
        places = rows[which] * classes + labels[which]
        sums = np.bincount(places, minlength=len(labels) * classes)
        return sums.reshape(len(labels), classes)

    hits = 2 * count(truth, counted & (chosen == truth))
    return np.concatenate([hits, count(chosen, counted) + count(truth, counted)], axis=1)


def _span_hits(outputs: Batch, target: Any) -> Array:
    """Return whether the best start and the best end are both right, ``[N]``.

    The outputs are the scores of starts and of ends, ``[N, tokens]`` each.
    """
    if len(outputs) < 2:
        raise ValueError("spans need two outputs: the scores of starts and of ends")
    chosen = _best_ends(outputs)
    right = _best_ends(target) if isinstance(target, dict) else np.asarray(target)
    return np.asarray((chosen == right.reshape(chosen.shape)).all(axis=1))


def _best_ends(outputs: Batch) -> Array:
    both = list(outputs.values())[:2]
    return np.stack([scores.argmax(axis=1) for scores in both], axis=1)


def _edits(outputs: Batch, target: Any) -> Array:
    """Return the edits that make the right characters of those read, and their number, ``[N, 2]``.

    The output holds the scores of characters, ``[N, steps, classes]``, as for connectionist
    temporal classification: the best of each step, of which repetitions count once and class 0 is
    none (Graves et al. 2006, "best path decoding").
    """
    read = _characters(scores_of(outputs))
    if isinstance(target, dict):
        right = _characters(first_of(target))
    else:
        right = [row[row > _BLANK] for row in np.asarray(target).reshape(len(read), -1)]
    pairs = zip(right, read, strict=True)
    return np.array([[edit_distance(b, a), len(b)] for b, a in pairs])


def _characters(scores: Array) -> list[Array]:
    if scores.ndim != 3:
        raise ValueError(f"characters are scores [N, steps, classes], not {list(scores.shape)}")
    best = scores.argmax(axis=-1)
    first = np.concatenate([np.ones_like(best[:, :1], bool), best[:, 1:] != best[:, :-1]], axis=1)
    return [row[keep & (row != _BLANK)] for row, keep in zip(best, first, strict=True)]


def _two_scores(outputs: Batch, target: Any) -> Array:
    """Return each sample's score and what it is compared with, ``[N, 2]``."""
    pair = [first_of(outputs), first_of(target) if isinstance(target, dict) else target]
    columns = [np.reshape(values, (len(pair[0]), -1)) for values in pair]
    if any(column.shape[1] != 1 for column in columns):
        raise ValueError(f"ranks need one score a sample, not {columns[0].shape[1]}")
    return np.concatenate(columns, axis=1)


EMBEDDING = Metric(
    "embedding",
    partial(_embedding, pooling=Pooling()),
    needs_labels=False,
    against_float=True,
    of_tokens=True,
    shows_worst=True,
    bounds=CORRELATIONS,
)
F1 = Metric(
    "f1",
    _class_hits,
    unit="%",
    needs_labels=False,
    about_classes=True,
    figure=f1,
    of_tokens=True,
    bounds=SHARES,
)
TOKEN_ACCURACY = Metric(
    "token-accuracy",
    _token_hits,
    unit="%",
    needs_labels=False,
    about_classes=True,
    figure=ratio,
    of_tokens=True,
    bounds=SHARES,
)
SPAN_ACCURACY = Metric("span-accuracy", _span_hits, unit="%", needs_labels=False, bounds=SHARES)
CHARACTER_ERROR_RATE = Metric(
    "character-error-rate",
    _edits,
    higher_is_better=False,
    unit="%",
    needs_labels=False,
    figure=ratio,
    bounds=ERRORS,
)
SPEARMAN = Metric(
    "spearman", _two_scores, needs_labels=False, figure=rank_correlation, bounds=CORRELATIONS
)
