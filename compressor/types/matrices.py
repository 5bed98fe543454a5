"""Weights as matrices: their rows and groups, and how far an approximation is from them."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, log10

import torch
from torch import Tensor

from compressor.errors import ModelError
from compressor.types.layers import Layer, Scheme

_CONVERTED_AT_ONCE = 1 << 19  # elements, so that intermediate results stay in the cache
_SUMMED_AT_ONCE = 1 << 18


def in_groups(matrix: Tensor, scheme: Scheme) -> Tensor:
    """View a matrix as ``[rows, groups, columns of a group]``.

    Args:
        matrix: ``[rows, columns]``.
        scheme: how its codes are represented; without groups, a row is one.

    Raises:
        ValueError: the columns do not divide into the scheme's groups.
    """
    rows, columns = matrix.shape
    width = columns
    if scheme.granularity == "group":
        width = scheme.group or 0
        if width < 1 or columns % width:
            raise ValueError(f"{columns} columns do not divide into groups of {scheme.group}")
    return matrix.reshape(rows, columns // width if columns else 1, width)


def row_chunks(blocks: Tensor, elements: int = _CONVERTED_AT_ONCE) -> list[slice]:
    """Cut the first axis so that a piece has about so many elements, and one row at least."""
    rows = blocks.shape[0]
    step = max(1, elements * rows // max(blocks.numel(), 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def converted_chunks(blocks: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Copy the pieces of :func:`row_chunks` one after the other into one buffer.

    A buffer for each piece would cost more than the arithmetic: memory of such sizes goes back to
    the system when it is freed, and comes from there page by page.

    Args:
        blocks: of any shape.
        dtype: the buffer's.

    Yields:
        A slice of the first axis, and its values; they last until the next piece is asked for, and
        may be changed.
    """
    parts = row_chunks(blocks)
    first = blocks[parts[0]] if parts else blocks
    buffer = torch.empty(first.shape, dtype=dtype)
    for part in parts:
        piece = blocks[part]
        yield part, buffer[: len(piece)].copy_(piece)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float | None:
    """Return the signal to noise ratio, ``10 log10(Σ reference² / Σ (reference - approx)²)``.

    >>> round(sqnr_db(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])), 1)
    20.0

    Returns:
        Decibels; ``None`` where the error or the signal is zero.

    Raises:
        ValueError: shapes differ or a value is not finite.
    """
    if reference.shape != approximation.shape:
        raise ValueError(f"shapes {tuple(reference.shape)} and {tuple(approximation.shape)} differ")
    signal = noise = 0.0
    before, after = reference.reshape(-1), approximation.reshape(-1)
    for start in range(0, before.numel(), _SUMMED_AT_ONCE):
        exact = before[start : start + _SUMMED_AT_ONCE].to(torch.float64)
        signal += float(exact.square().sum())
        noise += float((exact - after[start : start + _SUMMED_AT_ONCE]).square().sum())
    if not isfinite(signal + noise):
        raise ValueError("a value is not finite")
    return None if noise == 0 or signal == 0 else 10 * log10(signal / noise)


def check_finite(layer: Layer, matrix: Tensor) -> None:
    """Raise :class:`ModelError` if a layer's weight holds NaN or infinite values."""
    if not bool(torch.isfinite(matrix).all()):
        raise ModelError(
            f"layer {layer.name!r}",
            "its weight holds values that are NaN or infinite",
            "the training diverged or the file is damaged; use an earlier checkpoint",
        )
