"""Codes of weights that are quantized some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch

from compressor.passes.quantize.floating import nvfp4_tensor_scale
from compressor.passes.quantize.nearest import RangeSearch, round_to_nearest
from compressor.types.quantized import QuantizedTensor, Scheme


class Nvfp4Rows:
    """Rounds rows of one weight to nvfp4, whose scales share a scale of the whole weight.

    Args:
        scheme: an nvfp4 scheme.
        search: how the scales of groups are found.
        read: yields all rows of the weight in canonical form, some at a time; called when codes
            are first wanted.
    """

    def __init__(
        self, scheme: Scheme, search: RangeSearch, read: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self._scheme = scheme
        self._search: RangeSearch = search
        self._read = read

    def __call__(self, matrix: torch.Tensor) -> QuantizedTensor:
        """Return the codes of some rows, ``[rows, columns]``."""
        return round_to_nearest(matrix, self._scheme, self._search, self._tensor_scale)

    @cached_property
    def _tensor_scale(self) -> torch.Tensor:
        parts = [rows.abs().amax() for rows in self._read()]
        return nvfp4_tensor_scale(torch.stack(parts).amax().to(torch.float32))
