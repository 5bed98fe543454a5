"""Inputs that are read in Python: shapes, axes, bounds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def integers(x: Tensor) -> list[int]:
    """Return the elements of a tensor as integers, in a flat list."""
    return [int(value) for value in x.reshape(-1).tolist()]


def scalar(x: Tensor) -> int:
    """Return the only element of a tensor as an integer."""
    return int(x.item())


def positive(axes: Iterable[int], rank: int) -> list[int]:
    """Count axes from the front.

    Raises:
        IndexError: there is no such axis.
    """
    counted = [axis + rank if axis < 0 else axis for axis in axes]
    for axis in counted:
        if not 0 <= axis < rank:
            raise IndexError(f"axis {axis} is outside a tensor of {rank} axes")
    return counted
