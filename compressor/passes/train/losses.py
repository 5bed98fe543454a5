"""Losses, one value a sample, so that averages over batches of any size are exact."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from compressor.run.metrics.scores import class_axis

NOT_COUNTED = -100
"""Label of a position that does not count, by convention that of padding."""


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return each sample's mean negative log-likelihood.

    Args:
        logits: ``[N, ..., classes]``, or of an image's pixels as :func:`by_class` takes them.
        target: labels, as many as there are rows of logits; -100 does not count.
        smoothing: share of each label that is spread over all classes alike (C. Szegedy et al.,
            Rethinking the Inception architecture, 2016, arXiv:1512.00567, section 7).

    Returns:
        ``[N]``, in nats, float32 at least; 0 for a sample without labels that count.

    Raises:
        ValueError: a label is none of the classes.
    """
    rows = by_class(logits)
    classes = rows.shape[1]
    truth = target.reshape(-1).to(torch.int64)
    if len(truth) != len(rows):
        raise ValueError(f"{len(truth)} labels for {len(rows)} rows of logits")
    counted = truth != NOT_COUNTED
    labels = truth[counted]
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels {int(labels.min())} to {int(labels.max())} for {classes} classes")
    each = functional.cross_entropy(
        rows.float() if rows.dtype.itemsize < 4 else rows,
        truth,
        ignore_index=NOT_COUNTED,
        reduction="none",
        label_smoothing=smoothing,
    )
    return masked_mean(each, counted, len(logits))


def by_class(logits: Tensor) -> Tensor:
    """Return logits as rows ``[positions, classes]``.

    The classes are on the axis that metrics take (``class_axis``): the last, but of the pixels of
    an image, ``[N, classes, height, width]``, the one behind the samples.
    """
    last = logits.movedim(class_axis(logits.shape), -1)
    return last.reshape(-1, last.shape[-1])


def masked_mean(each: Tensor, counted: Tensor, samples: int) -> Tensor:
    """Return each sample's mean over the positions that count; 0 if none does.

    There is one value a position, ``[N * positions]``, and ``counted`` likewise.
    """
    weights = counted.to(each.dtype).reshape(samples, -1)
    total = (each.reshape(samples, -1) * weights).sum(dim=1)
    return total / weights.sum(dim=1).clamp(min=1)


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean squared error, ``[N]``.

    Raises:
        ValueError: the shapes differ.
    """
    if outputs.shape != target.shape and outputs.numel() != target.numel():
        raise ValueError(f"targets {list(target.shape)} for outputs {list(outputs.shape)}")
    difference = outputs - target.reshape(outputs.shape).to(outputs.dtype)
    return difference.square().reshape(len(outputs), -1).mean(dim=1)


def kl_divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None
) -> Tensor:
    """Return ``T² KL(teacher || student)`` of softened probabilities.

    G. Hinton et al., Distilling the knowledge in a neural network, 2015 (arXiv:1503.02531),
    section 2: both logits are divided by the temperature; the square keeps gradients as large as
    those of hard labels, whatever the temperature.

    Args:
        student: logits as :func:`by_class` takes them.
        teacher: likewise.
        temperature: ``T``.
        counted: which positions count, as many as there are rows of logits; all if left out.

    Returns:
        ``[N]``, in nats, the mean over the positions that count; 0 if none does.
    """
    ours = functional.log_softmax(by_class(student.float()) / temperature, dim=1)
    theirs = functional.log_softmax(by_class(teacher.float()) / temperature, dim=1)
    each = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
    if counted is None:
        counted = torch.ones(len(each), dtype=torch.bool, device=each.device)
    return temperature**2 * masked_mean(each, counted.reshape(-1), len(student))


def mean_square(student: Tensor, teacher: Tensor) -> Tensor:
    """Return each sample's mean squared difference, ``[N]``, of tensors ``[N, ...]``.

    Applied to layers' outputs, this is the hint of A. Romero et al., FitNets, 2015
    (arXiv:1412.6550), equation 3, as a mean, so that a weight means the same for layers of every
    size.
    """
    difference = student.float() - teacher.float()
    return difference.square().reshape(len(difference), -1).mean(dim=1)


def signed_sum(outputs: Iterable[Tensor], generator: torch.Generator) -> Tensor:
    """Return the sum of outputs, each number with a random sign (M. Hutchinson, 1989)."""
    signed = [
        (torch.randint(0, 2, out.shape, generator=generator).to(out) * 2 - 1).mul(out).sum()
        for out in outputs
    ]
    return torch.stack(signed).sum()


def attention_map(values: Tensor, axis: int) -> Tensor:
    """Return where a layer is active: the sum of squares over channels, scaled to length one.

    S. Zagoruyko and N. Komodakis, Paying more attention to attention, 2017 (arXiv:1612.03928),
    section 3.1.

    ``axis`` is that of the channels, or of a token's features, in a layer's output ``[N, ...]``.
    The result is ``[N, positions]``.
    """
    return functional.normalize(values.float().square().sum(dim=axis).flatten(1), dim=1)


def attention_difference(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared distance of attention maps ``[N, positions]``: ``[N]``, 0 to 2.

    The paper's equation 2 has the distance itself, whose gradient is undefined if both maps are
    the same.
    """
    return (student - teacher).square().sum(dim=1)
