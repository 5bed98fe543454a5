"""Second moment of a layer's inputs, which rounding that minds the layer's output needs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from compressor.calibration.moments import Window, add_patches, add_vectors, merge
from compressor.types.statistics import Moments, Observer


class SecondMoment(Observer[Moments | None, Moments | None]):
    """``Σ x xᵀ`` over a layer's inputs ``x``: vectors, or with a kernel the patches it sees.

    Observation stops once there are so many vectors a column; what follows would sharpen the
    moment and cost more than the rest of calibration. The sum of the vectors comes with it.
    Planning gets ``None``.
    """

    name: ClassVar[str] = "second-moment"

    kernel: tuple[int, int] | None = Field(default=None, description="kernel of a 2-D convolution")
    strides: tuple[int, int] = Field(default=(1, 1), description="its strides")
    pads: tuple[int, int, int, int] = Field(default=(0, 0, 0, 0), description="its pads")
    dilations: tuple[int, int] = Field(default=(1, 1), description="its dilations")
    groups: int = Field(default=1, ge=1, description="its channel groups")
    rows_per_column: int = Field(
        default=8, ge=1, description="vectors for each of their elements after which to stop"
    )

    def start(self) -> Moments | None:
        """Return the moment of nothing."""
        return None

    def update(self, state: Moments | None, values: torch.Tensor) -> Moments | None:
        """Return the state after also seeing ``values``."""
        if self.share(state) >= 1:
            return state
        if self.kernel is None:
            return add_vectors(state, values)
        window = Window(self.kernel, self.strides, self.pads, self.dilations, self.groups)
        return add_patches(state, values, window)

    def share(self, state: Moments | None) -> float:
        """Return vectors over wanted vectors."""
        if state is None:
            return 0.0
        return state.rows / (self.rows_per_column * state.second.shape[-1])

    def merge(self, first: Moments | None, second: Moments | None) -> Moments | None:
        """Return the moment of both streams."""
        return merge(first, second)

    def result(self, state: Moments | None) -> Moments | None:
        """Return the moments; raises ``ValueError`` if nothing was observed."""
        if state is None:
            raise ValueError("nothing was observed")
        return state

    def placeholder(self) -> Moments | None:
        """Return ``None``: a plan needs no moment."""
        return None
