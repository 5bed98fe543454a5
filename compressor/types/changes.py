"""Weights that are computed from other weights when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compressor.types.layers import Layer


@dataclass(frozen=True, eq=False)
class WeightChange:
    """What becomes of a layer's float weight, found when it is wanted.

    Attributes:
        layer: whose weight it is.
        compute: takes rows of the weight in canonical form, and the number of the first of them;
            returns what they become, in their shape and dtype. Pure, so it may be called again,
            in any order and by several threads.
        multiple: ``compute`` may be given some of the rows at a time, from a multiple of so many
            up to another or to the end; ``None`` where it wants all of them.
    """

    layer: Layer
    compute: Callable[[torch.Tensor, int], torch.Tensor]
    multiple: int | None = 1

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what a whole weight becomes; both are in their stored shape."""
        return self.layer.stored(self.compute(self.layer.canonical(weight), 0))
