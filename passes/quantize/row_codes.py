"""Codes of weights that are quantized some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from compressor.types.quantized import QuantizedTensor, Scheme
from passes.quantize.floating import nvfp4_tensor_scale
from passes.quantize.nearest import RangeSearch, round_to_nearest

_ELEMENTS = 1 << 22  # looked at together, so that a mapped weight is never all in memory


class Nvfp4Rows:
    """Rounds rows of one weight to nvfp4, whose scales share a scale of the whole weight.

    Args:
        scheme: an nvfp4 scheme.
        search: how the scales of groups are found.
        read: returns the whole weight in canonical form; called when rows are first wanted.
    """

    def __init__(
        self, scheme: Scheme, search: RangeSearch, read: Callable[[], torch.Tensor]
    ) -> None:
        self._scheme = scheme
        self._search: RangeSearch = search
        self._read = read

    def __call__(self, matrix: torch.Tensor) -> QuantizedTensor:
        """Return the codes of some rows, ``[rows, columns]``."""
        return round_to_nearest(matrix, self._scheme, self._search, self._tensor_scale)

    @cached_property
    def _tensor_scale(self) -> torch.Tensor:
        matrix = self._read()
        step = max(1, _ELEMENTS // max(matrix.shape[1], 1))
        starts = range(0, matrix.shape[0], step)
        parts = [matrix[start : start + step].abs().amax() for start in starts]
        return nvfp4_tensor_scale(torch.stack(parts).amax().to(torch.float32))
