"""Refuse weights that no method can work with."""

from __future__ import annotations

import torch

from compressor.errors import ModelError
from compressor.types.layers import Layer


def check_finite(layer: Layer, matrix: torch.Tensor) -> None:
    """Raise ``ModelError`` where values of a layer's weight are NaN or infinite."""
    if not bool(torch.isfinite(matrix).all()):
        raise ModelError(
            f"layer {layer.name!r}",
            "its weight holds values that are NaN or infinite",
            "the training diverged or the file is damaged; use an earlier checkpoint",
        )
