"""Find out whether values lie on an even grid of at most 256 levels, as normalized pixels do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.types.statistics import ChannelGrid

_MOST = 256
_FEWEST = 32  # distinct levels below which a grid could be a coincidence
_TOLERANCE = 0.01  # of a step


@dataclass(frozen=True, eq=False)
class Levels:
    """The distinct values of each channel.

    Attributes:
        channels: sorted values, one tensor a channel; empty before any.
        scattered: some channel has more values than a grid could.
    """

    channels: tuple[Tensor, ...] = ()
    scattered: bool = False


def add(state: Levels, values: Tensor) -> Levels:
    """Return the levels after also seeing ``values``, ``[batch, channels, ...]``."""
    if state.scattered or values.ndim < 2:
        return Levels(scattered=True)
    found = []
    for channel in values.transpose(0, 1).reshape(values.shape[1], -1):
        if torch.unique(channel[: 4 * _MOST]).numel() > _MOST:  # cheap, and says it of most data
            return Levels(scattered=True)
        found.append(torch.unique(channel))
    return merge(state, Levels(tuple(found)))


def merge(first: Levels, second: Levels) -> Levels:
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


def fit(state: Levels) -> ChannelGrid | None:
    """Return the grid that all channels lie on, or ``None``.

    Levels that were not seen are left half below and half above those that were.
    """
    fitted = [_fit_channel(channel.to(torch.float64)) for channel in state.channels]
    found = [f for f in fitted if f is not None]
    if state.scattered or not found or len(found) < len(fitted):
        return None
    return ChannelGrid(tuple(f[0] for f in found), tuple(f[1] for f in found))


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
