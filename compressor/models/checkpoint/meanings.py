"""What a stored tensor means: its floats, or what its codes stand for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from compressor.files import disk_errors
from compressor.models.checkpoint.reading import RowReader
from compressor.types.layers import StoredTensor

_ELEMENTS = 4 << 20  # that are found at once
_MATRIX = 2


def meant(tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor's values, in its stored shape; codes as float32."""
    value = tensor.read()
    return value if tensor.codes is None else _dequantized(tensor, value)


def mapped_meaning(tensor: StoredTensor) -> torch.Tensor:
    """Return the same; a matrix in a mapped file without a name, found some rows at a time.

    Raises:
        InputError: the disk is full.
    """
    if len(tensor.shape) != _MATRIX:
        return meant(tensor)
    dtype = tensor.dtype if tensor.codes is None else torch.float32
    with tempfile.TemporaryDirectory() as folder, disk_errors(Path(folder)):
        path = Path(folder) / "values"
        with path.open("wb") as stream:
            for rows in _parts(tensor):
                stream.write(rows.to(dtype).contiguous().view(torch.uint8).numpy().data)
        # The mapping outlives the name.
        flat = torch.from_file(str(path), shared=True, size=tensor.elements, dtype=dtype)
    return flat.reshape(tensor.shape)


def _parts(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    read, by_rows = tensor.read, tensor.codes is None or tensor.codes.by_rows
    if not isinstance(read, RowReader) or not by_rows:
        yield meant(tensor)
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
