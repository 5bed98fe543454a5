"""Pools and instance norms that PyTorch's exporter does not write, or not well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
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


_AVERAGE = (
    *("input", "kernel_size", "stride", "padding"),
    *("ceil_mode", "count_include_pad", "divisor_override"),
)


def _averaged(usual: Callable[..., Tensor], axes: int, *args: Any, **given: Any) -> Tensor:
    """Divide sums over windows by a number of the module's own, which PyTorch's exporter drops.

    The mean of a window that lies within the padding is the sum over the number of its elements.
    With ``ceil_mode`` the last window may lie beyond, so that zeros are put there.

    Args:
        usual: PyTorch's function.
        axes: how many at the end are pooled.
        args: as those of PyTorch's function, the first one ``[..., *lengths]``.

    Returns:
        ``[..., *windows]``.
    """
    keys = given | dict(zip(_AVERAGE, args, strict=False))
    divisor = keys.pop("divisor_override", None)
    if divisor is None:
        return usual(**keys)
    values = keys["input"]
    kernel, step, edge = (
        [sizes] * axes if isinstance(sizes, int) else list(sizes) * (axes // len(sizes))
        for sizes in (
            keys["kernel_size"],
            keys.get("stride") or keys["kernel_size"],
            keys.get("padding", 0),
        )
    )
    if keys.get("ceil_mode"):
        around: list[int] = []
        for length, k, s, p in zip(values.shape[-axes:], kernel, step, edge, strict=True):
            last = (length + 2 * p - k + s - 1) // s * s
            if last >= length + p:  # PyTorch leaves out windows that begin behind the values
                last -= s
            around[:0] = [p, max(0, last + k - length - p)]
        values, edge = functional.pad(values, around), [0] * axes
    pooled: Tensor = usual(values, kernel, step, edge) * (prod(kernel) / divisor)
    return pooled


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize as PyTorch's function does, by statistics that are given as a batch norm."""
    given = (running_mean, running_var, weight, bias)
    if use_input_stats or running_mean is None:
        usual = functional.instance_norm
        return usual(x, *given, use_input_stats, momentum, eps)
    return functional.batch_norm(x, *given, eps=eps)


POOLS_AND_NORMS: Mapping[Any, Callable[..., Tensor]] = {
    functional.adaptive_max_pool1d: partial(_pooled, functional.adaptive_max_pool1d, torch.amax, 1),
    functional.adaptive_max_pool2d: partial(_pooled, functional.adaptive_max_pool2d, torch.amax, 2),
    functional.adaptive_max_pool3d: partial(_pooled, functional.adaptive_max_pool3d, torch.amax, 3),
    functional.adaptive_avg_pool3d: partial(_pooled, functional.adaptive_avg_pool3d, torch.mean, 3),
    functional.avg_pool2d: partial(_averaged, functional.avg_pool2d, 2),
    functional.avg_pool3d: partial(_averaged, functional.avg_pool3d, 3),
    functional.instance_norm: _instance_norm,
}
"""What replaces PyTorch's functions, where no indices are asked for."""
