"""Adaptive pools whose windows differ in size, for which PyTorch's exporter has no function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _pooled(
    usual: Callable[..., Tensor],
    reduce: Callable[..., Tensor],
    axes: int,
    values: Tensor,
    output_size: int | Sequence[int | None],
    **_: Any,
) -> Tensor:
    """Pool windows of several sizes; PyTorch itself takes apart those of one size.

    A mean or an extreme over a box is one over its rows, and then one over these.

    Args:
        usual: PyTorch's function.
        reduce: ``torch.mean`` or ``torch.amax``.
        axes: how many at the end are pooled.
        values: ``[..., *lengths]``.
        output_size: of each of these axes, or of all; ``None`` leaves one as it is.

    Returns:
        ``[..., *output_size]``.
    """
    sizes = [output_size] * axes if isinstance(output_size, int) else list(output_size)
    wanted = {a: n for a, n in zip(range(-axes, 0), sizes, strict=True) if n is not None}
    if all(size == 1 or values.shape[axis] % size == 0 for axis, size in wanted.items()):
        return usual(values, output_size)
    for axis, size in wanted.items():
        length = values.shape[axis]
        starts = [i * length // size for i in range(size)]
        ends = [-(-(i + 1) * length // size) for i in range(size)]
        parts = [values.narrow(axis, a, b - a) for a, b in zip(starts, ends, strict=True)]
        values = torch.cat([reduce(part, dim=axis, keepdim=True) for part in parts], axis)
    return values


POOLS: Mapping[Any, Callable[..., Tensor]] = {
    usual: partial(_pooled, usual, reduce, axes)
    for usual, reduce, axes in (
        (functional.adaptive_max_pool1d, torch.amax, 1),
        (functional.adaptive_max_pool2d, torch.amax, 2),
        (functional.adaptive_max_pool3d, torch.amax, 3),
        (functional.adaptive_avg_pool3d, torch.mean, 3),
    )
}
"""What replaces PyTorch's functions, where no indices are asked for."""
