"""How important units are: scores over whole groups, from weights, gradients or activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float64

from compressor.types.channels import Units

Scores = NDArray[np.float64]


def position_sums(tensor: Tensor, axis: int) -> Scores:
    """Return the sums at each position of an axis, over all other axes.

    Args:
        tensor: of any shape.
        axis: one of its axes, ``n`` long.

    Returns:
        ``[n]``, summed in double precision.
    """
    rest = [i for i in range(tensor.ndim) if i != axis]
    summed = tensor.sum(rest, dtype=float64) if rest else tensor.to(float64)
    found: Scores = summed.cpu().numpy()
    return found


def powers(weight: Tensor, norm: int) -> Tensor:
    """Return the terms of a norm: absolute values (1) or squares (2), in float32 at least."""
    wide = weight.detach()
    wide = wide if wide.dtype.itemsize >= 4 else wide.float()
    return wide.abs() if norm == 1 else wide.square()


def unit_sums(positions: Scores, axis: Units, count: int) -> Scores:
    """Add up what belongs to each unit.

    Args:
        positions: one number for each position of an axis.
        axis: the unit at each; -1 for none.
        count: units of the model.

    Returns:
        ``[count]``; 0 for units that do not lie on the axis.
    """
    owned = axis >= 0
    found: Scores = np.bincount(axis[owned], weights=positions[owned], minlength=count).astype(
        np.float64
    )
    return found


def unit_means(positions: Scores, axis: Units, count: int) -> Scores:
    """Average what belongs to each unit; arguments and result as in :func:`unit_sums`."""
    owned = axis >= 0
    sizes = np.bincount(axis[owned], minlength=count)
    return unit_sums(positions, axis, count) / np.maximum(sizes, 1)


def magnitude(terms: Sequence[Scores]) -> Scores:
    """Return the size of everything that a unit consists of, ``mean over members of sum |w|^p``.

    The members' weights lie in one vector, so that a wide convolution counts for more than a
    normalization's single scale. No root is taken: within a group the order is that of the norm,
    and across groups powers tell small units from middling ones, as G. Fang et al. score them
    (DepGraph, 2023, arXiv:2301.12900, section 3.3, who sum over a group).

    Args:
        terms: for each member the sums of :func:`powers`, ``[n]``.
    """
    mean: Scores = np.mean(terms, axis=0)
    return mean


def average(terms: Sequence[Scores]) -> Scores:
    """Average over members in units of each member's own mean, ``[n]``.

    For what has no common unit, such as activations before and after an activation function.
    """
    mean: Scores = np.mean([normalized(t) for t in terms], axis=0)
    return mean


def normalized(scores: Scores) -> Scores:
    """Divide by the mean, so that groups compare; all zeros stay."""
    mean = scores.mean() if scores.size else 0.0
    return scores / mean if mean > 0 else scores


def cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """Return the share of weights that are to be zero at a step of training.

    ``final + (initial - final) * (1 - t)^3``, with ``t`` growing from 0 at ``begin`` to 1 at
    ``end``: many weights go while there are plenty, few at the end. M. Zhu and S. Gupta, To prune,
    or not to prune, 2017 (arXiv:1710.01878), section 3.

    Args:
        step: the step, of which there may be some before ``begin`` and after ``end``.
        begin: the last step with the initial share.
        end: the first step with the final share.
        final: share of zeros at the end, 0 to 1.
        initial: share of zeros at the beginning, not above ``final``.

    Raises:
        ValueError: a share is out of range, the shares fall, or ``end`` lies before ``begin``.
    """
    if not 0 <= initial <= final <= 1:
        raise ValueError(f"shares {initial} and {final} do not rise within 0 to 1")
    if end < begin:
        raise ValueError(f"step {end} lies before step {begin}")
    if step >= end:
        return final
    if step <= begin:
        return initial
    left = 1 - (step - begin) / (end - begin)
    return final + (initial - final) * left**3
