"""Rows and groups of a matrix as the axes of arithmetic on it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compressor.types.quantized import Scheme

_CHUNK = 1 << 19  # elements worked on at once, so that intermediate results stay in the cache


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


def row_chunks(blocks: Tensor, elements: int = _CHUNK) -> list[slice]:
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


def extremes(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each group, zero included.

    Args:
        blocks: ``[rows, groups, columns of a group]``.
        scheme: for granularity ``tensor`` all groups count as one.

    Returns:
        Two float64 tensors ``[rows, groups]``, or ``[1, 1]`` for granularity ``tensor``.
    """
    rows, groups, width = blocks.shape
    exact = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    low, high = (torch.zeros(rows, groups, dtype=exact) for _ in range(2))
    # One pass each for the least and the greatest: their joint operator is ten times slower.
    for part, values in converted_chunks(blocks, exact) if width else []:
        torch.amin(values, -1, out=low[part])
        torch.amax(values, -1, out=high[part])
    if scheme.granularity == "tensor" and rows:
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    return low.to(torch.float64).clamp(max=0), high.to(torch.float64).clamp(min=0)
