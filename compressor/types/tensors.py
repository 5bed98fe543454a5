"""Batches of named arrays, and the descriptions of named tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Batch: TypeAlias = dict[str, Array]
"""Arrays by name, each with the batch as its first axis."""


@dataclass(frozen=True)
class TensorSpec:
    """A model input or output.

    Attributes:
        name: its name in the graph.
        shape: one entry an axis; a string names a dynamic axis, ``None`` is unknown.
        dtype: a numpy dtype name such as ``float32``.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str

    def __str__(self) -> str:
        axes = ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} {self.dtype}[{axes}]"

    def mismatch(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """Return how an array of this shape and dtype differs from the description, or ``None``."""
        if dtype != self.dtype:
            return f"dtype is {dtype}, the model expects {self.dtype}"
        fits = len(shape) == len(self.shape) and all(
            not isinstance(want, int) or want == have
            for want, have in zip(self.shape, shape, strict=True)
        )
        if fits:
            return None
        return f"shape is {list(shape)}, the model expects {self}"
