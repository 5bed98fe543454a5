"""What samples say of observers: whose errors differ for certain, and what later samples may do."""

from __future__ import annotations

import math

import numpy as np

from compressor.types.tensors import Array

_QUARTERS = 4
_HEAVY = 0.25  # tail index from which on squares of what exceeds a range have no variance
_FLOOR = 1e-12  # of a squared error over the signal: what is less is none
_CLEARLY = 3.0  # dB by which the error of an observer exceeds the least before it is dropped
_STEADILY = 1.0  # the same, where the error is greater on each sample
_WORTH = 0.25  # dB by which another observer should be better than the first
_ERRORS = 3.0  # standard errors that a gain may be larger than it seems


def heavy_tails(peaks: Array) -> float:
    """Return the share of values whose greatest values in samples have a heavy tail.

    Hill's estimate of the tail index, from the greater quarter of the samples.

    Args:
        peaks: ``[samples, values]``.
    """
    ordered = -np.sort(-peaks, 0)
    count = max(1, len(peaks) // _QUARTERS)
    rare = (ordered[count] == 0) & (ordered[0] > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        index = np.log(ordered[:count] / ordered[count]).mean(0)
    return float((rare | (index >= _HEAVY)).mean())


def exceeding(values: int, samples: int) -> float:
    """Return how likely a later sample exceeds one of some values of earlier ones.

    As if values exceeded theirs independently of each other; less, if they do so together.
    """
    return 1.0 - (1.0 - 1.0 / (samples + 1)) ** values


def remaining(errors: Array) -> list[int]:
    """Return the observers that may still turn out to be the best; the first always stays.

    One is dropped if its error is more than twice the least (3 dB), and still is without any one
    sample; if its error is greater than the least on each sample, by a decibel over all; or if
    three standard errors (of the jackknife) do not make it a quarter of a decibel better than the
    first. A single sample drops none: it does not tell how much others differ.

    Args:
        errors: as :func:`best` takes them.
    """
    errors = errors[:, :, np.isfinite(errors).all((0, 1))]
    if not errors.size or errors.shape[1] < 2:
        return list(range(len(errors)))
    total = errors.sum(1, keepdims=True)
    without_one = _gains(np.maximum(total - errors, 0.0))
    gains, each = _gains(total)[:, 0], _gains(errors)
    leader = gains.argmax()
    behind = gains[leader] - gains
    worse = (behind > _CLEARLY) & ((without_one[leader] - without_one).min(1) > _CLEARLY)
    worse |= (each < each[leader]).all(1) & (behind > _STEADILY)
    worse |= gains + _ERRORS * without_one.std(1) * math.sqrt(errors.shape[1] - 1) < _WORTH
    return [i for i in range(len(errors)) if i == 0 or not worse[i]]


def best(errors: Array) -> tuple[int, float]:
    """Return which error is least, and by how many dB less than the first's.

    Outputs count alike, each by its squared error over all samples in dB. The first stays where
    another is only better because of a single sample.

    Args:
        errors: squared errors over the output's signal, ``[observers, samples, outputs]``.
    """
    errors = errors[:, :, np.isfinite(errors).all((0, 1))]
    if not errors.size:
        return 0, 0.0
    total = errors.sum(1, keepdims=True)
    gains = _gains(total)[:, 0]
    steady = _gains(np.maximum(total - errors, 0.0)).min(1) > 0
    index = int(np.where(steady, gains, -np.inf).argmax()) if steady.any() else 0
    return index, float(gains[index])


def _gains(totals: Array) -> Array:
    """Return by how many dB the mean over outputs is below the first's, ``[observers, N]``."""
    levels = 10 * np.log10(totals + _FLOOR).mean(2)
    return np.asarray(levels[:1] - levels)
