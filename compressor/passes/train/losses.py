"""Losses, one value a sample, so that averages over batches of any size are exact."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

NOT_COUNTED = -100
"""Label of a position that does not count, as is the custom for padding."""


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean negative log-likelihood.

    Args:
        logits: ``[N, ..., classes]``.
        target: labels, as many as there are rows of logits; -100 does not count.

    Returns:
        ``[N]``, in nats, float32 at least; 0 for a sample without labels that count.

    Raises:
        ValueError: a label is none of the classes.
    """
    classes = logits.shape[-1]
    rows = logits.reshape(-1, classes)
    truth = target.reshape(-1).to(torch.int64)
    if len(truth) != len(rows):
        raise ValueError(f"{len(truth)} labels for {len(rows)} rows of logits")
    counted = truth != NOT_COUNTED
    check_labels(truth[counted], classes)
    each = functional.cross_entropy(
        rows.float() if rows.dtype.itemsize < 4 else rows,
        truth,
        ignore_index=NOT_COUNTED,
        reduction="none",
    )
    return masked_mean(each, counted, len(logits))


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are none of the classes.

    Raises:
        ValueError: one is not.
    """
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels {int(labels.min())} to {int(labels.max())} for {classes} classes")


def masked_mean(each: Tensor, counted: Tensor, samples: int) -> Tensor:
    """Average what counts of each sample.

    Args:
        each: one value a position, ``[N * positions]``.
        counted: which of them count, likewise.
        samples: ``N``.

    Returns:
        ``[N]``; 0 where nothing counts.
    """
    known = counted.to(each.dtype).reshape(samples, -1)
    total = (each.reshape(samples, -1) * known).sum(dim=1)
    return total / known.sum(dim=1).clamp(min=1)


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean squared error, ``[N]``.

    Raises:
        ValueError: the shapes differ.
    """
    if outputs.shape != target.shape and outputs.numel() != target.numel():
        raise ValueError(f"targets {list(target.shape)} for outputs {list(outputs.shape)}")
    wanted = target.reshape(outputs.shape).to(outputs.dtype)
    return (outputs - wanted).square().reshape(len(outputs), -1).mean(dim=1)
