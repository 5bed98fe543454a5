"""The least and greatest of many values, in steps that stay in one thread and its cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

CHUNK = 32768
"""Values a step takes: they stay in the L2 cache, and torch, which starts threads of its own
above this many elements, runs each operation in the thread that calls it."""


def extrema(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and greatest of finite values, ``(inf, -inf)`` if there are none.

    Raises:
        ValueError: a value is not finite.
    """
    low, high = math.inf, -math.inf
    for chunk in chunks(values):
        least, greatest = chunk_extrema(chunk)
        low, high = min(low, least), max(high, greatest)
    return low, high


def chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in float32 or float64 vectors, none of them empty."""
    flat = values.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        if chunk.dtype in (torch.float32, torch.float64):
            yield chunk
        else:  # half precisions fit float32 exactly, integers (to 2 ** 53) fit float64
            yield chunk.to(torch.float32 if chunk.is_floating_point() else torch.float64)


def chunk_extrema(chunk: torch.Tensor) -> tuple[float, float]:
    """Return the least and greatest of one chunk; raises as ``extrema`` does."""
    low, high = (bound.item() + 0.0 for bound in chunk.aminmax())  # -0.0 + 0.0 is 0.0
    if not (math.isfinite(low) and math.isfinite(high)):  # both are NaN if any value is
        raise ValueError("some of the values are not finite")
    return low, high
