"""Norm of each column of a layer's inputs, which says how much the weights in it count."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.moments import Window, patch_vectors
from compressor.types.statistics import Observer

Squares = torch.Tensor | None


class ColumnNorm(Observer[Squares, Squares]):
    """l2 norm of each element of a layer's inputs: of vectors, or with a kernel of patches.

    That is the root of the diagonal of ``second-moment``, in memory that grows with the columns
    and not with their square. The result is float32 ``[groups, columns]``; planning gets ``None``.
    """

    name: ClassVar[str] = "column-norm"

    kernel: tuple[int, int] | None = Field(default=None, description="kernel of a 2-D convolution")
    strides: tuple[int, int] = Field(default=(1, 1), description="its strides")
    pads: tuple[int, int, int, int] = Field(default=(0, 0, 0, 0), description="its pads")
    dilations: tuple[int, int] = Field(default=(1, 1), description="its dilations")
    groups: int = Field(default=1, ge=1, description="its channel groups")

    def start(self) -> Squares:
        """Return the sums of nothing."""
        return None

    def update(self, state: Squares, values: torch.Tensor) -> Squares:
        """Return the sums of squares with those of ``values`` added."""
        if self.kernel is None:
            vectors = values.reshape(-1, values.shape[-1]).T[None]
        else:
            window = Window(self.kernel, self.strides, self.pads, self.dilations, self.groups)
            vectors = patch_vectors(values, window)
        return self.merge(state, vectors.to(torch.float64).square().sum(2))

    def merge(self, first: Squares, second: Squares) -> Squares:
        """Return the sums of both streams."""
        if first is None or second is None:
            return second if first is None else first
        return first + second

    def result(self, state: Squares) -> Squares:
        """Return the norms; raises ``ValueError`` if nothing was observed."""
        if state is None:
            raise ValueError("nothing was observed")
        return state.sqrt().to(torch.float32)

    def placeholder(self) -> Squares:
        """Return ``None``: a plan needs no norm."""
        return None
