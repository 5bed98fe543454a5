"""Tensors in pieces: which rows make a block, and what is stored of it where."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm

import torch

from compressor.errors import ModelError
from compressor.exporters.safetensors.compressed_tensors import (
    row_multiple,
    stored_entries,
    stored_tensors,
)
from compressor.exporters.safetensors.stream_plan import entries_of
from compressor.models.checkpoint.reading import RowReader
from compressor.types.quantized import WeightCodes
from compressor.types.tensors import StoredTensor


def pieces(tensor: StoredTensor, elements: int) -> list[tuple[int, int]]:
    """Divide a tensor's rows into blocks that can be read and computed by themselves.

    Args:
        tensor: the tensor; one that does not lie in a file is one block.
        elements: about how many of them make a block.

    Returns:
        First row and the row after the last of each block; at least one, which may be empty.
    """
    rows = _rows(tensor)
    if not isinstance(tensor.read, RowReader):
        return [(0, rows)]
    return _cuts(tensor, elements)


def _cuts(tensor: StoredTensor, elements: int) -> list[tuple[int, int]]:
    rows = _rows(tensor)
    if not tensor.elements or (tensor.codes is not None and not tensor.codes.by_rows):
        return [(0, rows)]
    multiple = 1 if tensor.codes is None else row_multiple(tensor.codes.scheme)
    if isinstance(tensor.read, RowReader):
        multiple = lcm(multiple, tensor.read.multiple)  # so that no two blocks read the same rows
    step = max(1, elements * rows // tensor.elements // multiple) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def block_tensors(
    tensor: StoredTensor, start: int, stop: int, elements: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Compute what is stored of some rows of a tensor.

    Args:
        tensor: the tensor.
        start: first row, one at which :func:`pieces` starts a block.
        stop: the row after the last.
        elements: about how many of them are worked on at once.

    Yields:
        The stored tensor's name, a part of its elements, and the byte of it at which they go.

    Raises:
        ModelError: a weight that is quantized holds NaN or infinity.
    """
    if isinstance(tensor.read, RowReader):
        yield from _stored(tensor, tensor.read.rows(start, stop), start)
        return
    values = tensor.read()
    values = values if values.dim() else values.reshape(1)
    for first, last in _cuts(tensor, elements):
        yield from _stored(tensor, values[first:last], first)


def _stored(
    tensor: StoredTensor, rows: torch.Tensor, start: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    if tensor.codes is None:
        (entry,) = entries_of(tensor)
        yield entry.name, rows, entry.offset(start)
        return
    _check_finite(tensor.name, rows)
    made = stored_tensors(tensor, tensor.codes.compute(_matrix(tensor.codes, rows)))
    for entry in stored_entries(tensor):
        if start == 0 or entry.row_bits:  # what belongs to no row is the same in every block
            yield entry.name, made[entry.name], entry.offset(start)


def _matrix(codes: WeightCodes, rows: torch.Tensor) -> torch.Tensor:
    """Bring rows into canonical form; the layout has only matrices, whose rows are canonical."""
    return rows.reshape(len(rows), -1) if codes.by_rows else codes.layer.canonical(rows)


def _check_finite(name: str, values: torch.Tensor) -> None:
    # A sum is not finite if a summand is not. One of large numbers may overflow as well. Asked for
    # in another type, it would take ten times as long; it is added up in float32 as it is.
    if bool(values.sum().isfinite()):
        return
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ModelError(
            f"tensor {name!r}",
            f"holds {bad} values that are NaN or infinite",
            "the training diverged or the file is damaged; use an earlier checkpoint",
        )


def _rows(tensor: StoredTensor) -> int:
    return tensor.shape[0] if tensor.shape else 1


# From <malloc.h>. Setting either ends glibc's own adjustment of both; these are what it starts at.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_DEFAULT = 128 << 10
_LARGEST = 32 << 20  # the most that older versions take as bound between heap and maps


@contextmanager
def kept_memory(nbytes: int) -> Iterator[None]:
    """Keep up to so many freed bytes a thread within the block; give back what is free after it.

    Has no effect with a C library that is not glibc.

    Args:
        nbytes: at the end of each heap, of which a thread has one.
    """
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, nbytes)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _DEFAULT)
        libc.mallopt(_TRIM_THRESHOLD, _DEFAULT)
        libc.malloc_trim(ctypes.c_size_t(0))
