"""What a stored tensor stands for: its floats, or its codes dequantized."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from compressor.files import disk_errors
from compressor.models.checkpoint.reading import RowReader
from compressor.types.layers import StoredTensor

_ELEMENTS = 4 << 20  # that are found at once
_MATRIX = 2


def dequantized(tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor in its stored shape; codes as the floats that they stand for, in float32."""
    value = tensor.read()
    return value if tensor.codes is None else _dequantized(tensor, value)


def mapped_dequantized(tensor: StoredTensor, folder: Path | None) -> torch.Tensor:
    """Return the same; a matrix in a mapped file without a name, found some rows at a time.

    Args:
        folder: where the file is made; ``None`` is that of the system's temporary files.

    Raises:
        InputError: the disk is full.
    """
    if len(tensor.shape) != _MATRIX:
        return dequantized(tensor)
    dtype = tensor.dtype if tensor.codes is None else torch.float32
    return mapped((rows.to(dtype) for rows in _parts(tensor)), tensor.shape, dtype, folder)


def mapped_floats(tensor: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """Return a tensor in float32; one of several axes in a mapped file, unless it is float32.

    Args:
        folder: as above.

    Raises:
        InputError: the disk is full.
    """
    if tensor.dim() < _MATRIX or tensor.dtype == torch.float32 or not tensor.numel():
        return tensor.to(torch.float32)
    rows = max(1, _ELEMENTS * len(tensor) // tensor.numel())
    parts = (part.to(torch.float32) for part in torch.split(tensor, rows))
    return mapped(parts, tensor.shape, torch.float32, folder)


def mapped(
    parts: Iterable[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    folder: Path | None = None,
) -> torch.Tensor:
    """Return a tensor in a mapped file without a name: no anonymous memory holds it.

    Args:
        parts: some of its rows after the other, of that type.
        folder: as above.

    Raises:
        InputError: the disk is full.
    """
    folder = folder or Path(tempfile.gettempdir())
    with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "values"
        with path.open("wb") as stream:
            for part in parts:
                stream.write(part.contiguous().view(torch.uint8).numpy().data)
        # The mapping outlives the name.
        flat = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype)
    return flat.reshape(tuple(shape))


def _parts(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    read, by_rows = tensor.read, tensor.codes is None or tensor.codes.by_rows
    if not isinstance(read, RowReader) or not by_rows:
        yield dequantized(tensor)
        return
    rows = tensor.shape[0]
    step = max(1, _ELEMENTS * rows // tensor.elements // read.multiple) * read.multiple
    for start in range(0, rows, step):
        value = read.rows(start, min(start + step, rows))
        yield value if tensor.codes is None else tensor.codes.compute(value).dequantize()


def _dequantized(tensor: StoredTensor, value: torch.Tensor) -> torch.Tensor:
    assert tensor.codes is not None
    layer = tensor.codes.layer
    return layer.stored(tensor.codes.compute(layer.canonical(value)).dequantize())
