"""Metrics about classes: the right one, the float model's, the likelihood of the right one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from compressor.run.metrics.metrics import (
    CONVERTED_AT_ONCE,
    ERRORS,
    NOT_COUNTED,
    SHARES,
    Metric,
    first_of,
)
from compressor.run.metrics.scores import UnfitError, gives_numbers, scores_of
from compressor.types.tensors import Array, Batch, TensorSpec


def class_numbers(target: Any, scores: Array) -> Array:
    """Return the target as one number for each row of scores ``[..., classes]``, int64.

    Raises:
        ValueError: it is something else, such as one-hot vectors.
    """
    truth, wanted = np.asarray(target), scores.shape[:-1]
    if truth.size != math.prod(wanted):
        raise UnfitError(
            f"the target has shape {list(truth.shape)} and the scores {list(scores.shape)}",
            "give the number of each class (data.transform; of one-hot vectors their argmax), or "
            "use subset-accuracy where a sample has several",
        )
    if truth.dtype.kind not in "iub":
        raise UnfitError(
            f"the target is {truth.dtype}, not numbers of classes",
            "store the target as int64, or convert it in data.transform",
        )
    # Indices, which booleans are not; sums of numbers with uint64 would be floats.
    return truth.reshape(wanted).astype(np.int64, copy=False)


def out_of_range(labels: Array, classes: int) -> UnfitError:
    """Return the error of labels that are no classes."""
    low, high = int(labels.min()), int(labels.max())
    start = "they start at 1: subtract 1 (data.transform)"
    other = "check that the target belongs to this model"
    return UnfitError(
        f"labels {low} to {high} for {classes} classes, which are 0 to {classes - 1}",
        start if low == 1 and high == classes else other,
    )


def _in_top(outputs: Batch, target: Array, k: int) -> Array:
    logits = scores_of(outputs)
    classes = logits.shape[-1]
    truth = class_numbers(target, logits)
    if truth.min() == NOT_COUNTED:
        raise UnfitError("some labels are -100", "use token-accuracy, which leaves those out")
    if truth.min() < 0 or truth.max() >= classes:
        raise out_of_range(truth, classes)
    true_logits = np.take_along_axis(logits, truth[..., None], axis=-1)
    better = (logits > true_logits).sum(axis=-1)
    # A tie counts for the class with the smaller index, as argmax does.
    index = np.arange(classes)
    ties = ((logits == true_logits) & (index < truth[..., None])).sum(axis=-1)
    hit = (better + ties < k).astype(np.float64)
    return np.asarray(hit.reshape(hit.shape[0], -1).mean(axis=1))


def _agreement(outputs: Batch, target: Any) -> Array:
    """Return the share of each sample's decisions that are the float model's."""
    theirs = next(iter(target.values()))
    same = scores_of(outputs).argmax(axis=-1) == theirs.argmax(axis=-1)
    same = same.reshape(len(same), -1)
    return np.asarray(same.mean(axis=1)) if same.size else np.ones(len(same))


def _same_numbers(outputs: Batch, target: Any) -> Array:
    """Return the share of each sample's numbers of classes that are the target's, ``[N]``."""
    name, ours = next(iter(outputs.items()))
    truth = np.asarray(target[name] if isinstance(target, dict) else target)
    if truth.size != ours.size or truth.dtype.kind not in "iub":
        raise UnfitError(
            f"the target is {truth.dtype}{list(truth.shape)}, and output {name!r} has numbers of "
            f"classes {list(ours.shape)}",
            "give the number of a class for each of them (data.transform)",
        )
    if not isinstance(target, dict) and (truth == NOT_COUNTED).any():
        raise UnfitError(
            "some labels are -100", "give a metric of your own, which leaves those out"
        )
    same = (ours == truth.reshape(ours.shape)).reshape(len(ours), -1)
    return np.asarray(same.mean(axis=1)) if same.size else np.ones(len(same))


def fitted(metric: Metric, outputs: Sequence[TensorSpec]) -> Metric:
    """Return the metric for a model with these outputs.

    Where a model gives numbers of classes and no scores, as a segmentation with ``ArgMax`` does,
    accuracy and agreement are the share of numbers that are the right ones, or the float model's.
    """
    if metric.name not in (ACCURACY.name, AGREEMENT.name) or not gives_numbers(outputs):
        return metric
    return replace(metric, function=_same_numbers, about_classes=False, of_numbers=True)


def _right_subsets(outputs: Batch, target: Any) -> Array:
    """Return whether each sample's labels are all right: those whose score is above 0, ``[N]``."""
    given = first_of(outputs) > 0
    if isinstance(target, dict):
        wanted = first_of(target) > 0
    else:
        truth = np.asarray(target)
        if truth.shape != given.shape or not np.isin(truth, (0, 1)).all():
            raise UnfitError(
                f"the target has shape {list(truth.shape)} and the scores {list(given.shape)}"
                if truth.shape != given.shape
                else "the target holds other numbers than 0 and 1",
                "give 0 or 1 for each label of each sample",
            )
        wanted = truth != 0
    return np.asarray((given == wanted).reshape(len(given), -1).all(axis=1))


def _log_loss(outputs: Batch, target: Array) -> Array:
    """Return each sample's mean negative log-likelihood, in nats a label.

    Labels of -100 mark positions that do not count, as is usual for padding.
    """
    logits = first_of(outputs)
    truth = class_numbers(target, logits)
    classes = logits.shape[-1]
    counted = truth != NOT_COUNTED
    if not counted.reshape(len(truth), -1).any(axis=1).all():
        raise ValueError(f"a sample has no label but {NOT_COUNTED}")
    labels = truth[counted]
    if labels.min() < 0 or labels.max() >= classes:
        raise out_of_range(labels, classes)
    # Sample by sample: float64 copies of a whole batch's logits would take much memory.
    return np.array(
        [_mean_loss(row, row_labels) for row, row_labels in zip(logits, truth, strict=True)],
        np.float64,
    )


def _mean_loss(logits: Array, labels: Array) -> float:
    """Return the mean loss over the labels that count; logits ``[..., classes]``."""
    flat, right = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    (counted,) = (right != NOT_COUNTED).nonzero()
    # Some rows at a time: three float64 copies of all of them are six times the logits.
    step = max(1, CONVERTED_AT_ONCE // flat.shape[1])
    parts = [counted[start : start + step] for start in range(0, len(counted), step)]
    return float(np.concatenate([_losses(flat[part], right[part]) for part in parts]).mean())


def _losses(logits: Array, labels: Array) -> Array:
    """Return the loss of each row of ``[N, classes]``."""
    return -np.take_along_axis(log_softmax(logits), labels[:, None], axis=1)[:, 0]


def kl_sums(outputs: Array, expected: Array, target: Any) -> Array:
    """Return the summed Kullback-Leibler divergence of tokens, in nats, and their number.

    Kullback and Leibler 1951: ``Σ p (ln p - ln q)``, with the float model's distribution ``p``.

    Args:
        outputs: scores of a model, ``[N, tokens, classes]``.
        expected: those of the float model.
        target: the right classes, ``[N, tokens]``; -100 does not count.
    """
    ours, theirs = (a.reshape(-1, a.shape[-1]) for a in (outputs, expected))
    counted = np.arange(len(ours))
    if not isinstance(target, dict):
        (counted,) = (np.asarray(target).reshape(-1) != NOT_COUNTED).nonzero()
    if outputs is expected:
        return np.array([0.0, len(counted)])
    total = 0.0
    # Some at a time: vocabularies are large.
    step = max(1, CONVERTED_AT_ONCE // ours.shape[1])
    for start in range(0, len(counted), step):
        log_p, log_q = (log_softmax(a[counted[start : start + step]]) for a in (theirs, ours))
        for divergence in (np.exp(log_p) * (log_p - log_q)).sum(axis=1).tolist():
            total += divergence
    return np.array([total, len(counted)])


def log_softmax(scores: Array) -> Array:
    """Return the logarithms of the probabilities of each row, float64."""
    shifted = scores.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


ACCURACY = Metric("accuracy", partial(_in_top, k=1), unit="%", about_classes=True, bounds=SHARES)
AGREEMENT = Metric(
    "agreement",
    _agreement,
    unit="%",
    needs_labels=False,
    against_float=True,
    about_classes=True,
    bounds=SHARES,
)
TOP5 = Metric("top5", partial(_in_top, k=5), unit="%", about_classes=True, bounds=SHARES)
SUBSET_ACCURACY = Metric(
    "subset-accuracy", _right_subsets, unit="%", needs_labels=False, bounds=SHARES
)
PERPLEXITY = Metric(
    "perplexity",
    _log_loss,
    higher_is_better=False,
    exponential=True,
    about_classes=True,
    bounds=ERRORS,
)
