"""Second moment of a layer's inputs, which rounding that minds the layer's output needs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from calibration.moments import Moment, Window, add_patches, add_vectors, enough, merge
from compressor.types.observer import Observer


class SecondMoment(Observer[Moment, torch.Tensor | None]):
    """``Σ x xᵀ`` over a layer's inputs ``x``: vectors, or with a kernel the patches it sees.

    Observation stops once there are 16 times as many vectors as columns; what follows would
    sharpen the moment and cost more than the rest of calibration. The result is float32
    ``[groups, columns, columns]``; planning gets ``None``.
    """

    name: ClassVar[str] = "second-moment"

    kernel: tuple[int, int] | None = Field(default=None, description="kernel of a 2-D convolution")
    strides: tuple[int, int] = Field(default=(1, 1), description="its strides")
    pads: tuple[int, int, int, int] = Field(default=(0, 0, 0, 0), description="its pads")
    dilations: tuple[int, int] = Field(default=(1, 1), description="its dilations")
    groups: int = Field(default=1, ge=1, description="its channel groups")

    def start(self) -> Moment:
        """Return the moment of nothing."""
        return Moment(None, 0)

    def update(self, state: Moment, values: torch.Tensor) -> Moment:
        """Return the state after also seeing ``values``."""
        if enough(state):
            return state
        if self.kernel is None:
            return add_vectors(state, values)
        window = Window(self.kernel, self.strides, self.pads, self.dilations, self.groups)
        return add_patches(state, values, window)

    def merge(self, first: Moment, second: Moment) -> Moment:
        """Return the moment of both streams."""
        return merge(first, second)

    def result(self, state: Moment) -> torch.Tensor | None:
        """Return the moment, ``[groups, columns, columns]``; raises ``ValueError`` if empty."""
        if state.total is None:
            raise ValueError("nothing was observed")
        return state.total

    def placeholder(self) -> torch.Tensor | None:
        """Return ``None``: a plan needs no moment."""
        return None
