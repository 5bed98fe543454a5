"""Statistics of inputs: second moments, and whether values lie on an even grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compressor.types.statistics import ChannelGrid, Moments

_POSITIONS = 64  # of a feature map that are looked at in each sample


@dataclass(frozen=True)
class Window:
    """The patches of a feature map that a convolution sees."""

    kernel: tuple[int, int]  # lengths over the spatial axes
    strides: tuple[int, int] = (1, 1)  # steps between patches
    # zeros before and after, as ONNX orders them: all beginnings, then all ends
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)  # steps between the elements of a patch
    groups: int = 1  # channel groups, each with its own moment


def add_vectors(state: Moments | None, values: Tensor) -> Moments | None:
    """Add the vectors along the last axis of ``values``."""
    return merge_moments(
        state, _moments(values.reshape(-1, values.shape[-1]).to(torch.float32).T[None])
    )


def add_patches(state: Moments | None, values: Tensor, window: Window) -> Moments | None:
    """Add the patches of feature maps ``[batch, channels, height, width]``.

    About 64 patches of each sample are taken, on an even grid, since neighbouring patches are
    almost the same.
    """
    return merge_moments(state, _moments(patch_vectors(values, window)))


def patch_vectors(values: Tensor, window: Window) -> Tensor:
    """Return about 64 patches of each feature map, as vectors ``[groups, columns, rows]``.

    Args:
        values: ``[batch, channels, height, width]``.
    """
    top, left, bottom, right = window.pads
    padded = functional.pad(values.to(torch.float32), (left, right, top, bottom))
    step = _grid_step(padded, window)
    strides = (window.strides[0] * step, window.strides[1] * step)
    patches = functional.unfold(padded, window.kernel, dilation=window.dilations, stride=strides)
    batch, _, positions = patches.shape
    grouped = patches.reshape(batch, window.groups, -1, positions)
    return grouped.permute(1, 2, 0, 3).reshape(window.groups, grouped.shape[2], -1)


def merge_moments(first: Moments | None, second: Moments | None) -> Moments | None:
    """Return the moments of both streams; ``None`` stands for an empty stream."""
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


_MOST = 256
_FEWEST = 32  # distinct levels below which a grid could be a coincidence
_TOLERANCE = 0.01  # of a step


@dataclass(frozen=True, eq=False)
class Levels:
    """The distinct values of each channel."""

    channels: tuple[Tensor, ...] = ()  # sorted values, one tensor a channel; empty before any
    scattered: bool = False  # some channel has more values than a grid could


def add_levels(state: Levels, values: Tensor) -> Levels:
    """Return the levels after also seeing ``values``, ``[batch, channels, ...]``."""
    if state.scattered or values.ndim < 2:
        return Levels(scattered=True)
    levels = []
    for channel in values.transpose(0, 1).reshape(values.shape[1], -1):
        if torch.unique(channel[: 4 * _MOST]).numel() > _MOST:  # cheap, and decides most cases
            return Levels(scattered=True)
        levels.append(torch.unique(channel))
    return merge_levels(state, Levels(tuple(levels)))


def merge_levels(first: Levels, second: Levels) -> Levels:
    """Return the levels of both streams."""
    if first.scattered or second.scattered:
        return Levels(scattered=True)
    if not first.channels or not second.channels:
        return first if first.channels else second
    joined = tuple(
        torch.unique(torch.cat(pair)) for pair in zip(first.channels, second.channels, strict=True)
    )
    if any(channel.numel() > _MOST for channel in joined):
        return Levels(scattered=True)
    return Levels(joined)


def fit_levels(state: Levels) -> ChannelGrid | None:
    """Return the grid that all channels lie on, or ``None``.

    Levels that were not seen are left half below and half above those that were.
    """
    fitted = [_fit_channel(channel.to(torch.float64)) for channel in state.channels]
    grids = [f for f in fitted if f is not None]
    if state.scattered or not grids or len(grids) < len(fitted):
        return None
    return ChannelGrid(tuple(f[0] for f in grids), tuple(f[1] for f in grids))


def _fit_channel(levels: Tensor) -> tuple[float, float] | None:
    if levels.numel() < _FEWEST:
        return None
    least = float(levels[0])
    span = float(levels[-1]) - least
    gap = float(levels.diff().min())
    steps = round(span / gap)
    if steps >= _MOST:
        return None
    step = span / steps
    places = (levels - least) / step
    if float((places - places.round()).abs().max()) > _TOLERANCE:
        return None
    spare = (_MOST - 1 - steps) // 2
    return step, least - spare * step
