"""Statistics of inputs: the patches that convolutions see, and whether values lie on a grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_POSITIONS = 64  # of a feature map that are looked at in each sample


def patch_vectors(
    values: Tensor,
    kernel: tuple[int, int],
    strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilations: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Return about 64 patches of each feature map, as vectors ``[groups, columns, rows]``.

    They lie on an even grid, since neighbouring patches are almost the same.

    >>> patch_vectors(torch.zeros(2, 3, 8, 8), kernel=(3, 3)).shape
    torch.Size([1, 27, 72])

    Args:
        values: ``[batch, channels, height, width]``.
        kernel: lengths over the spatial axes.
        strides: steps between patches.
        pads: zeros before and after, as ONNX orders them: all beginnings, then all ends.
        dilations: steps between the elements of a patch.
        groups: channel groups.
    """
    top, left, bottom, right = pads
    values = values.to(torch.float32)
    if (top, left) != (bottom, right):
        values = functional.pad(values, (left, right, top, bottom))
        top = left = 0
    positions = 1
    for axis, pad in enumerate((top, left)):
        span = dilations[axis] * (kernel[axis] - 1) + 1
        length = values.shape[axis + 2] + 2 * pad
        positions *= max(1, (length - span) // strides[axis] + 1)
    step = max(1, round(math.sqrt(positions / _POSITIONS)))  # so that about 64 patches remain
    stride = (strides[0] * step, strides[1] * step)
    if kernel == (1, 1) and not top and not left:
        patches = values[:, :, :: stride[0], :: stride[1]].flatten(2)
    else:
        patches = functional.unfold(values, kernel, dilations, (top, left), stride)
    batch, _, positions = patches.shape
    grouped = patches.reshape(batch, groups, -1, positions)
    return grouped.permute(1, 2, 0, 3).reshape(groups, grouped.shape[2], -1)


MOST_LEVELS = 256
_FEWEST = 32  # distinct levels below which a grid could be a coincidence
_TOLERANCE = 0.01  # of a step


def fit_grid(levels: Tensor) -> tuple[float, float] | None:
    """Return step and offset of the grid that sorted levels lie on, or ``None``.

    Levels that were not seen are left half below and half above those that were.
    """
    if levels.numel() < _FEWEST:
        return None
    least = float(levels[0])
    span = float(levels[-1]) - least
    gap = float(levels.diff().min())
    steps = round(span / gap)
    if steps >= MOST_LEVELS:
        return None
    step = span / steps
    places = (levels - least) / step
    if float((places - places.round()).abs().max()) > _TOLERANCE:
        return None
    spare = (MOST_LEVELS - 1 - steps) // 2
    return step, least - spare * step
