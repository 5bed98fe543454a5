"""Second moments of what a layer multiplies its weights with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compressor.types.statistics import Moments

_POSITIONS = 64  # of a feature map that are looked at in each sample


@dataclass(frozen=True)
class Window:
    """The patches of a feature map that a convolution sees.

    Attributes:
        kernel: lengths over the spatial axes.
        strides: steps between patches.
        pads: zeros before and after, as ONNX orders them: all beginnings, then all ends.
        dilations: steps between the elements of a patch.
        groups: channel groups, each with its own moment.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1


def add_vectors(state: Moments | None, values: Tensor) -> Moments | None:
    """Add the vectors along the last axis of ``values``."""
    return merge(state, _moments(values.reshape(-1, values.shape[-1]).to(torch.float32).T[None]))


def add_patches(state: Moments | None, values: Tensor, window: Window) -> Moments | None:
    """Add the patches of feature maps ``[batch, channels, height, width]``.

    About 64 patches a sample are taken, on an even grid: neighbouring patches say almost the
    same.
    """
    return merge(state, _moments(patch_vectors(values, window)))


def patch_vectors(values: Tensor, window: Window) -> Tensor:
    """Return about 64 patches of each feature map, as vectors ``[groups, columns, rows]``.

    Args:
        values: ``[batch, channels, height, width]``.
        window: the patches.
    """
    top, left, bottom, right = window.pads
    padded = functional.pad(values.to(torch.float32), (left, right, top, bottom))
    step = _grid_step(padded, window)
    strides = (window.strides[0] * step, window.strides[1] * step)
    patches = functional.unfold(padded, window.kernel, dilation=window.dilations, stride=strides)
    batch, _, positions = patches.shape
    grouped = patches.reshape(batch, window.groups, -1, positions)
    return grouped.permute(1, 2, 0, 3).reshape(window.groups, grouped.shape[2], -1)


def merge(first: Moments | None, second: Moments | None) -> Moments | None:
    """Return the moments of both streams; ``None`` is those of nothing."""
    if first is None or second is None:
        return second if first is None else first
    return Moments(
        first.second + second.second, first.first + second.first, first.rows + second.rows
    )


def _moments(vectors: Tensor) -> Moments:
    """Sum over vectors ``[groups, columns, rows]``."""
    return Moments(vectors @ vectors.transpose(1, 2), vectors.sum(2), vectors.shape[2])


def _grid_step(padded: Tensor, window: Window) -> int:
    """Steps of the window to skip so that about ``_POSITIONS`` patches remain."""
    positions = 1
    for axis in (0, 1):
        span = window.dilations[axis] * (window.kernel[axis] - 1) + 1
        positions *= max(1, (padded.shape[axis + 2] - span) // window.strides[axis] + 1)
    return max(1, round(math.sqrt(positions / _POSITIONS)))
