"""Batches of one size from batches of any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from compressor.types.tensors import Batch


def regroup(batches: Iterable[Batch], size: int, limit: int | None = None) -> Iterator[Batch]:
    """Yield the same samples in batches of ``size``, the last perhaps smaller.

    At most ``limit`` samples, and no batch beyond those is asked for. All batches have the same
    names, dtypes and shapes but for the first axis.
    """
    if size < 1:
        raise ValueError(f"batches of {size} samples")
    parts: list[Batch] = []
    have = 0
    for batch in _limited(batches, limit):
        parts.append(batch)
        have += length(batch)
        while have >= size:
            joined = _join(parts)
            yield cut(joined, 0, size)
            have -= size
            parts = [cut(joined, size, None)] if have else []
    if have:
        yield _join(parts)


def length(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))


def cut(batch: Batch, start: int, stop: int | None) -> Batch:
    """Return the samples of a batch from ``start`` to ``stop``."""
    return {name: array[start:stop] for name, array in batch.items()}


def _limited(batches: Iterable[Batch], limit: int | None) -> Iterator[Batch]:
    if limit is None:
        yield from batches
        return
    if limit <= 0:
        return
    for batch in batches:
        yield cut(batch, 0, limit)
        limit -= length(batch)
        if limit <= 0:
            return


def _join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
