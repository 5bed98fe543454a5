"""One named tensor of a model, as a checkpoint lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from compressor.types.quantized import WeightCodes


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A parameter or buffer under its own name; nothing is read before it is asked for.

    Attributes:
        name: its name in the checkpoint.
        shape: its shape.
        dtype: its element type, such as ``torch.bfloat16``.
        read: returns the float tensor; a view of the file where it is memory-mapped.
        codes: what is stored in its place, if it has been quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    codes: WeightCodes | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored; codes are packed."""
        if self.codes is None:
            return self.elements * self.dtype.itemsize
        layer = self.codes.layer
        return self.codes.scheme.nbytes(layer.rows, layer.columns)
